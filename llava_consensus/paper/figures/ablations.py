"""Figures of the ablations: F9 alpha, F10 temperatures, F11 recovery, F12 merged tokens, F13 scores, F14 and F15 the
best of each. What the paper prints stands beside ours in grey: another model on other data, so shapes can be compared
and levels cannot.
"""

from collections.abc import Mapping, Sequence
from math import floor, pi
from typing import Any

from llava_consensus.evaluation.report.section import Cell
from llava_consensus.evaluation.report.stats import Bounds, compare
from llava_consensus.paper.ablations import TITLES, Setting, Settings, settings
from llava_consensus.paper.figures import style
from llava_consensus.paper.material import Material, NotMeasured

FULL = "all tokens"
PAPER = "printed in the paper (LLaVA-1.5-7B)"


def alpha(material: Material) -> Any:
    """F9: scores over alpha, one panel a benchmark, and all of them as a radar."""
    found = settings(material, "alpha")
    figure, panels = style.panels(len(found.names) + 1, 3, (2.4, 2.0))
    for panel, name, title in zip(panels, found.names, found.titles, strict=False):
        _line(panel, found, list(found.cells), [setting[0] for setting in found.cells], name, "ConsensusDrop", 0)
        printed = {setting[0]: scores[name] for setting, scores in found.printed.items() if name in scores}
        _beside(panel, printed)
        panel.set_title(title)
        panel.set_xlabel("alpha")
    spare = panels[-1]
    place = spare.get_subplotspec()
    spare.remove()
    polar = figure.add_subplot(place, projection="polar")
    best = {name: max(found.percent(setting, name) for setting in found.cells) or 1.0 for name in found.names}
    lines = {
        f"alpha {setting[0]:g}": [100 * found.percent(setting, name) / best[name] for name in found.names]
        for setting in found.cells
    }
    _radar(polar, found.titles, lines, first=1)
    polar.set_title("percent of the best alpha", pad=12)
    style.key(figure, [panels[0], polar], 5)
    return figure


def temperature(material: Material) -> Any:
    """F10: a heat map of both temperatures for each benchmark, ours above, the paper's below."""
    found = settings(material, "temperature")
    cells = {setting: values for setting, values in found.cells.items() if _square(found, setting)}
    figure, panels = style.panels(2 * len(found.names), len(found.names), (1.55, 1.5))
    count = len(found.names)
    for number, (name, title) in enumerate(zip(found.names, found.titles, strict=True)):
        ours = {setting: found.percent(setting, name) for setting in cells}
        notes = {}
        for setting in cells:
            low, high = found.cells[setting][name].percent_bounds
            notes[setting] = f"{ours[setting]:.1f}\n± {(high - low) / 2:.1f}"
        _heat(panels[number], ours, notes)
        panels[number].set_title(title)
        printed = {setting: scores[name] for setting, scores in found.printed.items() if name in scores}
        if printed:
            _heat(panels[count + number], printed, {key: f"{value:.1f}" for key, value in printed.items()}, "Greys")
        else:
            panels[count + number].set_axis_off()
    panels[0].set_ylabel("ours\nvision temperature")
    panels[count].set_ylabel("paper\nvision temperature")
    return figure


def recovery(material: Material) -> Any:
    """F11: scores over the recovery rate, one line a student; POPE, which the paper draws, stands first."""
    found = settings(material, "recovery")
    names = sorted(found.names, key=lambda name: name != "pope")
    figure, panels = style.panels(len(names), 3, (2.4, 2.0))
    for panel, name in zip(panels, names, strict=True):
        for number, student in enumerate(("vision", "cross")):
            own = [setting for setting in found.cells if setting[0] == student]
            _line(panel, found, own, [setting[1] for setting in own], name, f"{student} as student", number)
            printed = {
                key[1]: scores[name] for key, scores in found.printed.items() if key[0] == student and name in scores
            }
            _beside(panel, printed, "--" if student == "cross" else "-", f"{PAPER}, {student}")
        panel.set_title(found.section.title(name))
        panel.set_xlabel("recovery rate")
    panels[0].set_ylabel("score (%)")
    style.key(figure, panels, 2)
    return figure


