"""F14 and F15: the best setting of each ablation beside the full model, as bars and as a radar."""

from typing import Any

from llava_consensus.evaluation.report.section import Cell
from llava_consensus.paper.figures import radar, style
from llava_consensus.paper.figures.ablations import ABLATIONS, Grid, grid
from llava_consensus.paper.figures.material import Material, NotMeasured

FULL = "all tokens"


def bars(material: Material) -> Any:
    """F14: a group of bars for each benchmark."""
    titles, lines, ends = _best(material)
    figure, (panel,) = style.panels(1, 1, (7.0, 2.8))
    width = 0.85 / len(lines)
    for number, (label, values) in enumerate(lines.items()):
        across = [place + (number - (len(lines) - 1) / 2) * width for place in range(len(titles))]
        colour = style.GREY if label == FULL else style.look(number - 1).colour
        hatch = ("", "", "///", "...", "xxx", "\\\\\\")[number % 6]
        panel.bar(
            across,
            values,
            0.92 * width,
            yerr=style.reaches(values, ends[label]),
            color=colour,
            label=label,
            hatch=hatch,
            edgecolor="white",
            linewidth=0,
            error_kw={"elinewidth": 0.7},
        )
    panel.set_xticks(range(len(titles)), titles)
    panel.set_ylabel("score (%)")
    style.key(figure, [panel], 3)
    return figure


def circle(material: Material) -> Any:
    """F15: the same in percent of the full model."""
    titles, lines, _ = _best(material)
    if FULL not in lines or not all(lines[FULL]):
        raise NotMeasured("no complete runs with all tokens of the ablations' benchmarks")
    shares = {
        label: [100 * value / full for value, full in zip(values, lines[FULL], strict=True)]
        for label, values in lines.items()
        if label != FULL
    }
    figure, (panel,) = style.panels(1, 1, (4.2, 3.4), subplot_kw={"projection": "polar"})
    radar.draw(panel, titles, shares)
    panel.set_title("percent of the score with all tokens", pad=14)
    style.key(figure, [panel], 2)
    return figure


Bounds = tuple[float, float]
Lines = dict[str, list[float]]
Intervals = dict[str, list[Bounds]]


def _best(material: Material) -> tuple[list[str], Lines, Intervals]:
    """Titles of the benchmarks that all ablations have, and by label the best settings' scores and intervals."""
    grids: list[Grid] = []
    for ablation in ABLATIONS:
        try:
            grids.append(grid(material, ablation))
        except NotMeasured:
            continue
    if not grids:
        raise NotMeasured("no ablation with two complete settings")
    names = [name for name in grids[0].names if all(name in one.names for one in grids)]
    if len(names) < 3:
        raise NotMeasured("the ablations have fewer than three benchmarks in common")
    section = grids[0].section
    lines: Lines = {}
    ends: Intervals = {}
    if section.full is not None and all(name in section.full.runs for name in names):
        rows = [section.full.runs[name] for name in names]
        cells = [section.cell(section.full, name) for name in names]
        lines[FULL] = [(row.score or 0.0) / row.facts.scale for row in rows]
        ends[FULL] = [_ends(cell) for cell in cells]
    for one in grids:
        label = f"{one.ablation.title}: {', '.join(map(str, one.best))}"
        lines[label] = [one.percent(one.best, name) for name in names]
        ends[label] = [one.bounds(one.best, name) for name in names]
    return [section.title(name) for name in names], lines, ends


def _ends(cell: Cell | None) -> Bounds:
    """A cell's interval in percent; the score itself where it has none."""
    if cell is None:
        return 0.0, 0.0
    low, high = cell.bounds or (cell.row.score or 0.0,) * 2
    return low / cell.row.facts.scale, high / cell.row.facts.scale
