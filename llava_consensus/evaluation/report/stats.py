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

from llava_consensus.evaluation.report.rows import Row
from llava_consensus.evaluation.report.samples import Report, Sample, common, is_plain_mean

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


def pair(first: Sample, second: Sample) -> Sample:
    """Two runs over the same units as one: resampling keeps their answers to a question together."""
    if not np.array_equal(first.strata, second.strata) or first.sums.shape != second.sums.shape:
        raise ValueError("two samples of different questions cannot be paired")
    width = first.sums.shape[1]
    return Sample(
        np.hstack([first.sums, second.sums]),
        first.strata,
        first.questions,
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
    first_sample, second_sample, name = first.sample, second.sample, first.benchmark
    if first_sample is None or second_sample is None:
        return None
    same_shape = first_sample.score is second_sample.score and first_sample.sums.shape == second_sample.sums.shape
    if (
        same_shape
        and np.array_equal(first_sample.questions, second_sample.questions)
        and np.array_equal(first_sample.strata, second_sample.strata)
    ):
        return _compare(first_sample, second_sample, name, count)
    return paired(first.report, second.report, name, count)


def paired(first: Report, second: Report, name: str, count: int = RESAMPLES) -> Comparison | None:
    """The same of two scorers' reports, whatever their headlines: of one question type, for example.

    Args:
        name: seeds the bootstrap, the benchmark's name.
    """
    samples = common(first, second)
    return None if samples is None else _compare(*samples, name, count)


def _compare(first: Sample, second: Sample, name: str, count: int) -> Comparison:
    resamples = draws(pair(first, second), name, count)
    shift = resamples[:, 0] - resamples[:, 1]
    low, high = interval(shift)
    observed = float(first.score(first.sums.sum(axis=0)) - second.score(second.sums.sum(axis=0)))
    discordant = _discordant(first, second)
    if discordant is not None:
        return Comparison(
            observed, low, high, mcnemar(*discordant), "exact McNemar", len(first.questions), discordant, resamples
        )
    p = bootstrap_p(shift, observed)
    return Comparison(observed, low, high, p, "paired bootstrap", len(first.questions), None, resamples)


def _discordant(first: Sample, second: Sample) -> tuple[int, int] | None:
    """Units right in one run only, where the score is a mean of right and wrong over units; else None."""
    if not (is_plain_mean(first) and is_plain_mean(second)):
        return None
    first_right, second_right = first.sums[:, 0], second.sums[:, 0]
    return int((first_right > second_right).sum()), int((second_right > first_right).sum())


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
