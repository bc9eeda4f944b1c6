"""KV caches with free room behind their rows: new rows are written in place, where a cache of transformers copies all
rows for each new one.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

# of transformers 5; 4.37 has none, and is not given room
DynamicLayer: Any = getattr(cache_utils, "DynamicLayer", object)
ROOM = 64  # rows that are free when a room is made


def spread(cache: Any, owners: Sequence[int]) -> None:
    """Expands the cache of P sequences to R rows: row r continues sequence `owners[r]`."""
    if all(type(layer) is DynamicLayer for layer in cache.layers):
        cache.layers = [RoomyLayer(layer.keys, layer.values, owners) for layer in cache.layers]
    else:  # sliding windows hold their rows in other ways
        cache.batch_select_indices(torch.tensor(owners))


class RoomyLayer(DynamicLayer):
    """The cache of one layer. `keys` and `values` are the part of their room that is filled.

    Args:
        keys, values: [P, H, L, D] of sequences.
        owners: sequence that each row r continues.
    """

    keys: Tensor
    values: Tensor
    _rooms: list[Tensor]  # [R, H, at least L, D] of keys and values
    _shown: Tensor  # the keys as this class has left them

    def __init__(self, keys: Tensor, values: Tensor, owners: Sequence[int]) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self._take([_roomy(one, owners) for one in (keys, values)], keys.shape[-2])

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Writes new rows [R, H, n, D] after the others, and returns all of them."""
        if not self.is_initialized:  # it was reset; the next rows get a room
            return super().update(key_states, value_states)
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        if self.keys is not self._shown or end > self._rooms[0].shape[-2]:  # cropped, reordered; or full
            rows = range(len(self.keys))
            self._rooms = [_roomy(one, rows, end) for one in (self.keys, self.values)]
        for room, new in zip(self._rooms, (key_states, value_states), strict=True):
            room[:, :, start:end] = new
        self._take(self._rooms, end)
        return self.keys, self.values

    def _take(self, rooms: list[Tensor], length: int) -> None:
        self._rooms = rooms
        self.keys, self.values = (room[:, :, :length] for room in rooms)
        self._shown = self.keys


def _roomy(rows: Tensor, owners: Sequence[int], least: int = 0) -> Tensor:
    """Rows [P, H, L, D] as their owners have them [R, H, at least `least` and L, with room, D]."""
    _, heads, length, width = rows.shape
    room = rows.new_empty(len(owners), heads, max(length, least) + ROOM, width)
    if len(rows) == 1:
        room[:, :, :length] = rows
    else:
        for row, owner in enumerate(owners):  # without a copy of all of them in between
            room[row, :, :length] = rows[owner]
    return room
