"""Tables of the controlled study, from the content of study.json (`results.py` says what is in it)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llava_consensus.evaluation.report.section import half, signed
from llava_consensus.evaluation.report.stats import corrected, mark
from llava_consensus.evaluation.report.table import ABSENT, Table, pivoted

Row = Mapping[str, Any]
WAYS = {"keep": "kept", "renumber": "closed up"}
SIDES = {"vision": "vision-only", "cross": "cross-only", "full": "all tokens"}


def study_tables(content: Mapping[str, Any]) -> list[Table]:
    """Accuracy, gain of recovery over its student, and how far the two sides agree, under both position policies."""
    rows = content["rows"]
    recovered = [row for row in rows if row["rate"] is not None]
    known = corrected({place: row["p"] for place, row in enumerate(recovered)})
    marks = {id(recovered[place]): mark(recovered[place]["p"], p) for place, p in known.items()}
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
    """Name of a row."""
    if row["rate"] is None:
        return SIDES[row["scores"]]
    return f"recovery, {row['student']} student, r = {row['rate']:g}"


def _table(title: str, rows: Sequence[Row], write: Callable[[Row], str], note: str) -> Table:
    """A column for each benchmark, a group for each retention, a line for each way to select."""

    def heading(row: Row) -> str:
        policy = f", positions {WAYS[row['positions']]}" if row["positions"] else ""
        return f"Retain {100 * row['retention']:g} % of the tokens{policy}"

    ordered = sorted(rows, key=lambda row: (-row["retention"], row["positions"] or ""))
    names = {row["benchmark"]: row["title"] for row in rows}
    cells = ((heading(row), label(row), row["benchmark"], write(row)) for row in ordered)
    return pivoted(title, "scores", names, cells, note)


def _asked(rows: Sequence[Row]) -> str:
    """Numbers of questions and pictures of each benchmark."""
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
