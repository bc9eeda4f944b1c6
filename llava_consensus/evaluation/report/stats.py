"""All statistics of reports: the samples of a score, its interval, paired tests, corrections, means. numpy only.

    found = sample(metrics["report"], metrics["score"])   # None if the scorer's rows do not make up the score
    bounds(found, "gqa")                                  # 95 %, bootstrap over images
    Comparison(found, other, "gqa")                       # paired by question: difference, interval, p (`rows.compare`)

A scorer's report holds for this (docs/adding.md): `extracted`, one row per question with `index`, `correct`
(0..1), and where it matters `group` (question type, POPE's way, MME's task) and `unit` (rows that count together: the
two of MME's image, MMBench's circular group); `statistic`, a key of STATISTICS, absent means `mean`; `counted`, the
groups that enter the headline, absent means all; `rounded`, the decimals the headline is rounded to, if it is. A new
statistic is one function of sums and one line in STATISTICS. The run adds `picture` to each row.

Questions about one image go right and wrong together, so images are the unit that is drawn and swapped; a row that
names no image is its own. The bootstrap draws them with replacement (Efron and Tibshirani 1993, chapters 6, 13 and 16),
within groups where the statistic has a term per group. Two runs are compared by swapping their answers image by image
(Edgington 1969), all swaps at once, of each image's contribution to the score (McNemar's test where each has one
question), for F1 of its right answers. Images with equal sums are interchangeable, so a draw is one multinomial over
the distinct ones: exact, and 100,000 questions cost the same as 1,000.

Where no answer differs, resamples do not vary, and the interval has the half width that the number of images allows
(`Sample.reach`), in a cell and in its part of a mean alike. From fewer than LEAST images there is a score, and no
interval, no test and no mark.
"""

import functools
import math
import sys
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

TOLERANCE = 1e-6  # how exactly the rows must make up the score, relative
RESAMPLES = 2000
BINS = 10  # of confidence
WORK = 2e8  # additions that all swaps at once may cost: a second
LEAST = 10  # images
LEVEL = 95.0  # percent
SEED = 20260
SIGNIFICANT = 0.05

Report = Mapping[str, Any]  # output of a scorer
Answer = Mapping[str, Any]  # one of its answers as scored
Score = Callable[[np.ndarray], np.ndarray]  # sums [..., C] -> scores [...]
Key = TypeVar("Key", bound=Hashable)
Bounds = tuple[float, float]  # the ends of an interval


class Sample(NamedTuple):
    sums: np.ndarray  # [P, C] float64, contribution of each image
    strata: np.ndarray  # [P] int, images that are drawn among each other
    questions: np.ndarray  # [R] int, their indices
    score: Score
    most: float  # the highest score there is
    points: np.ndarray  # [P] contribution of each image to the score, in points; to the accuracy if it is no sum

    @property
    def value(self) -> float:
        return float(self.score(self.sums.sum(axis=0)))

    @property
    def reach(self) -> float:
        """Half width of the interval where no image differs from another: where none of P images
        is otherwise, at most a share of 1 - 0.05 ** (1 / P) of all images is, with 95 % confidence.
        """
        return self.most * (1 - (1 - LEVEL / 100) ** (1 / len(self.sums)))


class Rows(NamedTuple):
    """Rows as columns [R], and how to add a column up over the rows of each unit and group, to [U, G]."""

    correct: np.ndarray  # 0..1
    yes: np.ndarray  # whether the answer is anything but `no`
    total: Callable[[np.ndarray], np.ndarray]

    @property
    def number(self) -> np.ndarray:
        return self.total(np.ones_like(self.correct))

    @property
    def whole(self) -> np.ndarray:
        """True for units that have rows in a group, all of them right: [U, G]."""
        return (self.number > 0) & (self.total(self.correct == 1) == self.number)


class Statistic(NamedTuple):
    by_group: bool  # whether groups have separate terms
    adds: Callable[[Rows], Sequence[np.ndarray]]  # contribution of each unit in each group: C / G arrays [U, G]
    score: Score  # their sums [..., C], group by group -> [...]
    most: float = 100.0  # the highest score, of each group where the score is a sum over groups


