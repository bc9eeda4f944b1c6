"""All statistics of reports: what a score is made of, its interval, paired tests, corrections, means. numpy only.

    found = sample(metrics["report"], metrics["score"])   # None if the scorer's rows do not make up the score
    interval(draws(found, "gqa"))                         # 95 %, bootstrap over questions
    compare(row, other_row)                               # paired by question: difference, interval, p

What a scorer's report holds for this (docs/adding.md): `extracted`, one row per question with `index`, `correct`
(0..1), and where it matters `group` (question type, POPE's way, MME's task) and `unit` (rows that are drawn together:
MME's picture, MMBench's circular group); `statistic`, a key of STATISTICS, absent means `mean`; `counted`, the groups
that enter the headline, absent means all; `rounded`, the decimals the headline is rounded to, if it is. A new statistic
is one function of sums and one line in STATISTICS.

The bootstrap draws units with replacement (Efron and Tibshirani 1993, chapters 6, 13 and 16), within groups where the
statistic has a term per group. Units with equal sums are interchangeable, so a draw is one multinomial over the
distinct ones: exact, and 100,000 questions cost what 1,000 do.
"""

import math
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from llava_consensus.evaluation.report.rows import Row

TOLERANCE = 1e-6  # how exactly the rows must make up the score, relative
RESAMPLES = 2000
LEVEL = 95.0  # percent
SEED = 20260
SIGNIFICANT = 0.05

Report = Mapping[str, Any]  # what a scorer says
Answer = Mapping[str, Any]  # one of its answers as scored
Score = Callable[[np.ndarray], np.ndarray]  # sums [..., C] -> scores [...]
Bounds = tuple[float, float]  # the ends of an interval


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


def counted(report: Report) -> list[Answer]:
    """The rows that enter the headline; none unless each of them says whether it is correct."""
    groups = report.get("counted")
    rows = [row for row in report.get("extracted", ()) if groups is None or row.get("group") in groups]
    return rows if all(row.get("correct") is not None for row in rows) else []


def _sample(rows: Sequence[Answer], name: str) -> Sample | None:
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


def _unit(row: Answer, name: str) -> Hashable:
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


class Comparison(NamedTuple):
    """A paired comparison: mean difference in points, its interval, p of no difference, on how many questions."""

    difference: float
    low: float
    high: float
    p: float
    name: str  # of the test
    questions: int
    only: tuple[int, int] | None  # McNemar: right in the first run only, in the second only
    draws: np.ndarray  # [resamples, 2], both scores, for what is made of several benchmarks


def draws(sample: Sample, name: str, count: int = RESAMPLES) -> np.ndarray:
    """Scores [count] of resamples; the same for the same sample and name, independent for different names."""
    random = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    distinct, counts = np.unique(np.column_stack([sample.strata, sample.sums]), axis=0, return_counts=True)
    total = np.zeros((count, sample.sums.shape[1]))
    for stratum in np.unique(distinct[:, 0]):
        in_stratum = distinct[:, 0] == stratum
        units = int(counts[in_stratum].sum())
        total += random.multinomial(units, counts[in_stratum] / units, size=count) @ distinct[in_stratum, 1:]
    return sample.score(total)


