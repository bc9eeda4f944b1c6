"""Rows in, rows out: takes the rows of dropped visual tokens out of assembled sequences, puts the reduced tokens in,
and pads again.

Everything is one gather over the whole batch. Lengths are known beforehand, so nothing waits for the device.
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

    def everything(self) -> dict[str, Channel]:
        """All channels, positions and embeddings among them."""
        base_channels = {
            "embeds": Channel(self.embeds, 0, Rule.BLANK),
            "positions": Channel(self.positions, 0, Rule.SOURCE),
        }
        return {**base_channels, **self.channels}

    def with_values(self, real: Tensor, values: dict[str, Tensor]) -> "Sequence":
        """The same channels with other values, blank wherever a row is padding."""
        blanked = {
            name: value.where(wide(real, value), channel.blank)
            for (name, channel), value in zip(self.everything().items(), values.values(), strict=True)
        }
        embeds, positions = blanked.pop("embeds"), blanked.pop("positions")
        channels = {name: self.channels[name]._replace(values=value) for name, value in blanked.items()}
        return replace(self, embeds=embeds, real=real, positions=positions, channels=channels)


class Inserts(NamedTuple):
    """Reduced tokens of a batch, padded to the longest row."""

    values: dict[str, Tensor]  # [R, T, ...] by channel, embeddings among them
    order: Tensor  # [R, T] int64 place in the sequence times `stride`, plus a rank; NEVER where there is no token
    stride: int


def splice(full: Sequence, dropped: Tensor, inserts: Inserts, lengths: list[int]) -> Sequence:
    """The sequences without their `dropped` [R, S] rows and with the inserts at their places, padded on the right.

    Args:
        lengths: real rows of each resulting sequence.
    """
    device = full.embeds.device
    place = torch.arange(dropped.shape[1], device=device) * inserts.stride
    order = torch.where(full.real & ~dropped, place, NEVER)  # [R, S]
    index = torch.cat((order, inserts.order), dim=1).sort(dim=1, stable=True).indices[:, : max(lengths)]  # of S + T
    real = torch.arange(index.shape[1], device=device) < torch.tensor(lengths, device=device)[:, None]
    pools = {
        name: torch.cat((channel.values, inserts.values[name]), dim=1) for name, channel in full.everything().items()
    }
    return full.with_values(real, {name: rows_of(pool, index) for name, pool in pools.items()})


def cut(full: Sequence, limit: int) -> Sequence:
    """The first `limit` rows of right-padded sequences."""
    values = {name: channel.values[:, :limit] for name, channel in full.everything().items()}
    return full.with_values(full.real[:, :limit], values)


def pad_left(full: Sequence) -> Sequence:
    """The same sequences with their padding moved to the front."""
    size = full.real.shape[1]
    shift = size - full.real.sum(1, keepdim=True)
    index = (torch.arange(size, device=shift.device) - shift) % size
    values = {name: rows_of(channel.values, index) for name, channel in full.everything().items()}
    return full.with_values(full.real.gather(1, index), values)


def rows_of(values: Tensor, index: Tensor) -> Tensor:
    """Rows of [R, S, ...] named by an index [R, K]: [R, K, ...]."""
    return values.gather(1, wide(index, values).expand(*index.shape, *values.shape[2:]))


def wide(flat: Tensor, like: Tensor) -> Tensor:
    """[R, S] with as many dimensions as `like` [R, S, ...]."""
    return flat.reshape(*flat.shape, *(1,) * (like.ndim - 2))
