"""Differences that decide a claim: each with a 95 % interval, and one rule that makes a verdict of several.

    verdict([paired("M = 20 less M = 0", rows, other_rows)])     # true, false or undecided

A claim that one thing beats others is true where every interval lies above zero, false where one lies below, and
undecided otherwise. A claim that something does not matter is true where every interval lies within `MARGIN` of zero.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

from llava_consensus.evaluation.report.rows import Row
from llava_consensus.evaluation.report.stats import compare, interval

TRUE, FALSE, UNDECIDED, NOT_RUN = "true", "false", "undecided", "not run yet"
MARGIN = 2.0  # points; the paper's own spread for one configuration is as large (TextVQA)
SHOWN = 3  # contrasts in the evidence


class Contrast(NamedTuple):
    """A difference in points: what less what, and its 95 % interval."""

    words: str
    difference: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.words}: {self.difference:+.1f} ({self.low:+.1f} to {self.high:+.1f})"


class Verdict(NamedTuple):
    """What became of a claim here, and why."""

    verdict: str
    evidence: str = ""


def paired(words: str, first: Mapping[str, Row], second: Mapping[str, Row]) -> Contrast | None:
    """Mean over the benchmarks that both have, first less second, paired by question; None where there are no pairs."""
    differences, draws = [], []
    for name in sorted(first.keys() & second.keys()):
        test = compare(first[name], second[name])
        if test is not None:
            scale = first[name].facts.scale
            differences.append(test.difference / scale)
            draws.append((test.draws[:, 0] - test.draws[:, 1]) / scale)
    if not differences:
        return None
    low, high = interval(np.mean(draws, axis=0))
    return Contrast(words, sum(differences) / len(differences), low, high)


def mean_gain(words: str, rows: Sequence[Mapping[str, Any]]) -> Contrast | None:
    """Mean gain of rows of the study over different benchmarks; their intervals add up as independent ones do."""
    known = [row for row in rows if row.get("gain_interval") is not None]
    if not known:
        return None
    mean = sum(row["gain"] / row["scale"] for row in known) / len(known)
    halves = [(row["gain_interval"][1] - row["gain_interval"][0]) / 2 / row["scale"] for row in known]
    half = sqrt(sum(one * one for one in halves)) / len(known)
    return Contrast(words, mean, mean - half, mean + half)


def unpaired(
    words: str, first: Mapping[str, Mapping[str, Any]], second: Mapping[str, Mapping[str, Any]]
) -> Contrast | None:
    """Mean over the benchmarks that both have, of scores of the study that are known with their intervals alone: wider
    than a paired difference would be.
    """
    pairs = [(first[name], second[name]) for name in sorted(first.keys() & second.keys())]
    known = [pair for pair in pairs if all(row["interval"] for row in pair)]
    if not known:
        return None
    mean = sum((one["accuracy"] - other["accuracy"]) / one["scale"] for one, other in known) / len(known)
    halves = [(row["interval"][1] - row["interval"][0]) / 2 / row["scale"] for pair in known for row in pair]
    half = sqrt(sum(one * one for one in halves)) / len(known)
    return Contrast(words, mean, mean - half, mean + half)


def beats(contrasts: Iterable[Contrast | None]) -> Verdict:
    """The verdict on a claim that every difference is above zero."""
    known = [one for one in contrasts if one is not None]
    if not known:
        return Verdict(NOT_RUN)
    below = any(one.high < 0 for one in known)
    verdict = FALSE if below else TRUE if all(one.low > 0 for one in known) else UNDECIDED
    return Verdict(verdict, _evidence(sorted(known, key=lambda one: one.difference)))


def matters_not(contrasts: Iterable[Contrast | None]) -> Verdict:
    """The verdict on a claim that no difference is worth speaking of."""
    known = [one for one in contrasts if one is not None]
    if not known:
        return Verdict(NOT_RUN)
    apart = any(one.low > 0 or one.high < 0 for one in known)
    close = all(max(abs(one.low), abs(one.high)) < MARGIN for one in known)
    verdict = TRUE if close else FALSE if apart else UNDECIDED
    return Verdict(verdict, _evidence(sorted(known, key=lambda one: -abs(one.difference))))


def _evidence(contrasts: Sequence[Contrast]) -> str:
    """The first few of ordered contrasts, and how many there are."""
    more = f"; and {len(contrasts) - SHOWN} more that say less against it" if len(contrasts) > SHOWN else ""
    return "; ".join(map(str, contrasts[:SHOWN])) + more
