"""What commands that run a grid share: carry it out, a line for each run, and say what failed."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llava_consensus.cli import arguments

if TYPE_CHECKING:
    from llava_consensus.evaluation.runs.batches import HostLoader
    from llava_consensus.evaluation.runs.sweep import Cell


def carry_out(
    grid: "Sequence[Cell]", given: argparse.Namespace, out: Path | None = None, load: "HostLoader | None" = None
) -> "Iterator[tuple[str, Cell]]":
    """Runs every cell; yields a line about it, and the cell with its result or error.

    Args:
        grid: the runs.
        given: how they are carried out.
        out: their folder; None is `--out`.
        load: instead of `hosts.load`.
    """
    from llava_consensus.evaluation.runs import sweep as grids

    cells = grids.sweep(grid, out or given.out, arguments.execution(given), load)
    for number, cell in enumerate(cells, 1):
        score = cell.result.metrics["score"] if cell.result else None
        became = f"failed: {cell.error}" if cell.error else "no score" if score is None else f"{score:.2f}"
        yield f"[{number}/{len(grid)}] {cell.name}: {became}", cell


def loaded_once(given: argparse.Namespace) -> "HostLoader | None":
    """A loader for several grids in a row that loads the model once; None where workers load it themselves."""
    from llava_consensus import hosts
    from llava_consensus.evaluation.runs.sweep import LoadedOnce

    return LoadedOnce(hosts.load) if given.workers == 1 else None


def folders(cells: "Sequence[Cell]") -> list[Path]:
    """Folders of all runs, in order. Raises the first error of one that failed."""
    for cell in cells:
        if cell.error:
            raise cell.error
    return [cell.result.path for cell in cells if cell.result]
