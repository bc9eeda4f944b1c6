"""Examples, drawn (F1, F19 to F30): what vision alone, the question alone and both together keep of a picture.

`whole` draws one example in four parts, as the paper's F21 to F30: original and selections; heat maps and the overlap
of both sets; the same across budgets. `rows` draws several in a row each (F19, F20; F1: one picture with two
questions), `methods` what every method keeps (the gallery). Needs the extra `plots`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from llava_consensus.evaluation.report import overlay
from llava_consensus.paper.figures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VISION, CROSS, BOTH = "vision-only", "cross-only", "ConsensusDrop"
COLOURS = {VISION: "#009E73", CROSS: "#0072B2", BOTH: "#CC79A7"}  # green, blue, magenta, as in the paper
SHARED = "#E69F00"  # patches in both sets
WIDTH = 1.75  # of a panel in inches
PIXELS = (480, 480)  # of the longer side of a panel
PLAIN = "#444444"


@dataclass(frozen=True)
class KeptPatches:
    """Patches that one method kept of a picture at one budget, and the answer."""

    tokens: int
    kept: Sequence[int]
    merged: Sequence[int] = ()
    answer: str = ""
    right: bool | None = None  # None where it is not known


@dataclass(frozen=True)
class Example:
    """A picture, a question and what was kept."""

    image: Image.Image  # as the model's processor saw it
    side: int  # patches in a row
    question: str  # without instructions on the form of the answer
    truth: str = ""  # the right answer; empty where it is not known
    full: str = ""  # the answer with all tokens
    vision: Sequence[float] | None = None  # saliencies of the patches; None where a method has none
    cross: Sequence[float] | None = None
    fused: Sequence[float] | None = None
    selections: Mapping[str, Sequence[KeptPatches]] = field(default_factory=dict)  # by label, most tokens first
    disagreement: float | None = None  # 1 less the overlap of the two sides' best K


def whole(example: Example, tokens: int) -> "Figure":
    """One example in four parts."""
    budgets = [one.tokens for one in example.selections[BOTH]]
    figure, panels = _grid(2 + len(COLOURS), max(4, len(budgets)), example)
    seen = _view(example.image, example.side)
    _compare(panels[0], seen, example, tokens)
    _saliencies(panels[1], seen, example, tokens)
    for label, row in zip(COLOURS, panels[2:], strict=True):
        for panel, chosen in zip(row, example.selections[label], strict=False):
            _selection(panel, seen, chosen, COLOURS[label])
            panel.set_title(_counts(label, chosen, seen), fontsize=7)
            _answer(panel, chosen)
    _legend(figure, fill(_asked(example), 110))
    return _literal(figure)


def rows(examples: Sequence[Example], tokens: int) -> "Figure":
    """Several examples, a row each: original, vision-only, cross-only, consensus."""
    figure, panels = _grid(len(examples), 4, examples[0], words=0.85)
    for row, example in zip(panels, examples, strict=True):
        _compare(row, _view(example.image, example.side), example, tokens)
        row[0].set_xlabel(fill(_asked(example), 38), fontsize=6.5)
    _legend(figure, sides=False)
    return _literal(figure)


def methods(image: Image.Image, side: int, chosen: Mapping[str, KeptPatches], words: str) -> "Figure":
    """A picture and the patches that every method keeps of it, with a caption that names the model."""
    figure, panels = _grid(-(-(len(chosen) + 1) // 4), 4, Example(image, side, ""))
    seen = _view(image, side)
    places = [panel for row in panels for panel in row]
    _show(places[0], overlay.picture(seen))
    places[0].set_title("the photograph", fontsize=7)
    for number, (panel, (label, one)) in enumerate(zip(places[1:], chosen.items(), strict=False)):
        colour = COLOURS.get(label, style.look(number).colour)
        _selection(panel, seen, one, colour)
        panel.set_title(_counts(label, one, seen), fontsize=7)
        _answer(panel, one)
    _legend(figure, fill(words, 108), sides=False)
    return _literal(figure)


def _literal(figure: "Figure") -> Any:
    """The figure with every text as it is: in a question or an answer a $ is no beginning of a formula."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    return figure


def _grid(rows: int, columns: int, example: Example, words: float = 0.55) -> tuple[Any, list[list[Any]]]:
    """A figure with rows of panels of the picture's shape, and room for `words` inches of text below each."""
    height = WIDTH * example.image.height / example.image.width + words
    figure, panels = style.panels(rows * columns, columns, (WIDTH, height))
    for panel in panels:
        panel.set_xticks([])
        panel.set_yticks([])
        panel.spines[:].set_visible(False)
    return figure, [panels[first : first + columns] for first in range(0, rows * columns, columns)]