def anchors(material: Material) -> Any:
    """F12: scores over the number of merged tokens, and the improvement over none."""
    found = settings(material, "anchors")
    figure, (left, right) = style.panels(2, 2, (3.3, 2.6))
    across = [setting[0] for setting in found.cells]
    for number, (name, title) in enumerate(zip(found.names, found.titles, strict=True)):
        _line(left, found, list(found.cells), across, name, title, number)
    left.set(xlabel=f"merged tokens of {found.tokens:g}", ylabel="score (%)")
    none = (0,)
    if none not in found.cells:
        raise NotMeasured("no run with merged=0, which the improvement is over")
    for number, name in enumerate(found.names):
        _improvement(right, found, none, name, number)
    printed = {key[0]: sum(scores.values()) / len(scores) for key, scores in found.printed.items()}
    _beside(right, {count: value - printed[0] for count, value in printed.items()}, label=f"mean {PAPER}")
    right.axhline(0, color="black", linestyle=":", linewidth=0.8)
    right.set(xlabel=f"merged tokens of {found.tokens:g}", ylabel="improvement over none (points)")
    style.key(figure, (left, right), 3)
    return figure


def score(material: Material) -> Any:
    """F13: every way to score: the score as a number, its deviation from the benchmark's mean as colour."""
    found = settings(material, "score")
    figure, (left, right) = style.panels(2, 2, (3.6, 2.6))
    ours = [[found.percent(setting, name) for name in found.names] for setting in found.cells]
    _matrix(left, found, list(found.cells), ours)
    left.set_title("ours")
    names = [name for name in found.names if all(name in scores for scores in found.printed.values())]
    if names:
        theirs = sorted(found.printed)
        _matrix(right, found, theirs, [[found.printed[key][name] for name in names] for key in theirs], names, "Greys")
        right.set_title("paper")
    else:
        right.set_axis_off()
    return figure


def _line(
    panel: Any,
    found: Settings,
    settings: Sequence[Setting],
    across: Sequence[float],
    name: str,
    label: str,
    number: int,
) -> None:
    """Scores with intervals."""
    values = [found.percent(setting, name) for setting in settings]
    ends = style.reaches(values, [found.cells[setting][name].percent_bounds for setting in settings])
    colour, marker = style.look(number)
    panel.errorbar(across, values, ends, color=colour, marker=marker, elinewidth=0.7, capsize=2, label=label)


def _beside(panel: Any, printed: Mapping[float, float], line: str = "-", label: str = PAPER) -> None:
    """The paper's numbers in grey."""
    if printed:
        points = sorted(printed.items())
        panel.plot(*zip(*points, strict=True), line, color=style.GREY, marker="x", linewidth=1, label=label, zorder=1)


def _improvement(panel: Any, found: Settings, none: Setting, name: str, number: int) -> None:
    """Paired differences to the setting without merged tokens."""
    points = []
    reference = found.cells[none][name].row
    for setting in found.cells:
        row = found.cells[setting][name].row
        test, scale = compare(row, reference), row.scale
        if setting != none and test is not None:
            low, high = test.bounds or (test.difference,) * 2
            points.append((setting[0] + 0.35 * (number - 2), test.difference / scale, low / scale, high / scale))
    if points:
        across, middle, lows, highs = zip(*points, strict=True)
        ends = style.reaches(middle, list(zip(lows, highs, strict=True)))
        colour, marker = style.look(number)
        panel.errorbar(across, middle, ends, color=colour, marker=marker, linestyle="", elinewidth=0.7)


def _square(found: Settings, setting: Setting) -> bool:
    """Whether a setting is part of the square of temperatures: both are values that others have as well."""
    counts = [sum(other[axis] == setting[axis] for other in found.cells) for axis in (0, 1)]
    return min(counts) > 1


