"""Figures from sections of runs: score against tokens. Needs the extra `plots`.

`llava-consensus report --figure accuracy.png` draws a panel for each benchmark; with many methods the best few have
colours and bands, the rest are grey. Colours are those of Okabe and Ito, which colour-blind people can tell apart;
every coloured line has a marker of its own as well. Bands are 95 % intervals.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llava_consensus.errors import DataError
from llava_consensus.evaluation.report.rows import LINEUP, RANDOM
from llava_consensus.evaluation.report.section import Section
from llava_consensus.paper.figures.style import MARKERS, PALETTE, panels, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS = LINEUP[0].label
STYLES = tuple(zip(PALETTE, MARKERS, strict=True))[:5]  # colour and marker
RANDOM_STYLE = ("#000000", "x")
GREY = "#b5b5b5"
BANDS = 3  # methods with a band where some are grey: ours, the best other, random selection
COLUMNS = 5


class AtBudget(NamedTuple):
    """A method's score at a budget, with its interval where there is one."""

    tokens: float
    score: float
    low: float
    high: float


Curves = Mapping[str, Sequence[AtBudget]]  # by label


def score_against_tokens(sections: Sequence[Section], file: Path) -> None:
    """One panel per benchmark: the score of every method over its budgets, the full model as a line.

    Drawn is the section with most runs.

    Raises:
        DataError: when there is no complete run to draw.
        MissingDependency: without matplotlib.
    """
    section = _largest(sections)
    names = [name for name in section.names if _curves(section, name)]
    figure, axes = panels(len(names), COLUMNS if len(names) > 8 else 4, (3.6, 3.1), sharey=False)
    styles = _styles(section, names)
    for panel, name in zip(axes, names, strict=True):
        _draw(panel, _curves(section, name), styles)
        row, facts = section.full.runs.get(name) if section.full else None, section.catalogue.benchmark(name)
        if row is not None and row.score is not None:
            panel.axhline(row.score, color="black", linestyle=":", linewidth=1, label="all tokens")
        _axes(panel, section, f"{facts.title} ({'%' if facts.scale == 1 else 'points'})")
    handles = {
        label: handle for panel in axes for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    order = [label for label in (*styles, "other methods", "all tokens") if label in handles]
    figure.legend(
        [handles[label] for label in order], order, loc="outside lower center", ncols=min(4, len(order)), frameon=False
    )
    save(figure, file)


def _largest(sections: Sequence[Section]) -> Section:
    """The section with most complete reduced runs."""
    counts = [sum(row.complete for line in section.reduced for row in line.runs.values()) for section in sections]
    if not any(counts):
        raise DataError("no complete run to draw: `make tables` measures them")
    return sections[counts.index(max(counts))]


def _curves(section: Section, name: str) -> Curves:
    """Scores of every method by label, fewest tokens first; budgets that are shares have no place on the axis."""
    curves: dict[str, list[AtBudget]] = {line.label: [] for line in section.reduced}
    for line in (line for line in reversed(section.reduced) if line.tokens >= 1):
        cell = section.cell(line, name)
        if cell is not None and cell.row.complete and cell.row.score is not None:
            value = cell.row.score
            curves[line.label].append(AtBudget(line.tokens, value, *(cell.bounds or (value, value))))
    return {label: points for label, points in curves.items() if points}


def _styles(section: Section, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of the highlighted methods: ours, random selection, and the best others."""
    totals: dict[str, list[float]] = {}
    for name in names:
        scale = section.catalogue.benchmark(name).scale
        for label, points in _curves(section, name).items():
            totals.setdefault(label, []).append(sum(point.score / scale for point in points) / len(points))
    ranked = sorted(totals, key=lambda label: (label != OURS, -sum(totals[label]) / len(totals[label])))
    best = [label for label in ranked if label != RANDOM][: len(STYLES)]
    return dict(zip(best, STYLES, strict=False)) | ({RANDOM: RANDOM_STYLE} if RANDOM in totals else {})


def _draw(panel: "Axes", curves: Curves, styles: Mapping[str, tuple[str, str]]) -> None:
    """Grey lines for methods without a style, below coloured ones with bands."""
    banded = [*list(styles)[: BANDS - 1], RANDOM] if curves.keys() - styles.keys() else list(styles)
    for label, points in curves.items():
        tokens, scores = [point.tokens for point in points], [point.score for point in points]
        if label not in styles:
            panel.plot(tokens, scores, color=GREY, linewidth=0.9, label="other methods", zorder=1)
            continue
        colour, marker = styles[label]
        panel.plot(tokens, scores, color=colour, marker=marker, markersize=4, linewidth=1.4, label=label, zorder=3)
        if label in banded:
            low, high = [point.low for point in points], [point.high for point in points]
            panel.fill_between(tokens, low, high, color=colour, alpha=0.15, linewidth=0, zorder=2)


def _axes(panel: "Axes", section: Section, title: str) -> None:
    """A logarithmic axis of tokens with the budgets as ticks."""
    ticks = sorted({line.tokens for line in section.reduced if line.tokens >= 1})
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.minorticks_off()
    panel.set_xlabel("visual tokens", fontsize=8)
    panel.tick_params(labelsize=8)
    panel.set_title(title, fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)