def _mean(sums: np.ndarray) -> np.ndarray:
    return 100 * sums[..., 0] / sums[..., 1]


def _f1_mean(sums: np.ndarray) -> np.ndarray:
    """Mean over groups of F1 in percent; a group in which nothing is positive has none (as the scorer)."""
    tp, errors = sums[..., 0::3], sums[..., 1::3] + sums[..., 2::3]
    denominator = 2 * tp + errors
    f1 = np.divide(2 * tp, denominator, out=np.zeros_like(denominator), where=denominator > 0)
    return 100 * f1.sum(axis=-1) / np.maximum((denominator > 0).sum(axis=-1), 1)


def _mme(sums: np.ndarray) -> np.ndarray:
    """Sum over tasks of accuracy and of the share of images with both questions right, each in percent."""
    right, rows, right_images, images = (sums[..., offset::4] for offset in range(4))
    return 100 * (right / rows + right_images / images).sum(axis=-1)


SUMS = (_mean, _mme)  # scores that are sums over images, where the numbers of questions are given


def _points(sums: np.ndarray, score: Score, questions: int) -> np.ndarray:
    if score in SUMS:
        added = sums.copy()
        added[:, 1::2] = 0.0
        whole = sums.sum(axis=0)
        return score(np.where(np.arange(len(whole)) % 2, whole, added))
    wrong = sums[:, 1::3] + sums[:, 2::3]
    return -100 * wrong.sum(axis=1) / questions


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
    "mme": Statistic(
        True, lambda rows: [rows.total(rows.correct), rows.number, rows.whole, rows.number > 0], _mme, most=200.0
    ),
}


def sample(report: Report, score: float | None) -> Sample | None:
    """The units of a score; None if the report has no rows, no known statistic, or rows that make another number."""
    rows = counted(report)
    if score is None or not rows:
        return None
    result = _sample(rows, report.get("statistic", "mean"))
    tolerance = TOLERANCE * max(1.0, abs(score)) + (0.5 * 10.0 ** -report["rounded"] if "rounded" in report else 0.0)
    if result is None:
        return None
    return result if abs(float(result.score(result.sums.sum(axis=0))) - score) <= tolerance else None


def counted(report: Report) -> list[Answer]:
    """The rows of the headline score; none unless each has `correct`."""
    groups = report.get("counted")
    rows = [row for row in report.get("extracted", ()) if groups is None or row.get("group") in groups]
    return rows if all(row.get("correct") is not None for row in rows) else []


def calibration(report: Report) -> dict[str, float] | None:
    """How well the probabilities of a run's answers say which are right, in percent, lower is better; None unless it
    recorded them. Of an answer it is the geometric mean of its tokens'. `ece`: expected calibration error (Naeini et
    al. 2015) in BINS bins of equal width; `aurc`: the share of wrong answers among the k surest, mean over all k.
    """
    rows = counted(report)
    if not rows or any(row.get("logprob") is None for row in rows):
        return None
    right, sure = np.array([float(row["correct"]) for row in rows]), np.exp([row["logprob"] for row in rows])
    bins = np.minimum((sure * BINS).astype(np.int64), BINS - 1)
    _, tied = np.unique(-sure, return_inverse=True)  # answers that are equally sure have their mean risk
    wrong = (np.bincount(tied, 1 - right) / np.bincount(tied))[np.sort(tied)]
    risks = np.cumsum(wrong) / np.arange(1, len(rows) + 1)
    gaps = np.abs(np.bincount(bins, right - sure)).sum() / len(rows)
    return {"ece": 100 * float(gaps), "aurc": 100 * float(risks.mean())}


