"""Keys and values in fixed places: row `r` of a sequence stands at place `r` of its buffers, whatever the length of its
neighbours, so that padding behind a prompt is overwritten by the answer.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from llava_consensus.hosts.fast.sizes import CacheSize


class Layer(NamedTuple):
    """The buffers of one decoder layer: [R, H_kv, length, d] each."""

    keys: Tensor
    values: Tensor


class FixedCache:
    """The cache that the layers of a decoder are given in place of transformers' own.

    Args:
        size: of all of it.
        like: a tensor of the type and device of the numbers.
    """

    def __init__(self, size: CacheSize, like: Tensor) -> None:
        shape = size.rows, size.heads, size.length, size.width
        self.size = size
        self.layers = [Layer(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(size.layers)]
        self._place: slice | Tensor = slice(0, 0)

    def at(self, place: slice | Tensor) -> "FixedCache":
        """The cache, which writes what it is given next at these places: a slice for all rows, or [R] one for each."""
        self._place = place
        return self

    def update(self, key: Tensor, value: Tensor, layer: int, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Writes keys and values [R, H_kv, n, d] of a layer, and returns all that a query can see with them."""
        keys, values = self.layers[layer]
        if isinstance(self._place, slice):
            keys[:, :, self._place].copy_(key)
            values[:, :, self._place].copy_(value)
            return keys[:, :, : self._place.stop], values[:, :, : self._place.stop]
        index = self._place[:, None, None, None].expand_as(key)
        return keys.scatter_(2, index, key), values.scatter_(2, index, value)

    def get_seq_length(self, layer: int = 0) -> int:
        """Nothing is counted here: positions and masks are always given."""
        return 0

    def begin_with(self, front: "list[Layer]") -> None:
        """Puts the same first rows [1, H_kv, P, d] in front of every sequence."""
        for layer, first in zip(self.layers, front, strict=True):
            for buffer, values in zip(layer, first, strict=True):
                buffer[:, :, : values.shape[2]].copy_(values)

    def first_rows(self, count: int) -> "list[Layer]":
        """A copy of the first rows of the first sequence."""
        return [Layer(*(buffer[:1, :, :count].clone() for buffer in layer)) for layer in self.layers]


def seen_by_prompt(begin: int, rows: int, device: torch.device) -> Tensor:
    """Which places each of `rows` rows from place `begin` on sees: [1, 1, rows, begin + rows], by causality alone."""
    place = torch.arange(begin + rows, device=device)
    return (place <= place[begin:, None])[None, None]


def seen_by_answer(place: Tensor, length: int) -> Tensor:
    """Which places the one row at `place` [R] sees: [R, 1, 1, length]."""
    return (torch.arange(length, device=place.device) <= place[:, None])[:, None, None]
