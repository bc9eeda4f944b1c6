"""Figures of the controlled study (F2, F3, F4), and of SCAP's pull toward places in the picture. From study.json and
scap.json, whose fields `paper/study/results.py` describes.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llava_consensus.paper.figures import style
from llava_consensus.paper.material import Material, NotMeasured

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
SINGLES = (("cross", "cross-only"), ("vision", "vision-only"))
DECAY = ("pope", "gqa")  # benchmarks of the paper's F4
DRAWN = "keep"  # the position policy that figures show; tables have both


def recovery_helps(material: Material) -> "Figure":
    """F2: accuracy of both single signals and of recovery with either student, one panel a benchmark. The number in a
    bar of recovery is the rate, which is the best one of those that were run.
    """
    rows = _rows(material)
    names = list(dict.fromkeys(row["benchmark"] for row in rows))
    retentions = sorted({row["retention"] for row in rows})
    figure, panels = style.panels(len(names), 3, (2.6, 2.1))
    for panel, name in zip(panels, names, strict=True):
        own = [row for row in rows if row["benchmark"] == name]
        for place, (label, bars) in enumerate(_bars(own, retentions).items()):
            _bar(panel, place, label, bars, retentions)
        _all_tokens(panel, material, name)
        panel.set_xticks(range(len(retentions)), [f"{100 * one:g} % kept" for one in retentions])
        panel.set_title(own[0]["title"])
        _zoom(panel, own)
    style.key(figure, panels, 5)
    return figure


def three_way(material: Material) -> "Figure":
    """F3: a bubble for each benchmark and retention: correction over gain, its size the disagreement."""
    rows = [row for row in _rows(material) if row["scores"] == "recovery" and row["gain"] is not None]
    retentions = sorted({row["retention"] for row in rows})
    students = sorted({row["student"] for row in rows}, reverse=True)
    figure, panels = style.panels(len(students), 2, (3.4, 3.0), sharey=True)
    for panel, student in zip(panels, students, strict=True):
        for number, retention in enumerate(retentions):
            own = [row for row in rows if (row["student"], row["retention"]) == (student, retention)]
            colour, marker = style.look(number)
            sizes = [300 * row["disagreement"] for row in own]
            across = [row["correction"] for row in own]
            up = [row["gain"] / row["scale"] for row in own]
            panel.scatter(
                across,
                up,
                sizes,
                color=colour,
                marker=marker,
                alpha=0.55,
                edgecolors="white",
                label=f"{100 * retention:g} % kept: size is the disagreement, {_range(rows, retention)} %",
            )
        panel.axhline(0, color="black", linewidth=0.8, linestyle=":")
        panel.set_title(f"student: {student}")
        panel.set_xlabel("correction factor")
    panels[0].set_ylabel("gain over the student alone (points)")
    style.key(figure, panels, 1)
    return figure


def decay(material: Material) -> "Figure":
    """F4: the correction factor over the rate, one panel a benchmark."""
    rows = [row for row in _rows(material) if row["scores"] == "recovery"]
    names = in_decay(rows)
    figure, panels = style.panels(len(names), 2, (2.8, 2.3), sharey=True)
    for panel, name in zip(panels, names, strict=True):
        own = [row for row in rows if row["benchmark"] == name]
        sides = sorted(
            {(row["student"], row["retention"]) for row in own}, key=lambda side: (side[0] != "vision", side)
        )
        for number, (student, retention) in enumerate(sides):
            line = sorted(
                (row["rate"], row["correction"])
                for row in own
                if (row["student"], row["retention"]) == (student, retention)
            )
            colour, marker = style.look(number)
            dash = "-" if student == "vision" else "--"
            label = f"{student} as student, {100 * retention:g} % kept"
            panel.plot(*zip(*line, strict=True), dash, color=colour, marker=marker, label=label)
        panel.set_title(own[0]["title"])
        panel.set_xlabel("recovery rate r")
        panel.set_xticks(sorted({row["rate"] for row in own}))
    panels[0].set_ylim(0, None)  # shared, so when all lines are drawn: it would leave out those of later panels
    panels[0].set_ylabel("correction factor")
    style.key(figure, panels, 2)
    return figure


def in_decay(rows: Sequence[Row]) -> list[str]:
    """The benchmarks that F4 draws of these rows: those of the paper, else the first."""
    names = list(dict.fromkeys(row["benchmark"] for row in rows))
    return [name for name in DECAY if name in names] or names[:1]


def scap_by_place(material: Material) -> "Figure":
    """SCAP's mean saliency by patch index, with and without rotation: where it looks whatever the picture shows."""
    if material.scap is None or not material.scap.get("positions"):
        raise NotMeasured("no scap.json with positions")
    figure, (panel,) = style.panels(1, 1, (3.6, 2.4))
    for number, line in enumerate(material.scap["positions"]):
        colour, marker = style.look(number)
        label = "queries and keys rotated (SCAP)" if line["rotated"] else "not rotated"
        count = len(line["saliency"])
        panel.plot(range(1, count + 1), line["saliency"], color=colour, marker=marker, markersize=3, label=label)
    panel.axhline(1, color="black", linestyle=":", linewidth=0.8)
    panel.set_xlabel(f"patches, from the first to the last in {count} stretches")
    panel.set_ylabel("mean saliency (1: no preference)")
    panel.set_ylim(0, None)
    style.key(figure, [panel], 2)
    return figure