def _sample(rows: Sequence[Answer], name: str) -> Sample | None:
    """One line of sums for each image, in the order of their first rows."""
    statistic = STATISTICS.get(name)
    if statistic is None:
        return None
    groups, of_group = _codes([str(row.get("group", "")) if statistic.by_group else "" for row in rows])
    units, of_unit = _codes([_named(row, name, "unit") for row in rows])
    images, of_image = _codes([_named(row, name, "picture", "unit") for row in rows])
    place = of_unit * groups + of_group

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(place, weights=values, minlength=units * groups).reshape(units, groups)

    correct = np.array([float(row["correct"]) for row in rows])
    columns = Rows(correct, np.array([row.get("extracted") != "no" for row in rows]), total)
    of_units = np.stack(statistic.adds(columns), axis=-1).reshape(units, -1).astype(np.float64)
    image = np.zeros(units, dtype=np.int64)
    image[of_unit] = of_image
    sums = np.stack([np.bincount(image, weights=column, minlength=images) for column in of_units.T], axis=1)
    count = np.bincount(of_image * groups + of_group, minlength=images * groups).reshape(images, groups) > 0
    # an image that lies in several groups cannot be drawn within one
    strata = np.zeros(images, dtype=np.int64) if (count.sum(axis=1) > 1).any() else count.argmax(axis=1)
    most = statistic.most * (groups if statistic.score is _mme else 1)
    points = _points(sums, statistic.score, len(rows))
    return Sample(sums, strata, np.array([row["index"] for row in rows]), statistic.score, most, points)


def _codes(values: Sequence[Hashable]) -> tuple[int, np.ndarray]:
    """Number of distinct values, and the code of each value in order of appearance, [R]."""
    numbers: dict[Hashable, int] = {}
    codes = np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)
    return len(numbers), codes


def _named(row: Answer, name: str, *keys: str) -> Hashable:
    """Cluster of a row: the first of these keys that it has, else itself; by task, as official pairs of MME are."""
    for key in keys:
        if row.get(key) is not None:
            return (row.get("group") if name == "mme" else "", row[key])
    return ("row", row["index"])


def pooled(samples: Sequence[Sample]) -> Sample:
    """The mean score of runs that asked the same questions, of several seeds for example."""
    width, points = samples[0].sums.shape[1], np.mean([one.points for one in samples], axis=0)
    first = samples[0]._replace(points=points)
    if first.score in SUMS and all(np.array_equal(one.sums[:, 1::2], first.sums[:, 1::2]) for one in samples):
        return first._replace(sums=np.mean([one.sums for one in samples], axis=0))

    def mean(sums: np.ndarray) -> np.ndarray:
        parts = [sums[..., start : start + width] for start in range(0, sums.shape[-1], width)]
        return np.mean([first.score(part) for part in parts], axis=0)

    return first._replace(sums=np.hstack([one.sums for one in samples]), score=mean)


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


def interval(values: np.ndarray, reach: float = 0.0) -> Bounds:
    """The middle LEVEL percent of resampled scores (percentile interval), wider by `reach`, the half width of the part
    that does not vary in them.
    """
    low, middle, high = map(float, np.percentile(values, [(100 - LEVEL) / 2, 50, (100 + LEVEL) / 2]))
    return middle - math.hypot(middle - low, reach), middle + math.hypot(high - middle, reach)


def bounds(sample: Sample, name: str) -> Bounds | None:
    if len(sample.sums) < LEAST:
        return None
    values = draws(sample, name)
    low, high = interval(values, 0.0 if np.ptp(values) else sample.reach)
    return max(low, 0.0), min(high, sample.most)


