"""Rows in, rows out: takes the rows of dropped visual tokens out of assembled sequences, puts the reduced tokens in,
and pads again.

Everything is one gather over the whole batch. Lengths are known beforehand, so nothing waits for the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = torch.iinfo(torch.int64).max
IGNORE = -100  # label of rows without a target


@dataclass
class Sequences:
    """Assembled sequences of a batch."""

    embeds: Tensor  # [R, S, D]
    labels: Tensor | None  # [R, S]
    positions: Tensor  # [R, S]
    real: Tensor  # [R, S] true where the row is not padding


@dataclass
class Inserts:
    """Reduced tokens of a batch, padded to the longest row."""

    tokens: Tensor  # [R, T, D]
    order: Tensor  # [R, T] int64 place in the sequence times `stride`, plus a rank; NEVER where there is no token
    positions: Tensor  # [R, T]
    stride: int


def splice(full: Sequences, dropped: Tensor, inserts: Inserts, lengths: list[int]) -> Sequences:
    """The sequences without their `dropped` [R, S] rows and with the inserts at their places, padded on the right.

    Args:
        lengths: real rows of each resulting sequence.
    """
    device = full.embeds.device
    place = torch.arange(dropped.shape[1], device=device) * inserts.stride
    order = torch.where(full.real & ~dropped, place, NEVER)  # [R, S]
    index = torch.cat((order, inserts.order), dim=1).sort(dim=1, stable=True).indices[:, : max(lengths)]  # of S + T
    real = torch.arange(index.shape[1], device=device) < torch.tensor(lengths, device=device)[:, None]
    pool = torch.cat((full.embeds, inserts.tokens), dim=1)
    labels = full.labels
    if labels is not None:
        labels = torch.cat((labels, labels.new_full(inserts.positions.shape, IGNORE)), dim=1).gather(1, index)
    positions = torch.cat((full.positions, inserts.positions), dim=1).gather(1, index)
    return blank_padding(
        Sequences(pool.gather(1, index[..., None].expand(-1, -1, pool.shape[-1])), labels, positions, real)
    )


def cut(sequences: Sequences, limit: int) -> Sequences:
    """The first `limit` rows of right-padded sequences, as LLaVA truncates."""
    labels = None if sequences.labels is None else sequences.labels[:, :limit]
    return Sequences(sequences.embeds[:, :limit], labels, sequences.positions[:, :limit], sequences.real[:, :limit])


def pad_left(sequences: Sequences) -> Sequences:
    """The same sequences with their padding moved to the front."""
    size = sequences.real.shape[1]
    shift = size - sequences.real.sum(1, keepdim=True)
    index = (torch.arange(size, device=shift.device) - shift) % size
    labels = None if sequences.labels is None else sequences.labels.gather(1, index)
    embeds = sequences.embeds.gather(1, index[..., None].expand_as(sequences.embeds))
    return blank_padding(
        Sequences(embeds, labels, sequences.positions.gather(1, index), sequences.real.gather(1, index))
    )


def blank_padding(sequences: Sequences) -> Sequences:
    """Zero embeddings and positions and label -100 wherever a row is padding."""
    real = sequences.real
    labels = None if sequences.labels is None else sequences.labels.where(real, IGNORE)
    return Sequences(sequences.embeds.where(real[..., None], 0), labels, sequences.positions.where(real, 0), real)
