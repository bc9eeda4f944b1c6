"""Tables of the controlled study, from the content of study.json and scap.json (`study/format.py` says what is in
them).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llava_consensus.evaluation.report.section import half
from llava_consensus.evaluation.report.stats import SIGNIFICANT, holm
from llava_consensus.evaluation.report.table import ABSENT, Group, Table

Row = Mapping[str, Any]
Cell = Callable[[Row], str]
SIDES = {"vision": "vision-only", "cross": "cross-only", "full": "all tokens"}


def tables(content: Mapping[str, Any]) -> list[Table]:
    """Accuracy, gain of recovery over its student, and how far the two sides agree."""
    rows = content["rows"]
    recovered = [row for row in rows if row["rate"] is not None]
    marks = {id(row): mark for row, mark in zip(recovered, significance(recovered), strict=True)}
    layer = content["description"]["layer"]
    where = "inside the language model" if layer is None else f"after decoder layer {layer}"

    def gained(row: Row) -> str:
        if row["gain"] is None:
            return ABSENT
        bounds = row["gain_interval"]
        between = "" if bounds is None else f" ({bounds[0]:+.1f} to {bounds[1]:+.1f})"
        return f"{row['gain']:+.1f}{between}{marks[id(row)]}"

    return [
        _table(f"Selection {where}", rows, accuracy, "Score ± half of its 95 % interval; MME in points."),
        _table(
            "Gain of recovery over its student alone",
            recovered,
            gained,
            "Difference and 95 % interval, paired by question; † p < 0.05, ‡ also after Holm's correction over the "
            "table. MME in points.",
        ),
        _table(
            "Disagreement of the two sides, and correction factor",
            recovered,
            two_shares,
            "In percent: share of the K best tokens on which the sides differ / correction factor (K - c) / (K - m): "
            "c is how far down the teacher's ranking its m corrections are found; it is 100 where its m best are "
            "all new to the student. Means over pictures.",
        ),
    ]


def accuracy(row: Row) -> str:
    """The score with half of its interval."""
    return ABSENT if row["accuracy"] is None else f"{row['accuracy']:.1f}{half(row['interval'])}"


def two_shares(row: Row) -> str:
    """Disagreement and correction factor in percent."""
    pair = row["disagreement"], row["correction"]
    return " / ".join(ABSENT if value is None else f"{100 * value:.1f}" for value in pair)


def significance(rows: Sequence[Row]) -> list[str]:
    """A mark for each row: † where its gain's p is below 0.05, ‡ where it is after Holm's correction too."""
    corrected = iter(holm([row["p"] for row in rows if row["p"] is not None]))
    marks = []
    for row in rows:
        also = row["p"] is not None and next(corrected) < SIGNIFICANT
        marks.append("‡" if also else "†" if row["p"] is not None and row["p"] < SIGNIFICANT else "")
    return marks


def label(row: Row) -> str:
    """What a row is called."""
    if row["rate"] is None:
        return SIDES[row["scores"]]
    return f"recovery, {row['student']} student, r = {row['rate']:g}"


def _table(title: str, rows: Sequence[Row], cell: Cell, note: str) -> Table:
    """A column for each benchmark, a group for each retention, a line for each way to select."""
    names = {row["benchmark"]: row["title"] for row in rows}
    groups = []
    for retention in sorted({row["retention"] for row in rows}, reverse=True):
        inside = [row for row in rows if row["retention"] == retention]
        lines = []
        for name in dict.fromkeys(map(label, inside)):
            found = {row["benchmark"]: cell(row) for row in inside if label(row) == name}
            lines.append((name, *(found.get(benchmark, ABSENT) for benchmark in names)))
        groups.append(Group(f"Retain {100 * retention:g} % of the tokens", tuple(lines)))
    return Table(title, ("scores", *names.values()), tuple(groups), note)


def csv_rows(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of study.json with the ends of intervals in columns of their own."""
    lines = []
    for row in content["rows"]:
        line = {key: value for key, value in row.items() if key not in ("interval", "gain_interval")}
        for name in ("interval", "gain_interval"):
            low, high = row[name] or (None, None)
            line |= {f"{name}_low": low, f"{name}_high": high}
        lines.append(line)
    return lines


def scap_tables(content: Mapping[str, Any]) -> list[Table]:
    """SCAP beside the attention of every layer, and where in the picture it looks."""
    layers: dict[int, dict[str, Row]] = {row["layer"]: {} for row in content["layers"]}
    for row in content["layers"]:
        layers[row["layer"]][row["aggregate"]] = row
    aggregates = list(dict.fromkeys(row["aggregate"] for row in content["layers"]))
    lines = tuple(
        (
            str(layer),
            *(f"{found[aggregate]['correlation']:.2f}" for aggregate in aggregates),
            *(f"{100 * found[aggregate]['overlap']:.1f}" for aggregate in aggregates),
        )
        for layer, found in layers.items()
    )
    asked = f"{content['questions']} pictures of {content['benchmark']}"
    heads = [f"{what}, {aggregate}" for what in ("correlation", "overlap (%)") for aggregate in aggregates]
    positions = {one["rotated"]: one["saliency"] for one in content["positions"]}
    stretches = tuple(
        (str(number), f"{rotated:.2f}", f"{plain:.2f}")
        for number, (rotated, plain) in enumerate(zip(positions[True], positions[False], strict=True), 1)
    )
    share = f"{100 * content['retention']:g} %"
    return [
        Table(
            "SCAP and the attention of every decoder layer",
            ("layer", *heads),
            (Group(asked, lines),),
            f"Spearman's rank correlation over visual tokens, and overlap of the best {share}, for each way to "
            "aggregate the rows of the text. SCAP is the attention of layer 1.",
        ),
        Table(
            "Where SCAP looks, by patch index",
            ("stretch", "rotated", "without rotation"),
            (Group(asked, stretches),),
            "Mean saliency of each equal stretch of patches, from the first to the last, as a multiple of what each "
            "patch would have if all had the same.",
        ),
    ]