@dataclass(frozen=True, eq=False)
class Comparison:
    """A paired comparison of two runs' scores over the same images, first less second."""

    first: Sample  # the samples of the two scores
    second: Sample
    benchmark: str  # seeds the draws, which are independent for different names
    count: int = RESAMPLES  # resamples

    @property
    def difference(self) -> float:
        return self.first.value - self.second.value

    @property
    def questions(self) -> int:
        return len(self.first.questions)

    @property
    def images(self) -> int:
        return len(self.first.sums)

    @property
    def enough(self) -> bool:
        return self.images >= LEAST

    @cached_property
    def draws(self) -> np.ndarray:
        """Both scores of resamples [resamples, 2], which keep the answers to a question together."""
        width, first, second = self.first.sums.shape[1], self.first.score, self.second.score
        both = self.first._replace(
            sums=np.hstack([self.first.sums, self.second.sums]),
            score=lambda sums: np.stack([first(sums[..., :width]), second(sums[..., width:])], axis=-1),
        )
        return draws(both, self.benchmark, self.count)

    @cached_property
    def alike(self) -> bool:
        """True if no image adds another amount in the two runs."""
        return bool((self.first.points == self.second.points).all())

    @cached_property
    def bounds(self) -> Bounds | None:
        shift = self.draws[:, 0] - self.draws[:, 1]
        return interval(shift, self.first.reach * self.alike) if self.enough else None

    @property
    def test(self) -> str:
        if not self.enough:
            return f"fewer than {LEAST} images, no test"
        if self.first.score not in SUMS:
            return "exact sign flips of right answers"
        alone = self.first.score is _mean and self.first.sums[:, 1].max() == 1
        return "exact McNemar" if alone else "exact sign flips of images"

    @cached_property
    def p(self) -> float | None:
        """Two-sided, of no difference; None from too few images."""
        return sign_flips(self.first.points - self.second.points) if self.enough else None


def paired(first: Report, second: Report, name: str, count: int = RESAMPLES) -> Comparison | None:
    """Two reports over the questions that both answered, such as those of one type; `name` seeds the bootstrap."""
    statistic = first.get("statistic", "mean")
    answers = [{row["index"]: row for row in counted(report)} for report in (first, second)]
    shared = sorted(answers[0].keys() & answers[1].keys())
    # group, unit and image are properties of the question: the first run's represent both
    own = [
        [{**answers[0][index], **{key: rows[index].get(key) for key in ("extracted", "correct")}} for index in shared]
        for rows in answers
    ]
    one, other = (_sample(rows, statistic) if rows else None for rows in own)
    alike = statistic == second.get("statistic", "mean")
    return Comparison(one, other, name, count) if alike and one is not None and other is not None else None


def sign_flips(*benchmarks: np.ndarray) -> float:
    """Two-sided p of no difference: the share of all ways to swap images in which the sum is as far from 0.

    Args:
        benchmarks: [P] each, contributions of images to the difference.
    Returns:
        exact, above 1e-12 where there are too many sums to count one by one. Of several benchmarks, or of steps that
        are no multiples of a number large enough to count in, an upper bound, from rounded sums or steps.
    """
    found = [_flipped(steps) for steps in benchmarks if steps.any()]
    if not found:
        return 1.0
    sums, shares, slack, least = found[0]
    if len(found) > 1:
        reach = sum(float(one.sums[-1]) for one in found)
        unit = reach / 2**17
        waves = np.ones(2**17 + 1, dtype=complex)
        for one in found:
            place = np.rint((one.sums + one.sums[-1]) / unit).astype(np.int64)
            waves *= np.fft.rfft(np.bincount(place, one.shares, 2**18))
        shares = np.fft.irfft(waves)
        sums = unit * np.arange(2**18) - reach
        slack = sum(one.slack for one in found) + unit * len(found) / 2
        least = sum(one.least for one in found) + 1e-12
    observed = abs(sum(float(steps.sum()) for steps in benchmarks))
    as_far = np.abs(sums) >= observed - slack - 1e-9 * abs(sums[0])
    return max(min(1.0, least + float(shares[as_far].sum())), sys.float_info.min)


class _Flipped(NamedTuple):
    """How the sum of steps is distributed if each has its sign by the fall of a coin."""

    sums: np.ndarray  # from the lowest to the highest
    shares: np.ndarray  # of all ways
    slack: float  # by which rounding may have moved a sum
    least: float  # share of ways that may be missing


