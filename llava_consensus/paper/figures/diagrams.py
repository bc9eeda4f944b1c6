"""Diagrams that need no results: F5, the way of a picture through ConsensusDrop; F8, its two fusers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from llava_consensus.paper.figures import style
from llava_consensus.paper.material import Material

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VISION, CROSS, BOTH, PLAIN = "#56B4E9", "#F0C27A", "#D9A9C6", "#ECECEC"  # light enough for black letters
INK = "#222222"


class Box(NamedTuple):
    """A box by its middle, size and words."""

    x: float
    y: float
    width: float
    height: float
    words: str
    colour: str = PLAIN


def pipeline(_: Material) -> "Figure":
    """F5: what is read where, and what is kept and merged."""
    figure, panel = _canvas(7.2, 3.1)
    picture = Box(0.7, 2.3, 1.2, 0.55, "picture")
    tower = Box(2.6, 2.3, 1.6, 0.65, "vision tower\n(frozen)", VISION)
    projector = Box(5.0, 2.3, 1.4, 0.55, "projector")
    question = Box(0.7, 0.45, 1.2, 0.55, "question")
    probe = Box(
        4.55, 0.45, 2.5, 0.75, "SCAP: queries and keys of\nthe language model's first\nlayer, cross saliency", CROSS
    )
    class_attention = Box(2.6, 1.35, 2.3, 0.6, "attention of the class\ntoken: vision saliency", VISION)
    fuser = Box(7.0, 1.1, 1.2, 0.7, "fuser\n(F8)", BOTH)
    keep = Box(9.1, 1.75, 1.9, 0.6, "keep the best K\nas they are")
    merge = Box(9.1, 0.55, 1.9, 0.8, "EGTM: merge the\nrest into M by the\ntower's keys\nand features", VISION)
    model = Box(11.4, 1.1, 1.7, 0.9, "language model\n(frozen) reads\nK + M tokens", CROSS)
    for box in (picture, tower, projector, question, probe, class_attention, fuser, keep, merge, model):
        _draw(panel, box)
    for start, end in (
        (picture, tower),
        (tower, projector),
        (question, probe),
        (fuser, keep),
        (fuser, merge),
        (class_attention, fuser),
        (probe, fuser),
        (keep, model),
        (merge, model),
    ):
        _arrow(panel, _side(start, end), _side(end, start))
    _arrow(panel, (2.6, 1.97), (2.6, 1.65))
    _arrow(panel, (5.0, 2.02), (5.0, 0.83), "N tokens")
    angled = {**ARROW, "connectionstyle": "angle,angleA=0,angleB=90,rad=4"}
    panel.annotate("", (9.1, 2.05), (5.7, 2.3), arrowprops=angled)
    panel.text(7.4, 2.37, "N projected tokens", fontsize=7, ha="center", color=INK)
    _limits(panel, (0, 12.35), (0, 2.75))
    return figure


def fusers(_: Material) -> "Figure":
    """F8: convex fusion and recovery, on the same six tokens."""
    figure, panel = _canvas(7.2, 3.0)
    vision, cross = (0.10, 0.40, 0.05, 0.20, 0.05, 0.20), (0.30, 0.05, 0.25, 0.10, 0.25, 0.05)
    fused = [0.7 * one + 0.3 * other for one, other in zip(vision, cross, strict=True)]
    _row(panel, (1.7, 2.5), "vision saliency", vision, VISION)
    _row(panel, (1.7, 1.75), "cross saliency", cross, CROSS)
    panel.text(3.2, 3.2, "Convex: alpha x vision + (1 - alpha) x cross", ha="center", fontsize=8.5, weight="bold")
    _row(panel, (1.7, 0.6), "fused, alpha 0.7", fused, BOTH, kept=(1, 3))
    _arrow(panel, (3.2, 1.66), (3.2, 1.32))
    panel.text(3.2, 0.2, "the best K are kept (K = 2, framed)", ha="center", fontsize=7.5)
    panel.plot([6.25, 6.25], [0.1, 3.3], color="#bbbbbb", linewidth=0.8)
    panel.text(9.4, 3.2, "Recovery: student first, teacher adds", ha="center", fontsize=8.5, weight="bold")
    _row(panel, (7.9, 2.5), "student: vision", vision, VISION, kept=(1, 3))
    _row(panel, (7.9, 1.75), "teacher: cross", cross, CROSS, kept=(0, 2))
    _arrow(panel, (9.4, 1.66), (9.4, 1.32))
    _row(panel, (7.9, 0.6), "kept", vision, PLAIN, kept=(0, 1, 2, 3), from_teacher=(0, 2))
    panel.text(
        9.4,
        0.0,
        "K = 4, rate 0.5: the student's best 2, then the teacher's\nbest 2 that are not kept yet",
        ha="center",
        fontsize=7.5,
    )
    _limits(panel, (0, 12), (-0.15, 3.45))
    return figure


ARROW = {"arrowstyle": "-|>", "color": INK, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}


def _canvas(width: float, height: float) -> "tuple[Figure, Axes]":
    figure, (panel,) = style.panels(1, 1, (width, height))
    panel.set_axis_off()
    return figure, panel


def _limits(panel: "Axes", across: tuple[float, float], up: tuple[float, float]) -> None:
    panel.set_xlim(*across)
    panel.set_ylim(*up)


def _draw(panel: "Axes", box: Box) -> None:
    from matplotlib.patches import FancyBboxPatch

    corner = box.x - box.width / 2, box.y - box.height / 2
    panel.add_patch(
        FancyBboxPatch(
            corner,
            box.width,
            box.height,
            "round,pad=0,rounding_size=0.08",
            facecolor=box.colour,
            edgecolor=INK,
            linewidth=0.8,
        )
    )
    panel.text(box.x, box.y, box.words, ha="center", va="center", fontsize=7, color=INK)


def _side(box: Box, other: Box) -> tuple[float, float]:
    """The point of a box's edge that faces another one across."""
    step = box.width / 2 if other.x > box.x else -box.width / 2
    return box.x + step, box.y


def _arrow(panel: "Axes", start: tuple[float, float], end: tuple[float, float], words: str = "") -> None:
    panel.annotate("", end, start, arrowprops=ARROW)
    if words:
        panel.text((start[0] + end[0]) / 2 + 0.08, (start[1] + end[1]) / 2 + 0.35, words, fontsize=7, color=INK)


def _row(
    panel: "Axes",
    corner: tuple[float, float],
    words: str,
    values: Sequence[float],
    colour: str,
    kept: Sequence[int] = (),
    from_teacher: Sequence[int] = (),
) -> None:
    """Six tokens as bars of a height by their value; kept ones framed."""
    from matplotlib.patches import Rectangle

    left, bottom = corner
    panel.text(left - 0.15, bottom + 0.2, words, ha="right", va="center", fontsize=7.5)
    for place, value in enumerate(values):
        shade = CROSS if place in from_teacher else VISION if from_teacher and place in kept else colour
        height = 0.35 if from_teacher else 1.3 * value
        area = (left + 0.5 * place, bottom)
        if not from_teacher or place in kept:
            panel.add_patch(Rectangle(area, 0.4, height, facecolor=shade, edgecolor="none"))
        edge, width = (INK, 1.3) if place in kept else ("#bbbbbb", 0.6)
        panel.add_patch(Rectangle(area, 0.4, 0.58, facecolor="none", edgecolor=edge, linewidth=width))
        panel.text(area[0] + 0.2, bottom + 0.5, str(place), ha="center", va="center", fontsize=5.5, color="#555555")
