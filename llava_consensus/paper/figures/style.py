"""Style of figures: one style sheet (`paper.mplstyle`), colours for any eyes, and PNG and SVG in one step.

Colours are those of Okabe and Ito, which colour-blind people can tell apart; whatever has a colour has a marker or a
place of its own as well, so that figures can be read in grey print. Needs the extra `plots`.
"""

import contextlib
import io
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from math import ceil
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from llava_consensus.errors import DataError, missing_extra
from llava_consensus.evaluation.files import write_out

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHEET = "paper.mplstyle"
KINDS = ("png", "svg")
NARROWEST = 3.8  # inches of a figure; captions and keys of one panel need them
INCH_OF_LETTER, INCH_OF_HANDLE = 0.055, 0.5  # of a key
GREY = "#9a9a9a"  # what the paper prints
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


class Look(NamedTuple):
    """Colour and marker of one thing in a figure."""

    colour: str
    marker: str


def look(number: int) -> Look:
    """The look of the number-th thing; they repeat after seven."""
    return Look(PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)])


@contextlib.contextmanager
def sheet() -> Iterator[None]:
    """Applies the style sheet inside the block.

    Raises:
        MissingDependency: without matplotlib.
    """
    matplotlib = _matplotlib()
    with resources.as_file(resources.files(__package__) / SHEET) as path, matplotlib.rc_context(fname=path):
        yield


def panels(
    count: int, columns: int, size: tuple[float, float] = (2.4, 2.1), **options: Any
) -> "tuple[Figure, list[Axes]]":
    """A figure with `count` panels in rows of at most `columns`, each of a width and height in inches."""
    _matplotlib()
    from matplotlib.figure import Figure

    columns = min(columns, count)
    rows = ceil(count / columns)
    width = max(size[0] * columns + 0.2, NARROWEST)
    figure = Figure(figsize=(width, size[1] * rows + 0.4), layout="constrained")
    found = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for panel in found[count:]:
        panel.set_axis_off()
    return figure, found[:count]


def reaches(values: Sequence[float], ends: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Lengths of error bars below and above values."""
    below = [max(0.0, value - low) for value, (low, _) in zip(values, ends, strict=True)]
    above = [max(0.0, high - value) for value, (_, high) in zip(values, ends, strict=True)]
    return below, above


def printed(panel: "Axes", points: Iterable[tuple[float, float]], label: str, line: str = "-") -> None:
    """The paper's numbers in grey, behind ours."""
    panel.plot(*zip(*sorted(points), strict=True), line, color=GREY, marker="x", linewidth=1, label=label, zorder=1)


def key(figure: "Figure", axes: "Sequence[Axes]", columns: int = 4) -> None:
    """One key below a figure for everything that has a label in it."""
    handles = {
        label: handle for panel in axes for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    if handles:
        widest = INCH_OF_HANDLE + INCH_OF_LETTER * max(map(len, handles))
        columns = max(1, min(columns, int(figure.get_figwidth() / widest)))
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=min(columns, len(handles)),
            frameon=False,
        )


def caption(figure: "Figure", words: str) -> None:
    """A line above the panels: what was measured with which model, on how many questions and which device."""
    from textwrap import fill

    if words:
        figure.suptitle(fill(words, max(40, int(17 * figure.get_figwidth()))), fontsize=6.5, color="#444444")


def save(figure: "Figure", file: Path) -> None:
    """One picture, of the kind that its name ends with.

    Raises:
        DataError: for a kind of file that matplotlib does not write, or one that cannot be written.
    """
    content, kind = io.BytesIO(), file.suffix.removeprefix(".") or "png"
    if kind not in figure.canvas.get_supported_filetypes():
        raise DataError(f"{file}: must end with .png, .pdf or .svg")
    figure.savefig(content, format=kind, metadata={"Date": None} if kind == "svg" else None)
    write_out(file, content.getvalue())


def save_all(figure: "Figure", folder: Path, name: str) -> list[Path]:
    """A figure as one file of every kind: `name`.png and `name`.svg."""
    files = [folder / f"{name}.{kind}" for kind in KINDS]
    for file in files:
        save(figure, file)
    return files


def _matplotlib() -> ModuleType:
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise missing_extra("figures (matplotlib)", "plots") from error
    return matplotlib