def _flipped(steps: np.ndarray) -> _Flipped:
    sizes, counts = np.unique(np.round(np.abs(steps[steps != 0]), 12), return_counts=True)
    unit = functools.reduce(lambda one, other: _measure(one, other, 1e-9 * sizes[-1]), sizes)
    finest, slack, least = float(sizes @ counts) / max(2**17, 64 * int(counts.sum())), 0.0, 0.0
    if unit < finest:  # Hoeffding (1963): rounding moves a sum of P signed steps by more in one of 3e7 ways
        unit, slack, least = finest, finest * 3 * math.sqrt(counts.sum()), 3.1e-8
    whole = np.rint(sizes / unit).astype(np.int64)
    reach = int(whole @ counts)
    sums = 2 * np.arange(reach + 1) - reach
    before = np.cumsum(whole * counts) - whole * counts + 1.0  # sums that are there when a size is added
    if before @ counts > WORK:
        length = 1 << (2 * reach + 1).bit_length()
        turns = 2 * np.pi / length * np.arange(length // 2 + 1)
        waves = np.ones_like(turns)  # the characteristic function
        for size, count in zip(whole.tolist(), counts.tolist(), strict=True):
            waves *= np.cos(size * turns) ** count
        return _Flipped(unit * sums, np.fft.irfft(waves)[sums], slack, least + 1e-12)
    shares = np.ones(1)
    for size, count in zip(whole.tolist(), counts.tolist(), strict=True):
        longer = np.zeros(len(shares) + size * count)
        for swapped in range(count + 1):
            ways = math.lgamma(count + 1) - math.lgamma(swapped + 1) - math.lgamma(count - swapped + 1)
            longer[swapped * size : swapped * size + len(shares)] += math.exp(ways - count * math.log(2)) * shares
        shares = longer
    return _Flipped(unit * sums, shares, slack, least)


def _measure(one: float, other: float, least: float) -> float:
    """The greatest common measure of two lengths; lengths below `least` are rounding errors."""
    while other > least:
        one, other = other, abs(one - other * round(one / other))
    return one


def holm(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda place: values[place])
    corrected, running = [1.0] * len(values), 0.0
    for rank, place in enumerate(order):
        running = max(running, min(1.0, (len(values) - rank) * values[place]))
        corrected[place] = running
    return corrected


def corrected(values: Mapping[Key, float | None]) -> dict[Key, float]:
    """Holm's correction over a table: p of each test, corrected for the number of those that have one."""
    known = {key: p for key, p in values.items() if p is not None}
    return dict(zip(known, holm(list(known.values())), strict=True))


def mark(p: float | None, corrected: float) -> str:
    """† for p < 0.05, ‡ if it is so after the correction too."""
    return "" if p is None or p >= SIGNIFICANT else "‡" if corrected < SIGNIFICANT else "†"


def above_chance(score: float | None, bounds: Sequence[float] | None, chance: float) -> bool:
    """True if the interval of a score, or without one the score, lies above the score of guessing."""
    low = bounds[0] if bounds else score
    return low is not None and low > chance


class Mean(NamedTuple):
    """A number made of several benchmarks, and its interval where each of them has one."""

    value: float
    bounds: Bounds | None
    p: float | None = None  # of no difference to the full model


class MeanDifference(NamedTuple):
    """The mean of paired differences over benchmarks, each divided by its scale, in points."""

    difference: float
    bounds: Bounds | None  # None if a benchmark has too few images
    p: float | None
    images: int  # of the benchmark with the fewest


def mean_difference(tests: Sequence[Comparison], scales: Sequence[float]) -> MeanDifference:
    """Mean of paired differences, its interval from resamples that are added one by one, because those of different
    benchmarks are independent, and its p of all swaps.
    """
    pairs = list(zip(tests, scales, strict=True))
    mean = sum(test.difference / scale for test, scale in pairs) / len(pairs)
    images = min(test.images for test in tests)
    if not all(test.enough for test in tests):
        return MeanDifference(mean, None, None, images)
    resampled = np.mean([test.draws / scale for test, scale in pairs], axis=0)  # [resamples, 2]
    alike = [test.first.reach / scale for test, scale in pairs if test.alike]
    between = interval(resampled[:, 0] - resampled[:, 1], math.hypot(*alike) / len(pairs))
    steps = [(test.first.points - test.second.points) / scale for test, scale in pairs]
    return MeanDifference(mean, between, sign_flips(*steps), images)
