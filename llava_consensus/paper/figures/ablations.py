"""Figures of the ablations: F9 alpha, F10 temperatures, F11 recovery, F12 merged tokens, F13 scores. The paper's
numbers stand beside ours in grey: another model on other data, so shapes can be compared and levels cannot.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llava_consensus.evaluation.report.rows import compare
from llava_consensus.paper.ablations import Setting, Settings, settings
from llava_consensus.paper.figures import style
from llava_consensus.paper.material import Material, NotMeasured

FULL = "all tokens"
PAPER = "printed in the paper (LLaVA-1.5-7B)"
COLOURS = "PuOr"  # of maps: two hues that colour-blind people can tell apart, and pale where nothing differs


def alpha(material: Material) -> Any:
    """F9: scores over alpha, one panel a benchmark."""
    found = settings(material, "alpha")
    figure, panels = style.panels(len(found.names), 3, (2.4, 2.0))
    for panel, name, title in zip(panels, found.names, found.titles, strict=True):
        _line(panel, found, list(found.cells), [setting[0] for setting in found.cells], name, "ConsensusDrop", 0)
        printed = {setting[0]: scores[name] for setting, scores in found.printed.items() if name in scores}
        _beside(panel, printed)
        panel.set_title(title)
        panel.set_xlabel("alpha")
    style.key(figure, panels, 5)
    return figure


def temperature(material: Material) -> Any:
    """F10: a heat map of both temperatures for each benchmark, ours above, the paper's below; colours are points from a
    map's own mean, on one scale for all.
    """
    found = settings(material, "temperature")
    cells = {setting: values for setting, values in found.cells.items() if _square(found, setting)}
    figure, panels = style.panels(2 * len(found.names), len(found.names), (1.55, 1.5))
    count = len(found.names)
    maps: list[tuple[dict[Setting, float], dict[Setting, str]]] = []
    for name in found.names:
        ours, notes = {setting: found.percent(setting, name) for setting in cells}, {}
        for setting in cells:
            low, high = found.cells[setting][name].percent_bounds
            notes[setting] = f"{ours[setting]:.1f}\n± {(high - low) / 2:.1f}"
        maps.append((ours, notes))
    for name in found.names:
        printed = {setting: scores[name] for setting, scores in found.printed.items() if name in scores}
        maps.append((printed, {key: f"{value:.1f}" for key, value in printed.items()}))
    reach = max(_reach(values.values()) for values, _ in maps if values)
    images = [_heat(panel, *one, reach) for panel, one in zip(panels, maps, strict=True) if one[0]]
    for panel, title in zip(panels, found.titles, strict=False):
        panel.set_title(title)
    for panel, (values, _) in zip(panels, maps, strict=True):
        if not values:
            panel.set_axis_off()
    panels[0].set_ylabel("ours\nvision temperature")
    panels[count].set_ylabel("paper\nvision temperature")
    figure.colorbar(images[0], ax=panels, shrink=0.8, label="points from the map's mean")
    return figure


def _reach(values: Iterable[float]) -> float:
    """Largest distance of values from their mean; at least a point, so that a tenth of one stays pale."""
    found = list(values)
    middle = sum(found) / len(found)
    return max(1.0, *(abs(value - middle) for value in found))


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
    """F13: every way to score: the score as a number, its deviation from the benchmark's mean as colour, one scale."""
    found = settings(material, "score")
    figure, (left, right) = style.panels(2, 2, (3.6, 2.6))
    ours = [[found.percent(setting, name) for name in found.names] for setting in found.cells]
    names, theirs = (
        [name for name in found.names if all(name in one for one in found.printed.values())],
        sorted(found.printed),
    )
    printed = [[found.printed[key][name] for name in names] for key in theirs]
    columns = [column for table in (ours, printed) if names or table is ours for column in zip(*table, strict=True)]
    reach = max(map(_reach, columns))
    image = _matrix(left, found, list(found.cells), ours, found.names, reach)
    left.set_title("ours")
    if names:
        _matrix(right, found, theirs, printed, names, reach)
        right.set_title("paper")
    else:
        right.set_axis_off()
    figure.colorbar(image, ax=[left, right], shrink=0.8, label="points from the column's mean")
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
    if printed:
        style.printed(panel, printed.items(), label, line)


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
    """True if a setting is part of the square of temperatures: both values occur in other settings as well."""
    counts = [sum(other[axis] == setting[axis] for other in found.cells) for axis in (0, 1)]
    return min(counts) > 1


def _heat(panel: Any, values: dict[Setting, float], notes: dict[Setting, str], reach: float) -> Any:
    """A square of two temperatures, coloured by points from its mean, up to `reach`."""
    rows, columns = (sorted({setting[axis] for setting in values}) for axis in (0, 1))
    middle = sum(values.values()) / len(values)
    table = [[values.get((row, column), float("nan")) - middle for column in columns] for row in rows]
    image = panel.imshow(table, cmap=COLOURS, origin="lower", vmin=-reach, vmax=reach)
    for (row, column), note in notes.items():
        _note(panel, image, (columns.index(column), rows.index(row)), values[row, column] - middle, note)
    panel.set_xticks(range(len(columns)), [f"{value:g}" for value in columns])
    panel.set_yticks(range(len(rows)), [f"{value:g}" for value in rows])
    panel.set_xlabel("cross temperature")
    return image


def _matrix(
    panel: Any,
    found: Settings,
    settings: Sequence[Setting],
    table: Sequence[Sequence[float]],
    names: Sequence[str],
    reach: float,
) -> Any:
    """Settings by benchmarks and their mean, over those in which the full model does not guess."""
    places = [place for place, name in enumerate(names) if name in found.averaged] or range(len(names))
    rows = [[*line, sum(line[place] for place in places) / len(places)] for line in table]
    means = [sum(column) / len(column) for column in zip(*rows, strict=True)]
    deviation = [[value - mean for value, mean in zip(line, means, strict=True)] for line in rows]
    image = panel.imshow(deviation, cmap=COLOURS, aspect="auto", vmin=-reach, vmax=reach)
    for row, line in enumerate(rows):
        for column, value in enumerate(line):
            _note(panel, image, (column, row), deviation[row][column], f"{value:.1f}")
    panel.set_xticks(range(len(names) + 1), [*(found.section.title(name) for name in names), "mean"], rotation=30)
    panel.set_yticks(range(len(settings)), [" + ".join(map(str, setting)) for setting in settings])
    return image


def _note(panel: Any, image: Any, place: tuple[int, int], value: float, words: str) -> None:
    """Words on a cell, in whichever of black and white can be read there."""
    red, green, blue, _ = image.cmap(image.norm(value))
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
    panel.text(*place, words, ha="center", va="center", fontsize=6.5, color="white" if dark else "black")