def _compare(row: Sequence[Any], seen: overlay.View, example: Example, tokens: int) -> None:
    """The original, and what each of three keeps of it."""
    _show(row[0], overlay.picture(seen))
    row[0].set_title("original", fontsize=7)
    if example.full:
        row[0].set_xlabel(f"all tokens: {example.full}", fontsize=6.5)
    for panel, label in zip(row[1:], COLOURS, strict=False):
        chosen = _with(example.selections[label], tokens)
        _selection(panel, seen, chosen, COLOURS[label])
        panel.set_title(_counts(label, chosen, seen), fontsize=7, color=COLOURS[label])
        _answer(panel, chosen)


def _saliencies(row: Sequence[Any], seen: overlay.View, example: Example, tokens: int) -> None:
    """Heat maps of both sides and their fusion, and the overlap of the two sets with the consensus framed."""
    for panel, title, values in zip(
        row,
        ("vision saliency", "cross saliency", "fused"),
        (example.vision, example.cross, example.fused),
        strict=False,
    ):
        if values is not None:
            _show(panel, overlay.heat(seen, values))
        panel.set_title(title, fontsize=7)
    sets = {_rgb(COLOURS[label]): _with(example.selections[label], tokens).kept for label in (VISION, CROSS)}
    consensus = _with(example.selections[BOTH], tokens).kept
    _show(row[3], overlay.overlap(seen, sets, _rgb(SHARED), consensus, _rgb(COLOURS[BOTH])))
    row[3].set_title("both sets, consensus framed", fontsize=7)
    if example.disagreement is not None:
        row[3].set_xlabel(f"disagreement {100 * example.disagreement:.0f} %", fontsize=6.5)


def _view(image: Image.Image, side: int) -> overlay.View:
    return overlay.view(image, (side, side), side=PIXELS)


def _selection(panel: "Axes", seen: overlay.View, chosen: KeptPatches, colour: str) -> None:
    """Kept and merged patches, outlined in a method's colour; all merged tokens look alike."""
    owner = np.full(seen.rows * seen.columns, -1)
    owner[np.asarray([*chosen.kept, *chosen.merged], dtype=int)] = 0
    known = overlay.fates(chosen.kept, [], owner)
    _show(panel, overlay.selection(seen, known, outline=_rgb(colour), apart=False))


def _show(panel: "Axes", drawn: Image.Image) -> None:
    panel.imshow(np.asarray(drawn))


def _rgb(colour: str) -> overlay.Colour:
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return red, green, blue


def _counts(label: str, chosen: KeptPatches, seen: overlay.View) -> str:
    """A method and its tokens; kept ones that show no picture but the padding around it are named."""
    merged, padding = chosen.tokens - len(chosen.kept), overlay.in_padding(seen, chosen.kept)
    return (
        f"{label}\n{len(chosen.kept)} kept"
        + (f", {padding} of them padding" if padding else "")
        + (f" + {merged} merged" if merged > 0 else "")
    )


def _with(selections: Sequence[KeptPatches], tokens: int) -> KeptPatches:
    return next(one for one in selections if one.tokens == tokens)


def _answer(panel: "Axes", chosen: KeptPatches) -> None:
    """The answer, and whether it is right."""
    mark = {True: "right", False: "wrong", None: ""}[chosen.right]
    words = f"{chosen.answer} ({mark})" if mark else chosen.answer
    panel.set_xlabel(
        fill(words, 32),
        fontsize=6.5,
        color="black" if chosen.right is not False else PLAIN,
        style="italic" if chosen.right is False else "normal",
    )


def _asked(example: Example) -> str:
    truth = f" Truth: {example.truth}." if example.truth else ""
    full = f" All tokens: {example.full}." if example.full else ""
    return f"{example.question}{truth}{full}"


def _legend(figure: "Figure", words: str = "", sides: bool = True) -> None:
    """Legend of the colours, and a line of words below."""
    from matplotlib.patches import Patch

    calm = tuple(part / 255 for part in overlay.CALM)
    handles = [
        Patch(facecolor="none", edgecolor="black", label="outlined: kept as it is"),
        Patch(facecolor=calm, label="merged with others"),
        Patch(facecolor="#f4f4f4", edgecolor="#cccccc", label="dropped"),
    ]
    if sides:
        handles += [Patch(facecolor=COLOURS[label], label=f"{label} alone") for label in (VISION, CROSS)]
        handles += [Patch(facecolor=SHARED, label="in both sets")]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=3, title=words or None, title_fontsize=7, fontsize=6.5
    )
