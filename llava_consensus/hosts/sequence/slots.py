"""Where reduced tokens go in a batch of sequences: what follows from the layout and from numbers of tokens alone. It is
worked out on the CPU once for a layout, and remembered with it on the device of the sequences.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from llava_consensus.hosts.sequence.layout import Layout, Unit
from llava_consensus.hosts.sequence.splice import NEVER, Slots
from llava_consensus.reduction.tokens import BEHIND, PLACE


class Reduced(NamedTuple):
    """Numbers of a group of units that went through the method together."""

    units: tuple[Unit, ...]
    kept: int
    tokens: int  # K + M


class Keys(NamedTuple):
    """Of what the sort keys of a group's B units are made. A key is the place in the sequence times `stride`, plus a
    rank: behind each row there is room for three blocks: heads, tails, and what goes ahead of the next row.
    """

    row: Tensor  # [B, 1] of the batch
    columns: Tensor  # [B, N] places of the unit's tokens
    by_zone: Tensor  # [B, 4, K + M] key of each slot in the zones AHEAD, PLACE (0), AFTER, BEHIND
    fixed: Tensor | None  # [B, K + M] keys of slots that stand behind the picture, where the method names no zones
    at_source: Tensor  # [K + M] true where a slot stands at its source's place, where the method names no zones
    stride: int


def slots_of(layout: Layout, groups: list[Reduced], order: str, device: torch.device) -> tuple[Slots, list[Keys]]:
    """Where the reduced tokens of these groups go, remembered with the layout."""
    key = ("slots", tuple(groups), order, device)
    return layout.once(key, lambda: (_slots(layout, groups, device), _keys(layout, groups, order, device)))


def _stride(layout: Layout, groups: list[Reduced]) -> tuple[int, int]:
    """Distance of the sort keys of two rows, and of two units in a block."""
    longest = max(group.tokens for group in groups) + 1
    return 3 * (longest * (1 + max(unit.part for unit in layout.units)) + 1), longest


def _slots(layout: Layout, groups: list[Reduced], device: torch.device) -> Slots:
    rows, width = layout.real.shape
    stays = layout.real.clone()
    own: list[list[int]] = [[] for _ in range(rows)]  # rows of the pool that are reduced tokens of each sequence
    for picture in layout.pictures:
        stays[picture.row, list(picture.leaving)] = False
    count = rows * width
    for group in groups:
        for unit in group.units:
            row = layout.pictures[unit.picture].row
            stays[row, unit.places] = False
            own[row] += range(count, count + group.tokens)
            count += group.tokens
    most = max(map(len, own))
    added = torch.tensor([ids + [count] * (most - len(ids)) for ids in own])
    candidates = torch.cat((torch.arange(rows * width).view(rows, width), added), dim=1)
    lengths = [left + len(ids) for left, ids in zip(stays.sum(1).tolist(), own, strict=True)]
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    keys = torch.where(stays, torch.arange(width) * _stride(layout, groups)[0], NEVER).flatten()
    unpadded = min(lengths) == max(lengths)
    return Slots(
        lengths, real.to(device), keys.to(device), torch.tensor([NEVER]).to(device), candidates.to(device), unpadded
    )


def _keys(layout: Layout, groups: list[Reduced], order: str, device: torch.device) -> list[Keys]:
    stride, longest = _stride(layout, groups)
    found = []
    for units, kept, tokens in groups:
        slots = torch.arange(tokens)
        zones = torch.tensor([_zones(layout, unit, stride, longest) for unit in units])  # [B, 4]
        by_zone = zones[..., None] + slots
        by_zone[:, PLACE] = 0
        at_source = (slots < kept) | (order == "raster")
        fixed = None if bool(at_source.all()) else by_zone[:, BEHIND].to(device)
        row = torch.tensor([[layout.pictures[unit.picture].row] for unit in units], device=device)
        columns = torch.stack([unit.places for unit in units]).to(device)
        found.append(Keys(row, columns, by_zone.to(device), fixed, at_source.to(device), stride))
    return found


def _zones(layout: Layout, unit: Unit, stride: int, longest: int) -> list[int]:
    """Key of the first slot in each zone of a unit: ahead of it, (at the source's place), right after it, or behind the
    last row of its picture. A unit whose rows are mixed with those of other tiles has no place of its own: what belongs
    ahead of it stands behind the picture, and what belongs after it behind that.
    """
    picture = layout.pictures[unit.picture]
    first, last = int(unit.places[0]), int(unit.places[-1])
    heads = picture.end * stride + unit.part * longest + 1
    tails = heads + stride // 3
    stands_alone = last - first == len(unit.places) - 1 or len(unit.places) == picture.before
    if stands_alone:
        return [first * stride - longest, 0, last * stride + stride // 3 + 1, tails]
    return [heads, 0, tails, tails]
