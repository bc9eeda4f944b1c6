"""Commands on answer files, data and runs: `score`, `export`, `verify`, `check-data`, as lines to print.

    llava-consensus score textvqa --answers answers.jsonl --data DIR [--json]
    llava-consensus export vqav2 --answers answers.jsonl --out upload.json --data DIR
    llava-consensus check-data [NAME...] --data DIR

No model is involved; they work on anybody's LLaVA answer files. Printing is left to `cli/__init__.py`.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import Command
from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation.runs import DATA
from llava_consensus.evaluation.shapes import misread


def add(command: Command) -> None:
    """Adds the four commands."""
    for name, lines, line in (
        ("score", score, "score an answer file"),
        ("export", export, "write an answer file in the form the official server or tool takes"),
    ):
        parser = command(name, lines, line)
        parser.add_argument("name", metavar="BENCHMARK", help="see `llava-consensus list`")
        parser.add_argument(
            "--answers", required=True, type=Path, metavar="FILE", help="LLaVA's lines, or an official file or folder"
        )
        arguments.add_data(parser)
        arguments.add_benchmark_option(parser)
        if name == "score":
            parser.add_argument("--json", action="store_true", help="everything measured, as JSON")
        else:
            parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="file, or folder (mme)")
            parser.add_argument("--force", action="store_true", help="write over what is there")
    parser = command("verify", verify, "whether folders of runs are as they were written: answers, scores, metrics")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser = command("check-data", check_data, "which files are there, which are missing and where they come from")
    parser.add_argument("names", nargs="*", metavar="BENCHMARK", help="all of them by default")
    arguments.add_data(parser)
    arguments.add_benchmark_option(parser)


def score(given: argparse.Namespace) -> Iterator[str]:
    """The report of an answer file: for people, or the whole of it as JSON."""
    benchmark = arguments.benchmark(given.name, given)
    with misread(f"{benchmark.place(given.data)}: a file of {benchmark.name}"):
        report = benchmark.score_file(given.answers, given.data)
    if given.json:
        yield json.dumps(report, indent=1)
        return
    value, counts = report.get(benchmark.metric), report.get("counts", {})
    published = f" (LLaVA-1.5-7B as published: {benchmark.paper:g})" if benchmark.paper is not None else ""
    yield f"{benchmark.name}: {benchmark.metric} {'none' if value is None else f'{value:.2f}'}{published}"
    yield "questions: " + ", ".join(f"{name} {count}" for name, count in counts.items())
    shown = {name: one for name, one in report.items() if name not in ("benchmark", "counts", "extracted")}
    yield from table(shown)


def table(values: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """A nested report line by line, fractions with two decimals."""
    for name, value in values.items():
        head, rest = _entry(name, value, indent)
        yield head
        yield from rest


def _entry(name: str, value: Any, indent: str) -> tuple[str, Iterator[str]]:
    """The line of one entry, and the lines below it."""
    deeper = f"{indent}  "
    if isinstance(value, Mapping) and value:
        return f"{indent}{name}:", table(value, deeper)
    if isinstance(value, list) and (name == "official_lines" or any(isinstance(one, Mapping) for one in value)):
        return f"{indent}{name}:", (deeper + _plain(one) for one in value if one)
    return f"{indent}{name}: {_plain(value)}", iter(())


def _plain(value: Any) -> str:
    if isinstance(value, Mapping) and value:
        return ", ".join(f"{key} {_plain(part)}" for key, part in value.items())
    if isinstance(value, list):
        return " ".join(map(_plain, value)) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}" if isinstance(value, float) else "-" if value in (None, {}) else str(value)


def export(given: argparse.Namespace) -> Iterator[str]:
    """Writes a submission; says what is missing, there twice, or no question of the benchmark."""
    from llava_consensus.evaluation import benchmarks
    from llava_consensus.evaluation.benchmarks import submission

    benchmark = arguments.benchmark(given.name, given)
    if benchmark.export is None:
        able = ", ".join(name for name, one in benchmarks.BENCHMARKS.items() if one.export is not None)
        raise OptionError(f"{benchmark.name} has no submission, `score` is all it needs. Those that have: {able}")
    target: Path = given.out
    if not given.force and (target.is_file() or (target.is_dir() and any(target.iterdir()))):
        raise DataError(f"--out {target}: is there already. Give another name, or --force to write over it")
    if not target.parent.is_dir():
        raise DataError(f"--out {target}: no folder {target.parent}")
    with misread(f"{benchmark.place(given.data)}: a file of {benchmark.name}"):
        found = benchmark.export(benchmark.read(given.answers, given.data), given.data, target)
    yield str(target)
    for name, value in found.items():
        if isinstance(value, list):
            yield f"{name}: {len(value)}{': ' + submission.name(value) if value else ''}"
        else:
            yield f"{name}: {value}"


def verify(given: argparse.Namespace) -> Iterator[str]:
    """What is wrong with each run, or that nothing is; DataError at the end if anything was."""
    from llava_consensus.evaluation.runs.checksums import problems

    damaged = []
    for run in given.runs:
        found = problems(run)
        yield from found or [f"{run}: as it was written"]
        damaged += [str(run)] if found else []
    if damaged:
        raise DataError(f"{len(damaged)} of {len(given.runs)} runs are not as they were written: {', '.join(damaged)}")


def check_data(given: argparse.Namespace) -> Iterator[str]:
    """One block for each benchmark; DataError at the end if one that was named is not ready for all it can be."""
    from llava_consensus.evaluation import benchmarks
    from llava_consensus.evaluation.benchmarks.check import check, uses

    unready = []
    for name in given.names or benchmarks.BENCHMARKS:
        benchmark = arguments.benchmark(name, given)
        yield f"{name}: {benchmark.licence or 'licence not noted'}"
        findings = list(check(benchmark, given.data))
        for one in findings:
            yield f"  {one.state:8} " + one.text.replace("\n", "\n           ")
        states = uses(benchmark, given.data, findings)
        yield "  " + "; ".join(f"{use}: {state}" for use, state in states.items())
        unready += [name] if "not ready" in states.values() else []
    if unready and given.data != Path(DATA):
        yield f"official files are fetched by: llava-consensus download-data {' '.join(unready)} --data {given.data}"
    if unready and given.names:
        raise DataError(f"not ready: {', '.join(unready)}. What is missing and where it comes from is said above")
