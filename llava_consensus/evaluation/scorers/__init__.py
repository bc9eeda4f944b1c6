"""Scorers: pure text functions, one file per family, each equal to an official script to the last bit.

A scorer takes texts and references and returns numbers together with what it read out of every answer. It opens no
file and knows no benchmark; `llava_consensus.evaluation.benchmarks` reads the files and joins answers to references.
`tests/evaluation/scorers` holds each against cases scored by the official code.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Score(NamedTuple):
    """One scored answer."""

    value: float  # 0..1
    extracted: str  # what the scorer read out of the answer


def mean(values: Iterable[float]) -> float:
    """Plain left-to-right sum divided by the count; 0.0 of nothing.

    Not `sum`: since Python 3.12 it compensates rounding, and the official numbers were made without.
    """
    total, count = 0.0, 0
    for value in values:
        total += value
        count += 1
    return total / count if count else 0.0