def interval(values: np.ndarray) -> tuple[float, float]:
    """The middle LEVEL percent of resampled scores (percentile interval)."""
    low, high = np.percentile(values, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return float(low), float(high)


def compare(first: "Row", second: "Row", count: int = RESAMPLES) -> Comparison | None:
    """Difference of two runs' scores, first less second, paired by question; None unless rows make up both scores.

    p is McNemar's exact test where the score is a mean of right and wrong over single questions, else comes from the
    paired bootstrap's standard error.

    Args:
        first, second: runs that were asked the same questions.
        count: resamples.
    """
    one, other = first.sample, second.sample
    if one is None or other is None:
        return None
    alike = one.score is other.score and one.sums.shape == other.sums.shape
    if alike and np.array_equal(one.questions, other.questions) and np.array_equal(one.strata, other.strata):
        return _compare(one, other, first.benchmark, count)
    return paired(first.report, second.report, first.benchmark, count)


def paired(first: Report, second: Report, name: str, count: int = RESAMPLES) -> Comparison | None:
    """The same of two scorers' reports, whatever their headlines: of one question type, for example.

    Args:
        name: seeds the bootstrap, the benchmark's name.
    """
    samples = common(first, second)
    return None if samples is None else _compare(*samples, name, count)


def _compare(first: Sample, second: Sample, name: str, count: int) -> Comparison:
    """Two runs over the same units: resampling keeps their answers to a question together."""
    width = first.sums.shape[1]
    both = first._replace(
        sums=np.hstack([first.sums, second.sums]),
        score=lambda sums: np.stack([first.score(sums[..., :width]), second.score(sums[..., width:])], axis=-1),
    )
    resamples = draws(both, name, count)
    shift = resamples[:, 0] - resamples[:, 1]
    low, high = interval(shift)
    observed = float(first.score(first.sums.sum(axis=0)) - second.score(second.sums.sum(axis=0)))
    questions = len(first.questions)
    if _is_plain_mean(first) and _is_plain_mean(second):
        first_right, second_right = first.sums[:, 0], second.sums[:, 0]
        only = int((first_right > second_right).sum()), int((second_right > first_right).sum())
        return Comparison(observed, low, high, mcnemar(*only), "exact McNemar", questions, only, resamples)
    p = bootstrap_p(shift, observed)
    return Comparison(observed, low, high, p, "paired bootstrap", questions, None, resamples)


def _is_plain_mean(one: Sample) -> bool:
    """Whether the score is a mean over single units, each right or wrong."""
    right, count = one.sums[:, 0], one.sums[:, 1]
    return one.score is _mean and bool((count == 1).all()) and bool(np.isin(right, (0, 1)).all())


def mcnemar(first_only: int, second_only: int) -> float:
    """Two-sided exact McNemar test: the binomial probability of discordant pairs as uneven as these (McNemar 1947)."""
    total, few = first_only + second_only, min(first_only, second_only)
    tail = term = 1
    for taken in range(few):
        term = term * (total - taken) // (taken + 1)  # comb(total, taken + 1)
        tail += term
    return min(1.0, 2 * tail / 2**total)


def bootstrap_p(shift: np.ndarray, observed: float) -> float:
    """Two-sided p of no difference: the normal tail beyond the difference in units of its bootstrap standard error.

    Efron and Tibshirani 1993, section 12.3; unlike counting resamples on the other side of zero it has no smallest
    value, which a correction for many cells would run into.
    """
    error = float(shift.std(ddof=1))
    if error == 0:
        return 1.0 if observed == 0 else 0.0
    return math.erfc(abs(observed) / error / math.sqrt(2))


def holm(values: Sequence[float]) -> list[float]:
    """p values corrected for their number (Holm 1979), in their order."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    corrected, running = [1.0] * len(values), 0.0
    for rank, place in enumerate(order):
        running = max(running, min(1.0, (len(values) - rank) * values[place]))
        corrected[place] = running
    return corrected


def mark(p: float | None, corrected: float) -> str:
    """† for p < 0.05, ‡ where it is so after the correction too."""
    return "" if p is None or p >= SIGNIFICANT else "‡" if corrected < SIGNIFICANT else "†"


def above_chance(score: float | None, bounds: Sequence[float] | None, chance: float) -> bool:
    """Whether the interval of a score, or without one the score, lies above what guessing scores."""
    low = bounds[0] if bounds else score
    return low is not None and low > chance


class Mean(NamedTuple):
    """A number made of several benchmarks, and its interval where each of them has one."""

    value: float
    bounds: Bounds | None
    p: float | None = None  # of no difference to the full model


def mean_draws(tests: Iterable[Comparison | None], scales: Iterable[float]) -> np.ndarray | None:
    """Resampled means [resamples, 2] over benchmarks of what is compared; None where one of them has no test.

    The benchmarks' resamples are independent, so they are added draw by draw.
    """
    scaled = [None if test is None else test.draws / scale for test, scale in zip(tests, scales, strict=True)]
    return None if not scaled or any(one is None for one in scaled) else np.mean(scaled, axis=0)  # type: ignore[arg-type]


def mean_difference(tests: Sequence[Comparison], scales: Sequence[float]) -> tuple[float, float, float]:
    """Mean of paired differences over benchmarks, each divided by its scale, and the ends of its interval."""
    shifts = [(test.draws[:, 0] - test.draws[:, 1]) / scale for test, scale in zip(tests, scales, strict=True)]
    mean = sum(test.difference / scale for test, scale in zip(tests, scales, strict=True)) / len(tests)
    return mean, *interval(np.mean(shifts, axis=0))


def independent_mean(values: Sequence[float], widths: Sequence[float], count: int) -> tuple[float, float, float]:
    """Sum of numbers over `count`, and the ends of its interval from the widths of independent intervals."""
    mean, half = sum(values) / count, math.sqrt(sum((width / 2) ** 2 for width in widths)) / count
    return mean, mean - half, mean + half
