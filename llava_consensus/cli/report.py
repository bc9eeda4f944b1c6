"""The commands `report`, `report compare` (two runs, by question) and `report import` (results of other tools)."""

import argparse
import tarfile
from collections.abc import Iterator
from pathlib import Path
from shutil import unpack_archive
from typing import Any

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import arg, command
from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation.files import misread

CHANGED = "Move the folder of that run away; the same command makes it again"


@command(
    "report",
    arguments.OUT_DIR,
    arguments.FORMAT,
    arg("--against", metavar="METHOD", help="compare this method with each other one, paired by question"),
    examples=("report", "report --against consensusdrop", "report --format csv"),
)
def report(given: argparse.Namespace) -> Iterator[Any]:
    """Tables of all results: Markdown, CSV, LaTeX."""
    from llava_consensus.evaluation.report import section
    from llava_consensus.evaluation.report.rows import FULL, read_rows
    from llava_consensus.paper.results import read_benches

    check_results(given.out)
    with misread(f"{given.out}: a file of a run", CHANGED):
        bench = [row for content in read_benches(given.out) for row in content["rows"]]
        yield section.written(section.in_sections(read_rows(given.out), given.against or FULL, bench), given.format)


def check_results(out: Path) -> None:
    if not out.is_dir():
        raise DataError(f"--out {out}: no such folder of results. An evaluation makes one: llava-consensus eval")


@command(
    "report compare",
    *(arg(f"run_{one.lower()}", metavar=f"RUN_{one}", help="folder of a run, or its name's start") for one in "AB"),
    arg("--out", default=argparse.SUPPRESS, type=Path, metavar="DIR", help="folder of results (results)"),
    examples=("report compare gqa-consensusdrop-64 gqa-random-64",),
)
def compare(given: argparse.Namespace) -> Iterator[str]:
    """Two runs against each other, question by question: difference, interval, p."""
    from llava_consensus.evaluation.report import versus

    with misread(f"{given.run_a} or {given.run_b}", CHANGED):
        runs = [versus.find(name, given.out) for name in (given.run_a, given.run_b)]
        found = versus.lines(*runs)
    yield from found


@command(
    "report import",
    arg(
        "file",
        type=Path,
        metavar="FILE",
        help="of lmms-eval, a table, LLaVA's answers, or an archive of runs",
    ),
    arg("--data", type=Path, metavar="DIR", help="FILE is LLaVA's answers: score them by the benchmark's files here"),
    arg("--benchmark", metavar="NAME", help="name of the benchmark: the same for files to be compared"),
    arg("--method", metavar="NAME", help="name of the method in tables; full for all tokens"),
    arg("--tokens", type=int, metavar="T", help="visual tokens it kept (all)"),
    arg("--model", metavar="NAME", help="name of the model"),
    arg("--metric", metavar="NAME", help="of several metrics of lmms-eval, the score"),
    arg("--out", default=argparse.SUPPRESS, type=Path, metavar="DIR", help="folder of results (results)"),
    examples=(
        "report import pope_samples.jsonl --benchmark pope --method stride --tokens 64 --model gemma-4-e4b",
        "report import answers.jsonl --data playground/data --benchmark pope --method full --model llava-v1.5-7b",
    ),
)
def import_(given: argparse.Namespace) -> Iterator[str]:
    """Per-question results of lmms-eval, or answers in LLaVA's format, as a run that can be compared."""
    from llava_consensus.evaluation import benchmarks
    from llava_consensus.evaluation.report.imported import ColumnNames, Origin, import_answers, import_file

    if given.file.is_file() and tarfile.is_tarfile(given.file):
        unpack_archive(given.file, given.out, filter="data")
        yield str(given.out)
        return
    missing = [f"--{name}" for name in ("benchmark", "method", "model") if getattr(given, name) is None]
    if missing:
        raise OptionError(f"{given.file}: give {', '.join(missing)}, which only an archive of runs says itself")
    origin = Origin(given.benchmark, given.model, given.method, given.tokens)
    if given.data:
        yield str(import_answers(given.file, origin, given.out, benchmarks.make(given.benchmark), given.data))
    else:
        yield str(import_file(given.file, origin, given.out, ColumnNames(right=given.metric or "")))