def _heat(panel: Any, values: dict[Setting, float], notes: dict[Setting, str], colours: str | None = None) -> None:
    """A square of two temperatures."""
    rows, columns = (sorted({setting[axis] for setting in values}) for axis in (0, 1))
    table = [[values.get((row, column), float("nan")) for column in columns] for row in rows]
    middle = sum(values.values()) / len(values)
    reach = max(1.0, *(abs(value - middle) for value in values.values()))  # so that a tenth of a point stays pale
    image = panel.imshow(table, cmap=colours, origin="lower", vmin=middle - reach, vmax=middle + reach)
    for (row, column), note in notes.items():
        _note(panel, image, (columns.index(column), rows.index(row)), values[row, column], note)
    panel.set_xticks(range(len(columns)), [f"{value:g}" for value in columns])
    panel.set_yticks(range(len(rows)), [f"{value:g}" for value in rows])
    panel.set_xlabel("cross temperature")


def _matrix(
    panel: Any,
    found: Settings,
    settings: Sequence[Setting],
    table: Sequence[Sequence[float]],
    names: Sequence[str] | None = None,
    colours: str | None = None,
) -> None:
    """Settings by benchmarks and their mean, over those in which the full model does not guess."""
    names = found.names if names is None else names
    places = [place for place, name in enumerate(names) if name in found.averaged] or range(len(names))
    rows = [[*line, sum(line[place] for place in places) / len(places)] for line in table]
    means = [sum(column) / len(column) for column in zip(*rows, strict=True)]
    deviation = [[value - mean for value, mean in zip(line, means, strict=True)] for line in rows]
    image = panel.imshow(deviation, cmap=colours, aspect="auto")
    for row, line in enumerate(rows):
        for column, value in enumerate(line):
            _note(panel, image, (column, row), deviation[row][column], f"{value:.1f}")
    panel.set_xticks(range(len(names) + 1), [*(found.section.title(name) for name in names), "mean"], rotation=30)
    panel.set_yticks(range(len(settings)), [" + ".join(map(str, setting)) for setting in settings])


def _note(panel: Any, image: Any, place: tuple[int, int], value: float, words: str) -> None:
    """Words on a cell, in whichever of black and white can be read there."""
    red, green, blue, _ = image.cmap(image.norm(value))
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
    panel.text(*place, words, ha="center", va="center", fontsize=6.5, color="white" if dark else "black")


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
    _radar(panel, titles, shares)
    panel.set_title("percent of the score with all tokens", pad=14)
    style.key(figure, [panel], 2)
    return figure


def _best(material: Material) -> tuple[list[str], dict[str, list[float]], dict[str, list[Bounds]]]:
    """Titles of the benchmarks that all ablations have, and by label the best settings' scores and intervals."""
    grids: list[Settings] = []
    for name in TITLES:
        try:
            grids.append(settings(material, name))
        except NotMeasured:
            continue
    if not grids:
        raise NotMeasured("no ablation with two complete settings")
    names = [name for name in grids[0].names if all(name in one.names for one in grids)]
    if len(names) < 3:
        raise NotMeasured("the ablations have fewer than three benchmarks in common")
    section = grids[0].section
    best = {f"{one.ablation.title}: {', '.join(map(str, one.best))}": one.cells[one.best] for one in grids}
    if section.full is not None and all(name in section.full.runs for name in names):
        best = {FULL: {name: Cell(section.full.runs[name]) for name in names}, **best}
    lines = {label: [cells[name].percent for name in names] for label, cells in best.items()}
    ends = {label: [cells[name].percent_bounds for name in names] for label, cells in best.items()}
    return [section.title(name) for name in names], lines, ends


def _radar(panel: Any, titles: Sequence[str], lines: Mapping[str, Sequence[float]], first: int = 0) -> None:
    """Lines over a circle of benchmarks.

    Args:
        panel: polar axes.
        titles: of the benchmarks.
        lines: by label, a value for each benchmark, in percent of the reference.
        first: number of the first line's look.
    """
    angles = [2 * pi * place / len(titles) for place in range(len(titles))]
    for number, (label, values) in enumerate(lines.items(), start=first):
        colour, marker = style.look(number)
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
