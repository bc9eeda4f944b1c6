"""A radar: one axis a benchmark, in percent of a reference."""

from collections.abc import Mapping, Sequence
from math import floor, pi
from typing import Any

from llava_consensus.paper.figures.style import look


def draw(panel: Any, titles: Sequence[str], lines: Mapping[str, Sequence[float]], first: int = 0) -> None:
    """Lines over a circle of benchmarks.

    Args:
        panel: polar axes.
        titles: of the benchmarks.
        lines: by label, a value for each benchmark, in percent of the reference.
        first: number of the first line's look.
    """
    angles = [2 * pi * place / len(titles) for place in range(len(titles))]
    for number, (label, values) in enumerate(lines.items(), start=first):
        colour, marker = look(number)
        closed = [*values, values[0]]
        panel.plot([*angles, angles[0]], closed, color=colour, marker=marker, label=label, linewidth=1.2)
    lowest = min(min(values) for values in lines.values())
    bottom, top = max(0, 10 * floor((lowest - 3) / 10)), max(100.0, *(max(values) for values in lines.values()))
    panel.set_ylim(bottom, 1.02 * top)
    panel.set_yticks([bottom, (bottom + 100) / 2, 100])
    panel.set_xticks(angles, titles)
    panel.set_theta_offset(pi / 2)
    panel.set_rlabel_position(90 / len(titles))
    panel.tick_params(axis="y", labelsize=6, colors="#666666")
    panel.tick_params(axis="x", pad=9)
    panel.grid(True)
