"""Intervals and paired tests of scores, from samples (`samples.py`). numpy only; no run is repeated.

    interval(draws(sample, "gqa"))            # 95 %, bootstrap over questions
    compare(row, other_row)                   # paired by question: difference, interval, p

The bootstrap draws units with replacement (Efron and Tibshirani 1993, chapters 6, 13 and 16), within groups where the
statistic has a term per group. Units with equal sums are interchangeable, so a draw is one multinomial over the
distinct ones: exact, and 100,000 questions cost what 1,000 do.
"""

import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from llava_consensus.report.rows import Row
from llava_consensus.report.samples import Report, Sample, common, is_plain_mean

RESAMPLES = 2000
LEVEL = 95.0  # percent
SEED = 20260


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


def draws(found: Sample, name: str, count: int = RESAMPLES) -> np.ndarray:
    """Scores [count] of resamples; the same for the same sample and name, independent for different names."""
    random = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    lines, numbers = np.unique(np.column_stack([found.strata, found.sums]), axis=0, return_counts=True)
    total = np.zeros((count, found.sums.shape[1]))
    for stratum in np.unique(lines[:, 0]):
        here = lines[:, 0] == stratum
        units = int(numbers[here].sum())
        total += random.multinomial(units, numbers[here] / units, size=count) @ lines[here, 1:]
    return found.score(total)


def interval(values: np.ndarray) -> tuple[float, float]:
    """The middle LEVEL percent of resampled scores (percentile interval)."""
    low, high = np.percentile(values, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return float(low), float(high)


def pair(first: Sample, second: Sample) -> Sample:
    """Two runs over the same units as one: resampling keeps their answers to a question together."""
    if not np.array_equal(first.strata, second.strata) or first.sums.shape != second.sums.shape:
        raise ValueError("two samples of different questions cannot be paired")
    width = first.sums.shape[1]
    return Sample(
        np.hstack([first.sums, second.sums]),
        first.strata,
        first.asked,
        lambda sums: np.stack([first.score(sums[..., :width]), second.score(sums[..., width:])], axis=-1),
    )


def compare(first: Row, second: Row, count: int = RESAMPLES) -> Comparison | None:
    """Difference of two runs' scores, first less second, paired by question; None unless rows make up both scores.

    p is McNemar's exact test where the score is a mean of right and wrong over single questions, else comes from the
    paired bootstrap's standard error.

    Args:
        first, second: runs that were asked the same questions.
        count: resamples.
    """
    mine, other, name = first.sample, second.sample, first.benchmark
    if mine is None or other is None:
        return None
    same = mine.score is other.score and mine.sums.shape == other.sums.shape
    if same and np.array_equal(mine.asked, other.asked) and np.array_equal(mine.strata, other.strata):
        return _compare(mine, other, name, count)
    return paired(first.report, second.report, name, count)


def paired(first: Report, second: Report, name: str, count: int = RESAMPLES) -> Comparison | None:
    """The same of two scorers' reports, whatever their headlines: of one question type, for example.

    Args:
        name: seeds the bootstrap, the benchmark's name.
    """
    samples = common(first, second)
    return None if samples is None else _compare(*samples, name, count)


def _compare(mine: Sample, other: Sample, name: str, count: int) -> Comparison:
    both = draws(pair(mine, other), name, count)
    shift = both[:, 0] - both[:, 1]
    low, high = interval(shift)
    observed = float(mine.score(mine.sums.sum(axis=0)) - other.score(other.sums.sum(axis=0)))
    only = _discordant(mine, other)
    if only is not None:
        return Comparison(observed, low, high, mcnemar(*only), "exact McNemar", len(mine.asked), only, both)
    p = bootstrap_p(shift, observed)
    return Comparison(observed, low, high, p, "paired bootstrap", len(mine.asked), None, both)


def _discordant(mine: Sample, other: Sample) -> tuple[int, int] | None:
    """Units right in one run only, where the score is a mean of right and wrong over units; else None."""
    if not (is_plain_mean(mine) and is_plain_mean(other)):
        return None
    a, b = mine.sums[:, 0], other.sums[:, 0]
    return int((a > b).sum()), int((b > a).sum())


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
