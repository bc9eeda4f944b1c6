"""What a score is made of: the rows that its scorer says it counted, as sums that can be drawn again. numpy only.

    found = sample(metrics["report"], metrics["score"])   # None if the rows do not make up the score

What a scorer's report holds for this (docs/adding.md): `extracted`, one row per question with `index`, `correct`
(0..1), and where it matters `group` (question type, POPE's way, MME's task) and `unit` (rows that are drawn together:
MME's picture, MMBench's circular group); `statistic`, a key of STATISTICS, absent means `mean`; `counted`, the groups
that enter the headline, absent means all; `rounded`, the decimals the headline is rounded to, if it is. A new statistic
is one function of sums and one line in STATISTICS.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

TOLERANCE = 1e-6  # how exactly the rows must make up the score, relative

Report = Mapping[str, Any]  # what a scorer says
Row = Mapping[str, Any]  # one of its answers as scored
Score = Callable[[np.ndarray], np.ndarray]  # sums [..., C] -> scores [...]


class Sample(NamedTuple):
    """What a score is made of."""

    sums: np.ndarray  # [U, C] float64, what each unit adds
    strata: np.ndarray  # [U] int, units that are drawn among each other
    questions: np.ndarray  # [R] int, their indices
    score: Score


class Rows(NamedTuple):
    """Rows as columns [R], and how to add a column up over the rows of each unit and group, to [U, G]."""

    correct: np.ndarray  # 0..1
    yes: np.ndarray  # whether the answer is anything but `no`
    total: Callable[[np.ndarray], np.ndarray]

    @property
    def number(self) -> np.ndarray:
        """Rows of each unit and group, [U, G]."""
        return self.total(np.ones_like(self.correct))

    @property
    def whole(self) -> np.ndarray:
        """Whether a unit has rows in a group and all of them are right, [U, G]."""
        return (self.number > 0) & (self.total(self.correct == 1) == self.number)


class Statistic(NamedTuple):
    """How a score is made from rows."""

    by_group: bool  # whether groups have terms of their own
    adds: Callable[[Rows], Sequence[np.ndarray]]  # what each unit adds in each group: C / G arrays [U, G]
    score: Score  # their sums [..., C], group by group -> [...]


def _mean(sums: np.ndarray) -> np.ndarray:
    return 100 * sums[..., 0] / sums[..., 1]


def _f1_mean(sums: np.ndarray) -> np.ndarray:
    """Mean over groups of F1 in percent; a group in which nothing is positive has none (as the scorer)."""
    tp, errors = sums[..., 0::3], sums[..., 1::3] + sums[..., 2::3]
    denominator = 2 * tp + errors
    f1 = np.divide(2 * tp, denominator, out=np.zeros_like(denominator), where=denominator > 0)
    return 100 * f1.sum(axis=-1) / np.maximum((denominator > 0).sum(axis=-1), 1)


def _mme(sums: np.ndarray) -> np.ndarray:
    """Sum over tasks of accuracy and of the share of pictures with both questions right, each in percent."""
    right, rows, right_pictures, pictures = (sums[..., offset::4] for offset in range(4))
    return 100 * (right / rows + right_pictures / pictures).sum(axis=-1)


STATISTICS = {
    "mean": Statistic(False, lambda rows: [rows.total(rows.correct), rows.number], _mean),
    "circular": Statistic(False, lambda rows: [rows.whole, rows.number > 0], _mean),
    "f1_mean": Statistic(  # true positives, false positives, false negatives
        True,
        lambda rows: [
            rows.total(rows.yes * rows.correct),
            rows.total(rows.yes * (1 - rows.correct)),
            rows.total(~rows.yes * (1 - rows.correct)),
        ],
        _f1_mean,
    ),
    "mme": Statistic(True, lambda rows: [rows.total(rows.correct), rows.number, rows.whole, rows.number > 0], _mme),
}


def sample(report: Report, score: float | None) -> Sample | None:
    """The units of a score; None where the report has no rows, no known statistic, or rows that make another number."""
    rows = counted(report)
    if score is None or not rows:
        return None
    result = _sample(rows, report.get("statistic", "mean"))
    tolerance = TOLERANCE * max(1.0, abs(score)) + (0.5 * 10.0 ** -report["rounded"] if "rounded" in report else 0.0)
    if result is None:
        return None
    return result if abs(float(result.score(result.sums.sum(axis=0))) - score) <= tolerance else None


def counted(report: Report) -> list[Row]:
    """The rows that enter the headline; none unless each of them says whether it is correct."""
    groups = report.get("counted")
    rows = [row for row in report.get("extracted", ()) if groups is None or row.get("group") in groups]
    return rows if all(row.get("correct") is not None for row in rows) else []


def _sample(rows: Sequence[Row], name: str) -> Sample | None:
    """One line of sums for each unit, in the order of their first rows."""
    statistic = STATISTICS.get(name)
    if statistic is None:
        return None
    groups, of_group = _codes([str(row.get("group", "")) if statistic.by_group else "" for row in rows])
    units, of_unit = _codes([_unit(row, name) for row in rows])
    place = of_unit * groups + of_group

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(place, weights=values, minlength=units * groups).reshape(units, groups)

    correct = np.array([float(row["correct"]) for row in rows])
    columns = Rows(correct, np.array([row.get("extracted") != "no" for row in rows]), total)
    sums = np.stack(statistic.adds(columns), axis=-1).reshape(units, -1).astype(np.float64)
    count = columns.number > 0
    # a unit that lies in several groups cannot be drawn within one
    strata = np.zeros(units, dtype=np.int64) if (count.sum(axis=1) > 1).any() else count.argmax(axis=1)
    return Sample(sums, strata, np.array([row["index"] for row in rows]), statistic.score)


def _codes(values: Sequence[Hashable]) -> tuple[int, np.ndarray]:
    """How many different values there are, and the number of each, counted as they appear, [R]."""
    numbers: dict[Hashable, int] = {}
    codes = np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)
    return len(numbers), codes


def _unit(row: Row, name: str) -> Hashable:
    """What a row is drawn with. A picture of MME may be in two tasks: it is two units, as the official pairs are."""
    unit = row.get("unit")
    if unit is None:
        return ("row", row["index"])
    return (row.get("group"), unit) if name == "mme" else ("unit", unit)


def common(first: Report, second: Report) -> tuple[Sample, Sample] | None:
    """Samples of two reports over the questions both answered; None where their scores cannot be made from rows."""
    name = first.get("statistic", "mean")
    if name != second.get("statistic", "mean"):
        return None
    first_rows, second_rows = ({row["index"]: row for row in counted(report)} for report in (first, second))
    shared = [index for index in sorted(first_rows) if index in second_rows]
    # group and unit are properties of the question: the first run's stand for both
    second_aligned = [
        {
            **first_rows[index],
            "extracted": second_rows[index].get("extracted"),
            "correct": second_rows[index]["correct"],
        }
        for index in shared
    ]
    if not shared:
        return None
    first_sample = _sample([first_rows[index] for index in shared], name)
    second_sample = _sample(second_aligned, name)
    return None if first_sample is None or second_sample is None else (first_sample, second_sample)


def is_plain_mean(sample: Sample) -> bool:
    """Whether the score is a mean over single units, each right or wrong."""
    return (
        sample.score is _mean
        and bool((sample.sums[:, 1] == 1).all())
        and bool(np.isin(sample.sums[:, 0], (0, 1)).all())
    )
