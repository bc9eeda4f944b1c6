"""The commands `report` and `compare`: tables of all results, and two runs against each other."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llava_consensus.cli import terminal
from llava_consensus.cli.arguments import Command, add_out
from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import read_text, write_out
from llava_consensus.evaluation.shapes import misread

if TYPE_CHECKING:
    from llava_consensus.evaluation.report.rows import Catalogue, Row
    from llava_consensus.evaluation.report.section import Section


CHANGED = "llava-consensus verify RUN tells what was changed in which run"
MOST = 10  # holes of a grid that are named
FORMATS = ("table", "markdown", "csv", "latex", "brief")


def add(command: Command) -> None:
    """Adds both commands."""
    parser = command("report", report, "tables of all results: Markdown, CSV, LaTeX")
    add_out(parser)
    line = "of what is printed (table in a terminal, else markdown)"
    parser.add_argument("--format", choices=FORMATS, help=line)
    parser.add_argument("--write", type=Path, action="append", default=[], metavar="FILE", help="between its markers")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="between its markers, the scores alone")
    parser.add_argument(
        "--preset", metavar="NAME", help="only its runs, wherever they come from, its budgets apart: results"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="with --preset: its runs of the first questions")
    parser.add_argument("--complete", action="store_true", help="refuse runs that are not whole, and grids with holes")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also all tables as Markdown")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also every cell as a line of CSV")
    parser.add_argument("--latex", type=Path, metavar="FILE", help="also all tables as LaTeX (booktabs)")
    parser.add_argument("--bench", type=Path, metavar="FILE", help="measured times (bench.json in DIR)")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="also draw score against tokens, by benchmark")
    parser.add_argument("--methods-figure", type=Path, metavar="FILE", help="also draw each method against the others")
    parser = command("compare", compare, "two runs against each other, by question")
    for letter in ("A", "B"):
        parser.add_argument(
            f"run_{letter.lower()}", metavar=f"RUN_{letter}", help="folder of a run, or its name's start"
        )
    add_out(parser)


def report(arguments: argparse.Namespace) -> Iterator[str]:
    """Writes the files that were asked for; returns the tables in the format that was.

    Raises:
        DataError: a page without markers, a damaged run, a folder that does not exist, nothing to draw.
    """
    from llava_consensus.evaluation.report import results
    from llava_consensus.evaluation.report.rows import read_rows
    from llava_consensus.evaluation.report.table import BEGIN, END, replace_block

    if not arguments.out.is_dir():
        raise DataError(
            f"--out {arguments.out}: no such folder of results. An evaluation makes one: llava-consensus eval"
        )
    with misread(f"{arguments.out}: a file of a run", CHANGED):
        rows = read_rows(arguments.out, known())
        found, absent = _of_preset(arguments, rows) if arguments.preset else _of_folder(rows)
        bench = results.read_bench(arguments.bench or arguments.out / results.BENCH)
    if arguments.complete and absent:
        _refuse(absent)
    pages = [(path, "markdown") for path in arguments.write]
    pages += [(arguments.summary, "brief")] if arguments.summary else []
    shown = arguments.format or ("table" if sys.stdout.isatty() else "markdown")
    wanted = {shown, *(name for _, name in pages)} - {"table"}
    files = [(name, path) for name in ("markdown", "csv", "latex") if (path := getattr(arguments, name))]
    wanted |= {name for name, _ in files}
    with misread(f"{arguments.out}: a file of a run", CHANGED):
        texts = {name: results.FORMATS[name](found, bench) for name in wanted}
    for path, name in pages:
        if not path.is_file():
            raise DataError(f"{path}: no such file. It needs the two lines {BEGIN} and {END}")
        write_out(path, replace_block(read_text(path), texts[name], str(path)).encode())
    for name, path in files:
        write_out(_parent(path), texts[name].encode())
    _draw(arguments, found)
    if shown != "table":
        yield texts[shown]
        return
    if not found:
        yield results.NOTHING
    for section in found:
        head = terminal.printable(results.title(section).replace("**", ""))
        yield terminal.Rendered(terminal.coloured(head, terminal.BOLD, sys.stdout))
        yield from terminal.tables(results.section_tables(section, bench))


def _of_folder(rows: "Sequence[Row]") -> "tuple[list[Section], list[str]]":
    """All runs in sections, and what keeps them from being whole grids of all questions."""
    from llava_consensus.evaluation.report import results

    found = results.in_sections(rows)
    missing = [] if found else ["there are no runs"]
    for section in found:
        missing += [line for row in section.rows for line in _not_whole(row)]
        for line in section.lines:
            absent = [name for name in section.names if name not in line.runs]
            missing += [f"{line.label} {line.tokens}: no run on {', '.join(absent)}"] if absent else []
    return found, missing


def _not_whole(row: "Row") -> list[str]:
    """What a run lacks."""
    from llava_consensus.paper.matched import lack

    name, limit = f"{row.benchmark} {row.label} {row.tokens}", row.config["limit"]
    if limit is not None:
        return [f"{name}: the first {limit} questions only"]
    why = lack(row)
    return [f"{name}: {why}"] if why else []


def _of_preset(arguments: argparse.Namespace, rows: "Sequence[Row]") -> "tuple[list[Section], list[str]]":
    """The runs that a preset asks for, and which of them there are not."""
    from llava_consensus.cli.arguments import one_word_method
    from llava_consensus.evaluation.runs.configuration import describe_reduction
    from llava_consensus.paper import matched, preset
    from llava_consensus.reduction.budget import budget

    chosen = preset.read(arguments.preset)
    if arguments.limit is not None:
        chosen = replace(chosen, limits=dict.fromkeys(chosen.benchmarks, arguments.limit))
    wanted = [describe_reduction(one_word_method(row.method), budget(row.tokens, row.merged)) for row in chosen.rows]
    found = matched.sections(chosen, wanted, rows)
    return found, matched.missing(chosen, wanted, found)


def _refuse(missing: Sequence[str]) -> None:
    """Raises DataError that names the first of what is missing."""
    shown = "".join(f"\n  {one}" for one in missing[:MOST])
    rest = f"\n  and {len(missing) - MOST} more" if len(missing) > MOST else ""
    raise DataError(f"the grid is not complete, so no page is written from it:{shown}{rest}")


def known() -> "Catalogue":
    """What methods and benchmarks are called, for runs that are not finished or were written before runs said it."""
    from llava_consensus.evaluation.benchmarks import BENCHMARKS
    from llava_consensus.evaluation.report.rows import Catalogue, Facts
    from llava_consensus.methods import METHODS

    methods = {name: METHODS.title(name) for name in METHODS}
    facts = {name: Facts(one.title, one.scale, one.column, one.guess) for name, one in BENCHMARKS.items()}
    return Catalogue(methods, facts)


def _draw(arguments: argparse.Namespace, found: list["Section"]) -> None:
    if arguments.figure or arguments.methods_figure:
        from llava_consensus.paper.figures import accuracy, style

        with style.sheet():
            if arguments.figure:
                accuracy.score_against_tokens(found, _parent(arguments.figure))
            if arguments.methods_figure:
                accuracy.methods_apart(found, _parent(arguments.methods_figure))


def _parent(path: Path) -> Path:
    """The path itself, once its folder is known to exist."""
    if not path.parent.is_dir():
        raise DataError(f"{path}: no folder {path.parent}")
    return path


def compare(arguments: argparse.Namespace) -> Iterator[str]:
    """Two runs of a benchmark, paired by question, as text."""
    from llava_consensus.evaluation.report import versus

    with misread(f"{arguments.run_a} or {arguments.run_b}", CHANGED):
        runs = [versus.find(name, arguments.out) for name in (arguments.run_a, arguments.run_b)]
        found = versus.lines(*runs)
    yield from found
