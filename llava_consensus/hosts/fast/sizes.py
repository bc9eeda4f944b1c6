"""Lengths that are rounded up, so that few of them occur, and what the buffers of such lengths take."""

from typing import NamedTuple

WORDS, ROWS = 16, 128  # the steps in which rows of text behind a picture, and rows of a cache, are rounded up
FINENESS = 4  # steps between two powers of two: no more than a quarter is rounded up beyond the first step


def rounded(length: int, step: int) -> int:
    """A length rounded up: to `step`, and from four steps on to a quarter of the power of two below it. 0 stays 0."""
    power = 1 << max(length.bit_length() - 1, 0)
    unit = max(step, power // FINENESS)
    return -(-length // unit) * unit


class CacheSize(NamedTuple):
    """What the keys and values of a batch take, all of it allocated before anything is asked."""

    layers: int
    rows: int  # R of the batch
    heads: int  # of keys
    width: int  # of a head
    length: int  # positions of each row, rounded up
    itemsize: int  # bytes of a number

    @property
    def bytes(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.layers * self.rows * self.heads * self.width * self.length * self.itemsize


def cache_length(prompt: int, answer: int) -> int:
    """Positions that are allocated for a prompt of so many rows, its words rounded up, and an answer."""
    return rounded(prompt + answer, ROWS)
