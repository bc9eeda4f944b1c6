"""The commands `report` (tables of all results), `report compare` (two runs, by question) and `report import` (results
of other tools as runs).
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import arg, command
from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation.files import misread, read_text, write_out

if TYPE_CHECKING:
    from llava_consensus.evaluation.report.rows import Row
    from llava_consensus.evaluation.report.section import Section

CHANGED = "Move the folder of that run away; the same command makes it again"


@command(
    "report",
    arguments.OUT_DIR,
    arguments.FORMAT,
    arg("--write", type=Path, action="append", default=[], metavar="FILE", help="update FILE between its markers"),
    arg("--against", metavar="METHOD", help="compare this method with each other one, paired by question"),
    arg("--preset", metavar="NAME", help="only the runs of this grid, a table for each of its budgets: results"),
    arg("--limit", type=int, metavar="N", help="with --preset: its runs of the first questions"),
    arg("--sample", type=int, metavar="N", help="with --preset: its runs of N questions drawn at random"),
    arg("--markdown", type=Path, metavar="FILE", help="also all tables as Markdown"),
    arg("--csv", type=Path, metavar="FILE", help="also every cell as a line of CSV"),
    arg("--latex", type=Path, metavar="FILE", help="also all tables as LaTeX (booktabs)"),
    arg("--bench", type=Path, metavar="FILE", help="measured times (bench.json in DIR)"),
    arg("--figure", type=Path, metavar="FILE", help="also draw score against tokens, by benchmark"),
    examples=("report", "report --against consensusdrop", "report --csv tables.csv --latex tables.tex"),
)
def report(given: argparse.Namespace) -> Iterator[Any]:
    """Tables of all results: Markdown, CSV, LaTeX."""
    from llava_consensus.evaluation.report import results
    from llava_consensus.evaluation.report.rows import FULL, read_rows
    from llava_consensus.evaluation.report.table import BEGIN, END, replace_block

    check_results(given.out)
    with misread(f"{given.out}: a file of a run", CHANGED):
        rows = read_rows(given.out)
        found = _of_preset(given, rows) if given.preset else results.in_sections(rows)
        found = [replace(section, against=given.against or FULL) for section in found]
        bench = results.read_bench(given.bench or given.out / results.BENCH)
    wanted = {given.format, *(["markdown"] if given.write else [])}
    files = [(name, path) for name in ("markdown", "csv", "latex") if (path := getattr(given, name))]
    wanted |= {name for name, _ in files}
    with misread(f"{given.out}: a file of a run", CHANGED):
        texts = {name: results.written(found, bench, name) for name in wanted}
    for path in given.write:
        if not path.is_file():
            raise DataError(f"{path}: no such file. It needs the two lines {BEGIN} and {END}")
        write_out(path, replace_block(read_text(path), texts["markdown"], str(path)).encode())
    for name, path in files:
        write_out(in_folder(path), texts[name].encode())
    _draw(given, found)
    yield texts[given.format]


def _of_preset(given: argparse.Namespace, rows: "Sequence[Row]") -> "list[Section]":
    from llava_consensus.paper import preset

    chosen = preset.read(given.preset)
    if given.limit is not None:
        chosen = replace(chosen, limit=given.limit, samples={})
    if given.sample is not None:
        chosen = replace(chosen, samples=dict.fromkeys(chosen.benchmarks, given.sample))
    return preset.sections(chosen, rows)


def _draw(given: argparse.Namespace, found: list["Section"]) -> None:
    if given.figure:
        from llava_consensus.paper import figures

        with figures.sheet():
            figures.score_against_tokens(found, in_folder(given.figure))


def in_folder(path: Path) -> Path:
    if not path.parent.is_dir():
        raise DataError(f"{path}: no folder {path.parent}")
    return path


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
    arg("file", type=Path, metavar="FILE", help="*_samples_*.jsonl of lmms-eval, *_result.xlsx of VLMEvalKit, csv"),
    arg("--data", type=Path, metavar="DIR", help="FILE is LLaVA's answers: score them by the benchmark's files here"),
    arg("--benchmark", required=True, metavar="NAME", help="name of the benchmark: the same for files to be compared"),
    arg("--method", required=True, metavar="NAME", help="name of the method in tables; full for all tokens"),
    arg("--tokens", type=int, metavar="T", help="visual tokens it kept (all)"),
    arg("--model", required=True, metavar="NAME", help="name of the model"),
    arg("--columns", action="append", default=[], metavar="WHAT=NAME", help="column of id, right or image"),
    arg("--where", action="append", default=[], metavar="NAME=VALUE", help="only rows with this value in a column"),
    arg("--out", default=argparse.SUPPRESS, type=Path, metavar="DIR", help="folder of results (results)"),
    examples=(
        "report import pope_samples.jsonl --benchmark pope --method stride --tokens 64 --model gemma-4-e4b",
        "report import answers.jsonl --data playground/data --benchmark pope --method full --model llava-v1.5-7b",
    ),
)
def import_(given: argparse.Namespace) -> Iterator[str]:
    """Per-question results of lmms-eval, VLMEvalKit, LLaVA or any csv, as a run that can be compared."""
    from llava_consensus.evaluation import benchmarks
    from llava_consensus.evaluation.report.imported import ColumnNames, Origin, import_answers, import_file

    named = dict(one.partition("=")[::2] for one in given.columns)
    if wrong := named.keys() - {"id", "right", "picture"}:
        raise OptionError(f"--columns {wrong.pop()}: must be id=NAME, right=NAME or picture=NAME")
    origin = Origin(given.benchmark, given.model, given.method, given.tokens)
    where = dict(one.partition("=")[::2] for one in given.where)
    if given.data:
        if named or where:
            raise OptionError("--columns and --where: are of tables, and with --data FILE is LLaVA's answers")
        yield str(import_answers(given.file, origin, given.out, benchmarks.make(given.benchmark), given.data))
        return
    yield str(import_file(given.file, origin, given.out, ColumnNames(**named), where))
