"""F6 and F7: what accuracy costs, in time to the first token and in cache, at each budget.

Accuracy comes from runs, times from bench.json. Beside a small model the paper's seconds mean nothing, so the lower
panels are in percent of the full model, and there the paper's numbers stand in grey.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.report.rows import FULL, Line
from llava_consensus.evaluation.report.section import Section
from llava_consensus.paper.figures import style
from llava_consensus.paper.figures.material import Material, NotMeasured

METHODS = {"ConsensusDrop": "ConsensusDrop", "VisPruner": "VisPruner", "SparseVLM": "SparseVLM"}  # ours: the paper's
MIB = 2**-20


class Cost(NamedTuple):
    """What is paid for accuracy: its title, its key in bench rows and in the paper's table, and the unit's size."""

    title: str
    key: str
    printed: str
    unit: float


COSTS = (Cost("time to first token (ms)", "ttft_ms", "ttft_ms", 1.0), Cost("KV cache (MiB)", "kv_bytes", "kv_mb", MIB))


class Point(NamedTuple):
    """One method at one budget, as shares of the full model in percent, and as they are."""

    cost: float
    score: float
    cost_share: float
    score_share: float


def pareto(material: Material) -> Any:
    """F6: Acc over time and over cache; below, both in percent of the full model beside the paper's."""
    section, bench = _measured(material)
    figure, panels = style.panels(4, 2, (3.2, 2.4))
    for column, cost in enumerate(COSTS):
        curves = _curves_of(section, bench, cost, None)
        _plain(panels[column], curves, cost, f"Acc over {len(section.averaged)} benchmarks")
        below = panels[2 + column]
        for name in METHODS:
            _grey(below, name, cost, "acc")
        _shares(below, curves, cost, "Acc (% of all tokens)")
    style.key(figure, panels, 4)
    return figure


def per_dataset(material: Material) -> Any:
    """F7: the same against the time to the first token, in percent of the full model, one panel a benchmark."""
    section, bench = _measured(material)
    names = section.averaged
    figure, panels = style.panels(len(names), 4, (2.1, 1.9))
    for panel, name in zip(panels, names, strict=True):
        for method in METHODS:
            _grey(panel, method, COSTS[0], section.catalogue.benchmark(name).column or "")
        curves = _curves_of(section, bench, COSTS[0], name)
        _shares(panel, curves, COSTS[0], "score (%)" if panel is panels[0] else "")
        panel.set_title(section.title(name))
        panel.set_xlabel("time to first token (%)")
    style.key(figure, panels, 4)
    return figure


def _measured(material: Material) -> tuple[Section, Sequence[Mapping[str, Any]]]:
    """The section with most of the methods that are drawn, and the rows of bench.json."""
    counts = [
        sum(section.accuracy(line) is not None for line in section.reduced if line.label in METHODS)
        for section in material.sections
    ]
    if not any(counts):
        raise NotMeasured("no line with an Acc of ConsensusDrop, VisPruner or SparseVLM")
    section = material.sections[counts.index(max(counts))]
    if section.full is None or section.accuracy(section.full) is None:
        raise NotMeasured("no complete runs with all tokens")
    return section, material.bench_of(line.tokens for line in section.reduced if line.label in METHODS)


def _curves_of(
    section: Section, bench: Sequence[Mapping[str, Any]], cost: Cost, name: str | None
) -> dict[str, list[Point]]:
    """The points of every method; NotMeasured where no budget has both a score and a measured cost."""
    curves = {label: _points(section, bench, label, cost, name) for label in METHODS}
    if not any(curves.values()):
        budgets = " ".join(dict.fromkeys(f"{line.tokens:g}" for line in section.reduced if line.label in METHODS))
        raise NotMeasured(f"no bench*.json at the budgets of the runs ({budgets})")
    return curves


def _points(
    section: Section, bench: Sequence[Mapping[str, Any]], label: str, cost: Cost, name: str | None
) -> list[Point]:
    """Budgets of a method that have both a score and a measured cost; of Acc without a benchmark's name."""
    full, points = section.full, []
    assert full is not None
    full_row = next((row for row in bench if row["method"] == FULL), None)
    whole = _score(section, full, name)
    for line in section.reduced:
        score = _score(section, line, name) if line.label == label else None
        row = next((row for row in bench if row["tokens"] == line.tokens and _called(line, row)), None)
        if score is not None and whole and row is not None and full_row is not None:
            share = 100 * row[cost.key] / full_row[cost.key]
            points.append(Point(row[cost.key] * cost.unit, score, share, 100 * score / whole))
    return sorted(points)


def _called(line: Line, row: Mapping[str, Any]) -> bool:
    return any(run.config["method"] == row["method"] and not run.config["changed"] for run in line.runs.values())


def _score(section: Section, line: Line, name: str | None) -> float | None:
    if name is None:
        mean = section.accuracy(line)
        return None if mean is None else mean.value
    run = line.runs.get(name)
    return run.score if run is not None and run.complete else None


def _plain(panel: Any, curves: Mapping[str, Sequence[Point]], cost: Cost, words: str) -> None:
    _curves(panel, {label: [(one.cost, one.score) for one in points] for label, points in curves.items()})
    panel.set(xlabel=cost.title, ylabel=words)


def _shares(panel: Any, curves: Mapping[str, Sequence[Point]], cost: Cost, words: str) -> None:
    _curves(panel, {label: [(one.cost_share, one.score_share) for one in points] for label, points in curves.items()})
    panel.axhline(100, color="black", linestyle=":", linewidth=0.8)
    panel.set(xlabel=f"{cost.title.split(' (')[0]} (% of all tokens)", ylabel=words)


def _curves(panel: Any, curves: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    for number, (label, points) in enumerate(curves.items()):
        colour, marker = style.look(number)
        if points:
            panel.plot(*zip(*points, strict=True), color=colour, marker=marker, label=label)
    panel.grid(True)


def _grey(panel: Any, label: str, cost: Cost, column: str) -> None:
    """A method as the paper's Table 1 prints it, in percent of its full model."""
    rows = paper.tables()[paper.PICTURES]
    full = rows[0]
    own = [row for row in rows if row["method"] == METHODS[label] and column in row and row.get(cost.printed)]
    points = sorted((100 * row[cost.printed] / full[cost.printed], 100 * row[column] / full[column]) for row in own)
    marker = style.look(list(METHODS).index(label)).marker
    if points:
        panel.plot(
            *zip(*points, strict=True),
            color=style.GREY,
            marker=marker,
            markersize=3.5,
            linewidth=0.8,
            label=f"{label}, printed (7B)",
            zorder=1,
        )
