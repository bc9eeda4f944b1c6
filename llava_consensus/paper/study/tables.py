"""Tables of the controlled study, from the content of study.json and scap.json (`results.py` says what is in them)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llava_consensus.evaluation.report.section import half, signed
from llava_consensus.evaluation.report.stats import holm, mark
from llava_consensus.evaluation.report.table import ABSENT, Group, Table, groups

Row = Mapping[str, Any]
WAYS = {"keep": "kept", "renumber": "closed up"}
SIDES = {"vision": "vision-only", "cross": "cross-only", "full": "all tokens"}


def study_tables(content: Mapping[str, Any]) -> list[Table]:
    """Accuracy, gain of recovery over its student, and how far the two sides agree, under both position policies."""
    rows = content["rows"]
    recovered = [row for row in rows if row["rate"] is not None]
    tested = [row for row in recovered if row["p"] is not None]
    corrected = zip(tested, holm([row["p"] for row in tested]), strict=True)
    marks = {id(row): mark(row["p"], p) for row, p in corrected}
    layer = content["description"]["layer"]
    where = "inside the language model" if layer is None else f"after decoder layer {layer}"

    def gained(row: Row) -> str:
        return signed(row["gain"], row["gain_interval"]) + marks.get(id(row), "")

    return [
        _table(
            f"Selection {where}",
            rows,
            accuracy,
            f"Score ± half of its 95 % interval, pictures drawn together; MME in points. {_asked(rows)}",
        ),
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


def label(row: Row) -> str:
    """What a row is called."""
    if row["rate"] is None:
        return SIDES[row["scores"]]
    return f"recovery, {row['student']} student, r = {row['rate']:g}"


def _table(title: str, rows: Sequence[Row], write: Callable[[Row], str], note: str) -> Table:
    """A column for each benchmark, a group for each retention, a line for each way to select."""
    names = {row["benchmark"]: row["title"] for row in rows}
    lines = []
    parts = {(row["retention"], row["positions"]) for row in rows}
    for retention, policy in sorted(parts, key=lambda part: (-part[0], part[1] or "")):
        inside = [row for row in rows if (row["retention"], row["positions"]) == (retention, policy)]
        heading = f"Retain {100 * retention:g} % of the tokens" + (f", positions {WAYS[policy]}" if policy else "")
        for name in dict.fromkeys(map(label, inside)):
            found = {row["benchmark"]: write(row) for row in inside if label(row) == name}
            lines.append((heading, (name, *(found.get(benchmark, ABSENT) for benchmark in names))))
    return Table(title, ("scores", *names.values()), groups(lines), note)


def _asked(rows: Sequence[Row]) -> str:
    """How many questions about how many pictures each benchmark has."""
    counts = {row["title"]: (row["questions"], row["pictures"]) for row in rows}
    said = (f"{title} {asked} questions about {pictures} pictures" for title, (asked, pictures) in counts.items())
    return f"{'; '.join(said)}."


def study_csv(content: Mapping[str, Any]) -> list[dict[str, Any]]:
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
    asked = f"{content['questions']} questions about {content['pictures']} pictures of {content['benchmark']}"
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
