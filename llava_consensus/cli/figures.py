"""The commands `figures` and `claims`: every figure and every claim of the paper from a folder of results."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from llava_consensus.cli.arguments import Command, add_out
from llava_consensus.cli.tables import CHANGED, known
from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import read_text, write_out
from llava_consensus.evaluation.shapes import misread


def add(command: Command) -> None:
    """Adds both commands."""
    parser = command("figures", figures, "every figure of the paper from result files, as PNG and SVG")
    add_out(parser)
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="where they are written (DIR/figures)")
    parser = command("claims", claims, "the paper's claims, judged by result files")
    add_out(parser)
    parser.add_argument("--write", type=Path, metavar="FILE", help="between the markers of a page")


def figures(given: argparse.Namespace) -> Iterator[str]:
    """Draws what there are results for; names what there are none for, and what makes them.

    Raises:
        DataError: no such folder, or a damaged file in it.
    """
    from llava_consensus.paper import figures as drawings

    check_results(given.out)
    folder = made(given.to or given.out / "figures")
    count = 0
    with misread(f"{given.out}: a file of results", CHANGED):
        for drawn in drawings.draw(drawings.read(given.out, known()), folder):
            count += bool(drawn.files)
            if drawn.files:
                yield f"{drawn.figure.name}: {drawn.figure.title}"
            else:
                yield f"{drawn.figure.name}: not drawn, {drawn.missing}. It comes with: {drawn.figure.makes}"
    yield f"{count} of {len(drawings.FIGURES)} figures are drawn: {folder}"


def made(folder: Path) -> Path:
    """A folder, made where it is missing. DataError where its place is taken by a file."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder}: is a file, and pictures are written to a folder. Give another name")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def claims(given: argparse.Namespace) -> Iterator[str]:
    """The paper's claims, each judged by what is in the folder of results.

    Raises:
        DataError: no such folder, a damaged file in it, or a page without markers.
    """
    from llava_consensus.evaluation.report.table import replace_block
    from llava_consensus.paper import claims as judged
    from llava_consensus.paper import figures as drawings

    check_results(given.out)
    with misread(f"{given.out}: a file of results", CHANGED):
        commands = {figure.name: figure.makes for figure in drawings.FIGURES}
        text = judged.table(drawings.read(given.out, known()), commands)
    if given.write:
        write_out(given.write, replace_block(read_text(given.write), text, str(given.write)).encode())
    yield text


def check_results(out: Path) -> None:
    """Raises DataError unless there is a folder of results."""
    if not out.is_dir():
        raise DataError(f"--out {out}: no such folder of results. An evaluation makes one: llava-consensus eval")