def _range(rows: Sequence[Row], retention: float) -> str:
    """The least and the most disagreement at a retention, in percent."""
    found = [100 * row["disagreement"] for row in rows if row["retention"] == retention]
    return f"{min(found):.0f} to {max(found):.0f}"


def _rows(material: Material) -> list[Row]:
    """Rows of the study with positions kept, as FastV does; those of all tokens are drawn as lines."""
    rows = (
        [] if material.study is None else [row for row in material.study.get("rows", ()) if row["positions"] == DRAWN]
    )
    if not rows:
        raise NotMeasured("no study.json with rows")
    return rows


def _bars(rows: Sequence[Row], retentions: Sequence[float]) -> dict[str, list[Row | None]]:
    """Rows by label, one for each retention; of recovery the one with the best rate."""
    bars: dict[str, list[Row | None]] = {}
    for scores, label in SINGLES:
        bars[label] = [_best(rows, retention, scores, None) for retention in retentions]
    for student in ("cross", "vision"):
        bars[f"recovery, {student} as student"] = [_best(rows, one, "recovery", student) for one in retentions]
    return bars


def _best(rows: Sequence[Row], retention: float, scores: str, student: str | None) -> Row | None:
    own = [row for row in rows if (row["retention"], row["scores"], row["student"]) == (retention, scores, student)]
    return max(own, key=lambda row: row["accuracy"], default=None)


def _bar(panel: "Axes", place: int, label: str, bars: Sequence[Row | None], retentions: Sequence[float]) -> None:
    """The bars of one signal, with intervals; above those of recovery the rate of the best."""
    colour, width = style.look(place).colour, 0.2
    for number, row in enumerate(bars[: len(retentions)]):
        if row is None:
            continue
        middle, height = number + (place - 1.5) * width, row["accuracy"] / row["scale"]
        panel.bar(
            middle,
            height,
            0.92 * width,
            color=colour,
            label=label,
            hatch="////" if place > 1 else "",
            edgecolor="white",
            linewidth=0,
        )
        if row["interval"] is not None:
            low, high = (end / row["scale"] for end in row["interval"])
            panel.vlines(middle, low, high, color="black", linewidth=0.8)
        if row["rate"] is not None:
            panel.annotate(
                f"{row['rate']:g}",
                (middle, 0.03),
                xycoords=("data", "axes fraction"),
                ha="center",
                fontsize=5.5,
                bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "linewidth": 0},
            )


def _all_tokens(panel: "Axes", material: Material, name: str) -> None:
    rows = () if material.study is None else material.study["rows"]
    for row in rows:
        if (row["benchmark"], row["scores"]) == (name, "full"):
            panel.axhline(row["accuracy"] / row["scale"], color="black", linestyle=":", linewidth=1, label="all tokens")


def _zoom(panel: "Axes", rows: Sequence[Row]) -> None:
    """An axis that starts below the lowest interval, so that differences can be seen; it is marked as cut."""
    lows = [(row["interval"] or [row["accuracy"]])[0] / row["scale"] for row in rows]
    bottom = max(0.0, 5 * ((min(lows) - 5) // 5))
    panel.set_ylim(bottom, min(101.0, panel.get_ylim()[1]))  # no score is above 100
    if bottom:
        panel.set_ylabel(f"score (%), axis from {bottom:g}")
    else:
        panel.set_ylabel("score (%)")
