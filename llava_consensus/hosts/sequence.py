"""Assembled sequences of a batch, and the one edit there is (`edit`): rows leave, others come in at their places, and
what is left is padded on the right. Before the first layer and between layers it is the same.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

# A row's place is one number by which rows are sorted; numbers far apart let rows come in between without a new count.
NEVER = torch.iinfo(torch.int64).max  # place of rows that leave
ROW = 1 << 40  # distance of the places of two rows; between them is room for what stands after the first:
HEADS, TAILS, NEXT = 1 << 36, 2 << 36, 3 << 36  # three stretches, the last one for what belongs ahead of the second row
PART = 1 << 20  # in each of them, one block for each part of a picture, or for each cut


class Rule(Enum):
    """What a reduced token gets in a channel."""

    SOURCE = "the value of the token it stands for: itself, or its anchor"
    MEAN = "the mean over the tokens it was made of"
    BLANK = "the value of padding"


class Channel(NamedTuple):
    """Values that go with the rows of a sequence, such as labels, positions or token types."""

    values: Tensor  # [R, S, ...]
    blank: float  # of padding
    rule: Rule = Rule.SOURCE


@dataclass(frozen=True)
class Sequence:
    """Assembled sequences of a batch: what the language model reads, row by row."""

    embeds: Tensor  # [R, S, D]
    real: Tensor  # [R, S] true where the row is not padding
    positions: Tensor  # [R, S], or [R, S, A] of A axes
    channels: dict[str, Channel] = field(default_factory=dict)  # whatever else goes with the rows
    unpadded: bool = False  # whether all rows are known to be real

    def everything(self) -> dict[str, Channel]:
        """All channels, positions and embeddings among them."""
        return {"embeds": Channel(self.embeds, 0, Rule.BLANK), "positions": Channel(self.positions, 0), **self.channels}

    def with_values(self, real: Tensor, values: dict[str, Tensor], unpadded: bool = False) -> "Sequence":
        """The same channels with other values."""
        channels = {name: channel._replace(values=values[name]) for name, channel in self.channels.items()}
        return Sequence(values["embeds"], real, values["positions"], channels, unpadded)


class Inserts(NamedTuple):
    """Rows that come into the sequences of a batch."""

    sequence: list[int]  # [t] which sequence each belongs to
    place: Tensor  # [t]
    values: dict[str, Tensor]  # [t, ...] by channel


class Edited(NamedTuple):
    """What `edit` makes of sequences."""

    values: dict[str, Tensor]  # [R, S', ...] by channel
    real: Tensor  # [R, S'] true where a row is no padding
    unpadded: bool  # whether all rows are real


def edit(channels: Mapping[str, Channel], place: Tensor, lengths: list[int], inserts: Inserts | None = None) -> Edited:
    """The sequences with their rows, and those that come in, in the order of their places, padded on the right.

    It is one gather over the whole batch. How many rows are left is known beforehand, so nothing waits for the device.

    Args:
        channels: values [R, S, ...] that go with the rows.
        place: [R, S] int64, NEVER for rows that leave and for padding; of row i that stays, i times ROW.
        lengths: rows each new sequence has; those at the end of a longer one are cut off.
        inserts: the rows that come in.
    """
    (count, width), device = place.shape, place.device
    longest, came = max(lengths), inserts is not None
    unpadded = min(lengths) == longest
    real = (torch.arange(longest) < torch.tensor(lengths)[:, None]).to(device)
    pool_places = [place.flatten()]  # of the pool: all rows, sequence after sequence, what comes in, and a blank row
    candidates = torch.arange(count * width, device=device).view(count, width)  # rows of the pool for each sequence
    blank = count * width
    if inserts is not None:
        own: dict[int, list[int]] = defaultdict(list)
        for number, sequence in enumerate(inserts.sequence):
            own[sequence].append(blank + number)
        blank += len(inserts.sequence)
        most = max(map(len, own.values()), default=0)
        added = [own[row] + [blank] * (most - len(own[row])) for row in range(count)]
        candidates = torch.cat((candidates, torch.tensor(added, dtype=torch.long).to(device)), dim=1)
        pool_places += [inserts.place, place.new_full((1,), NEVER)]
    places = torch.cat(pool_places)[candidates] if came else place
    # Rows that leave and padding have the greatest place, so one sort moves them to the end, where they are cut off.
    index = candidates.gather(1, places.sort(dim=1, stable=True).indices[:, :longest])
    if not unpadded:
        index = index.where(real, blank)
    values = {}
    for name, channel in channels.items():
        pool = [channel.values.flatten(0, 1)]
        if inserts is not None:
            pool.append(inserts.values[name].to(pool[0].dtype))
        if not unpadded:
            pool.append(pool[0].new_full((1, *pool[0].shape[1:]), channel.blank))
        values[name] = (torch.cat(pool) if len(pool) > 1 else pool[0])[index]
    return Edited(values, real, unpadded)


def pad_left(full: Sequence) -> Sequence:
    """The same sequences with their padding moved to the front."""
    if full.unpadded:
        return full
    size = full.real.shape[1]
    shift = size - full.real.sum(1, keepdim=True)
    index = (torch.arange(size, device=shift.device) - shift) % size
    real = full.real.gather(1, index)
    moved = {name: rows_of(channel.values, index) for name, channel in full.everything().items()}
    blanks = {name: channel.blank for name, channel in full.everything().items()}
    return full.with_values(real, {name: value.where(wide(real, value), blanks[name]) for name, value in moved.items()})


def rows_of(values: Tensor, index: Tensor) -> Tensor:
    """Rows of [R, S, ...] named by an index [R, K]: [R, K, ...]."""
    return values.gather(1, wide(index, values).expand(*index.shape, *values.shape[2:]))


def wide(flat: Tensor, like: Tensor) -> Tensor:
    """[R, S] with as many dimensions as `like` [R, S, ...]."""
    return flat.reshape(*flat.shape, *(1,) * (like.ndim - 2))
