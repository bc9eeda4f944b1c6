"""Assembled sequences of a batch, and the one edit there is: rows leave, others take their places, padding is put
right.

Everything is one gather over the whole batch. Where rows may come from is known beforehand, so nothing waits for the
device.
"""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

NEVER = torch.iinfo(torch.int64).max


class Rule(Enum):
    """What a reduced token gets in a channel."""

    SOURCE = "the value of the token it stands for: itself, or its anchor"
    MEAN = "the mean over the tokens it was made of"
    BLANK = "the value of padding"


class Channel(NamedTuple):
    """Values that go with the rows of a sequence, such as labels, positions or token types."""

    values: Tensor  # [R, S, ...]
    blank: float  # of padding
    rule: Rule


@dataclass(frozen=True)
class Sequence:
    """Assembled sequences of a batch: what the language model reads, row by row."""

    embeds: Tensor  # [R, S, D]
    real: Tensor  # [R, S] true where the row is not padding
    positions: Tensor  # [R, S], or [R, S, A] of A axes
    channels: dict[str, Channel] = field(default_factory=dict)  # whatever else goes with the rows
    unpadded: bool = False  # whether all rows are known to be real
    position_rule: Rule = Rule.SOURCE  # what a merged token gets for its position

    def everything(self) -> dict[str, Channel]:
        """All channels, positions and embeddings among them."""
        base_channels = {
            "embeds": Channel(self.embeds, 0, Rule.BLANK),
            "positions": Channel(self.positions, 0, self.position_rule),
        }
        return {**base_channels, **self.channels}

    def blanked(self, real: Tensor, values: dict[str, Tensor]) -> "Sequence":
        """The same channels with other values, blank wherever a row is padding."""
        channels = self.everything()
        return self.with_values(
            real, {name: value.where(wide(real, value), channels[name].blank) for name, value in values.items()}
        )

    def with_values(self, real: Tensor, values: dict[str, Tensor], unpadded: bool = False) -> "Sequence":
        """The same channels with other values."""
        channels = {name: channel._replace(values=values[name]) for name, channel in self.channels.items()}
        return Sequence(values["embeds"], real, values["positions"], channels, unpadded)


class Slots(NamedTuple):
    """Where the rows of new sequences come from. The pool of rows: the R S rows of the sequences, one behind the other,
    all reduced tokens, and one blank row.
    """

    lengths: list[int]  # real rows of each new sequence
    real: Tensor  # [R, S'] true where a new row is no padding
    keys: Tensor  # [R S] sort key of each row there is, NEVER where it leaves or is padding
    never: Tensor  # [1] the key of the blank row
    candidates: Tensor  # [R, S + T] rows of the pool that may become rows of each new sequence; the blank one fills up
    unpadded: bool  # whether all new rows are real


class Inserts(NamedTuple):
    """Reduced tokens of a batch, group by group."""

    values: dict[str, list[Tensor]]  # [t, ...] by channel, embeddings among them
    keys: list[Tensor]  # [t] sort keys


def splice(full: Sequence, inserts: Inserts, slots: Slots) -> Sequence:
    """The sequences without the rows that leave and with the inserts at their places, padded on the right."""
    keys = torch.cat((slots.keys, *inserts.keys, slots.never))[slots.candidates]  # [R, S + T]
    order = keys.sort(dim=1, stable=True).indices[:, : slots.real.shape[1]]
    index = slots.candidates.gather(1, order)
    pools = {name: _pool(channel, inserts.values[name]) for name, channel in full.everything().items()}
    if slots.unpadded:
        return full.with_values(slots.real, {name: pool[index] for name, pool in pools.items()}, unpadded=True)
    index = index.where(slots.real, len(pools["embeds"]) - 1)
    return full.with_values(slots.real, {name: pool[index] for name, pool in pools.items()})


def _pool(channel: Channel, inserts: list[Tensor]) -> Tensor:
    """All rows of a channel, what is inserted, and a blank row."""
    rows = channel.values.flatten(0, 1)
    blank = rows.new_full((1, *rows.shape[1:]), channel.blank)
    return torch.cat((rows, *(values.to(rows.dtype) for values in inserts), blank))


def cut(full: Sequence, limit: int) -> Sequence:
    """The first `limit` rows of right-padded sequences."""
    values = {name: channel.values[:, :limit] for name, channel in full.everything().items()}
    return replace(full.blanked(full.real[:, :limit], values), unpadded=full.unpadded)


def pad_left(full: Sequence) -> Sequence:
    """The same sequences with their padding moved to the front."""
    if full.unpadded:
        return full
    size = full.real.shape[1]
    shift = size - full.real.sum(1, keepdim=True)
    index = (torch.arange(size, device=shift.device) - shift) % size
    values = {name: rows_of(channel.values, index) for name, channel in full.everything().items()}
    return full.blanked(full.real.gather(1, index), values)


def rows_of(values: Tensor, index: Tensor) -> Tensor:
    """Rows of [R, S, ...] named by an index [R, K]: [R, K, ...]."""
    return values.gather(1, wide(index, values).expand(*index.shape, *values.shape[2:]))


def wide(flat: Tensor, like: Tensor) -> Tensor:
    """[R, S] with as many dimensions as `like` [R, S, ...]."""
    return flat.reshape(*flat.shape, *(1,) * (like.ndim - 2))
