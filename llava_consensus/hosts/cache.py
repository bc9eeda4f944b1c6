"""What a prefill left behind: bytes of keys and values, layer by layer, read off the cache object the model returned.

Only sizes of tensors are looked at, so nothing waits for the device.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from llava_consensus.hosts.base import PictureOutcome, Prefill


class CachedLayer(NamedTuple):
    """The cache of one layer, all rows of the batch together."""

    bytes: int  # of keys and values
    rows: int  # R
    length: int  # positions of each row, padding among them


def cached_layers(cache: Any, axis: int = -2) -> list[CachedLayer]:
    """Sizes of a cache of transformers 5 (`layers`), of 4.37 (`key_cache`) or of the older tuples, whose keys have
    their positions along `axis`.
    """
    pairs: list[tuple[Tensor, Tensor]]
    if hasattr(cache, "layers"):
        pairs = [(layer.keys, layer.values) for layer in cache.layers]
    elif hasattr(cache, "key_cache"):
        pairs = list(zip(cache.key_cache, cache.value_cache, strict=True))
    else:
        pairs = [(layer[0], layer[1]) for layer in cache]
    return [CachedLayer(key.nbytes + value.nbytes, key.shape[0], key.shape[axis]) for key, value in pairs]


def prefills(
    layers: Sequence[CachedLayer], text: Sequence[tuple[int, int]], outcomes: Sequence[Sequence[PictureOutcome]]
) -> list[Prefill]:
    """What each row of a batch entered and cached.

    Args:
        layers: the cache of the batch.
        text: of each row, rows that are not visual tokens, and how many of them follow its last picture.
        outcomes: of each row, its pictures.
    Returns:
        One Prefill for each row. A row's own padding, known from the lengths of the rows, is taken off its share of the
        cache; what the cache holds beyond the longest row stays in.
    """
    structural = [sum(outcome.structural for outcome in row_outcomes) for row_outcomes in outcomes]
    rows = [count + more for (count, _), more in zip(text, structural, strict=True)]
    entering = [_entering(row_outcomes, len(layers)) for row_outcomes in outcomes]
    cached: list[list[int]] = [[] for _ in text]
    for index, layer in enumerate(layers):
        lengths = [min(text_rows + count[index], layer.length) for text_rows, count in zip(rows, entering, strict=True)]
        position_bytes = layer.bytes // (layer.rows * layer.length)  # of one position; all of them are equally large
        for row, length in enumerate(lengths):
            cached[row].append(position_bytes * (layer.length - max(lengths) + length))
    return [
        Prefill(text_rows, after, tuple(count), tuple(size))
        for text_rows, (_, after), count, size in zip(rows, text, entering, cached, strict=True)
    ]


def _entering(outcomes: Sequence[PictureOutcome], layers: int) -> list[int]:
    """Visual tokens of a row that entered each layer; an outcome says so where a method cuts inside the model."""
    counts = [getattr(outcome, "entering", ()) or (outcome.after,) * layers for outcome in outcomes]
    return [sum(count[layer] for count in counts) for layer in range(layers)]
