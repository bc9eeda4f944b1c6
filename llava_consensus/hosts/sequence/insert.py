"""Reductions as rows of a sequence: which rows leave, what takes their place, and what became of each picture."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from llava_consensus.hosts.base import PictureOutcome
from llava_consensus.hosts.sequence.layout import Layout, Unit
from llava_consensus.hosts.sequence.splice import NEVER, Channel, Inserts, Rule, Sequence, rows_of, wide
from llava_consensus.reduction.tokens import BEHIND, PLACE, Reduction


class Group(NamedTuple):
    """Units that went through the method together."""

    units: list[Unit]
    reduction: Reduction


def lengths(layout: Layout, groups: list[Group]) -> list[int]:
    """Real rows of each sequence after the reduction; known from shapes, nothing waits for the device."""
    counts: list[int] = layout.real.sum(1).tolist()
    for units, reduction in groups:
        for unit in units:
            counts[layout.pictures[unit.picture].row] -= len(unit.places) - reduction.tokens.shape[1]
    return counts


def outcomes(layout: Layout, groups: list[Group]) -> list[PictureOutcome]:
    """Tokens before and after of every picture, with the bookkeeping of its units in order."""
    after = [picture.before for picture in layout.pictures]
    parts: list[list[tuple[int, Reduction]]] = [[] for _ in layout.pictures]
    for units, reduction in groups:
        for index, unit in enumerate(units):
            after[unit.picture] += reduction.tokens.shape[1] - len(unit.places)
            fields = [value[index : index + 1] if isinstance(value, Tensor) else value for value in reduction]
            parts[unit.picture].append((unit.part, Reduction._make(fields)))
    return [
        PictureOutcome(
            picture.row, picture.before, after[i], picture.structural, tuple(sorted(parts[i], key=lambda part: part[0]))
        )
        for i, picture in enumerate(layout.pictures)
    ]


def inserts(full: Sequence, layout: Layout, groups: list[Group], order: str) -> tuple[Tensor, Inserts]:
    """Which rows leave [R, S], and the reduced tokens with their places."""
    rows, width = full.real.shape
    device = full.embeds.device
    dropped = torch.zeros(rows, width, dtype=torch.bool)
    longest = max(reduction.tokens.shape[1] for _, reduction in groups) + 1
    stride = 3 * (longest * (1 + max(unit.part for unit in layout.units)) + 1)
    slot_counts = [0] * rows
    slot_row: list[int] = []
    slot_column: list[int] = []
    keys: list[Tensor] = []
    values: dict[str, list[Tensor]] = {name: [] for name in full.everything()}
    for group in groups:
        for unit in group.units:
            row, count = layout.pictures[unit.picture].row, group.reduction.tokens.shape[1]
            dropped[row, unit.places] = True
            slot_row += [row] * count
            slot_column += range(slot_counts[row], slot_counts[row] + count)
            slot_counts[row] += count
        for name, value in _values(full, layout, group).items():
            values[name].append(value.flatten(0, 1))
        keys.append(_sort_keys(layout, group, device, (order, stride, longest)).flatten())
    slot = (torch.tensor(slot_row, device=device), torch.tensor(slot_column, device=device))
    size = max(slot_counts)
    filled = {}
    for name, channel in full.everything().items():
        blank = channel.values.new_full((rows, size, *channel.values.shape[2:]), channel.blank)
        filled[name] = blank.index_put(slot, torch.cat(values[name]).to(blank.dtype))
    places = torch.full((rows, size), NEVER, device=device).index_put(slot, torch.cat(keys))
    return dropped.to(device), Inserts(filled, places, stride)


def _values(full: Sequence, layout: Layout, group: Group) -> dict[str, Tensor]:
    """What the reduced tokens of a group get in each channel: [B, K + M, ...]."""
    device, reduction = full.embeds.device, group.reduction
    place = _source_places(group, device)
    row = torch.tensor([layout.pictures[unit.picture].row for unit in group.units], device=device)
    values = {"embeds": reduction.tokens}
    for name, channel in full.everything().items():
        if name == "embeds":
            continue
        if channel.rule is Rule.BLANK:
            values[name] = channel.values.new_full((*place.shape, *channel.values.shape[2:]), channel.blank)
        elif channel.rule is Rule.SOURCE:
            values[name] = channel.values[row[:, None], place]
        else:
            columns = torch.stack([unit.places for unit in group.units]).to(device)
            values[name] = _means(channel.values[row[:, None], columns], reduction)
    return values


def _means(values: Tensor, reduction: Reduction) -> Tensor:
    """Mean of a channel over the tokens each slot was made of: [B, N, ...] -> [B, K + M, ...]. Kept tokens have their
    own value, bit for bit; a slot that stands for no patch is zero.
    """
    slots = reduction.source.shape[1]
    member = one_hot(reduction.owner + 1, slots + 1)[..., 1:].transpose(1, 2).to(values.dtype)  # [B, K + M, N]
    flat = values.flatten(2) if values.ndim > 2 else values[..., None]
    count = member.sum(-1, keepdim=True)
    mean = (member @ flat / count.clamp_min(1)).reshape(len(values), slots, *values.shape[2:])
    source_values = rows_of(values, reduction.source.clamp_min(0))
    return torch.where(wide(count[..., 0] == 1, source_values), source_values, mean)


def _source_places(group: Group, device: torch.device) -> Tensor:
    """Place in the sequence of the token each slot stands for [B, K + M]; of the first where it stands for no patch."""
    places = torch.stack([unit.places for unit in group.units]).to(device)  # [B, N]
    return places.gather(1, group.reduction.source.clamp_min(0))


def _sort_keys(layout: Layout, group: Group, device: torch.device, scheme: tuple[str, int, int]) -> Tensor:
    """Sort keys [B, K + M] of reduced tokens, by zone: ahead of their unit, at their source's place, right after their
    unit, or behind the last row of their picture. A unit whose rows are mixed with those of other tiles has no place of
    its own: what belongs ahead of it stands behind the picture, and what belongs after it behind that.

    Behind each row there is room for three blocks of `stride // 3`: heads, tails, and what goes ahead of the next row.
    """
    order, stride, longest = scheme
    place, reduction = _source_places(group, device), group.reduction
    block, slots = stride // 3, place.shape[1]
    bases = []  # of the zones AHEAD, PLACE, AFTER, BEHIND
    for unit in group.units:
        picture = layout.pictures[unit.picture]
        first, last = int(unit.places[0]), int(unit.places[-1])
        heads = picture.end * stride + unit.part * longest + 1
        tails = heads + block
        stands_alone = last - first == len(unit.places) - 1 or len(unit.places) == picture.before
        zones = [first * stride - longest, 0, last * stride + block + 1] if stands_alone else [heads, 0, tails]
        bases.append([*zones, tails])
    zone = reduction.zone
    if zone is None:
        merged = torch.arange(slots, device=device) >= reduction.kept.shape[1]
        zone = torch.where(merged, PLACE if order == "raster" else BEHIND, PLACE).expand_as(place)
    base = torch.tensor(bases, device=device).gather(1, zone)
    return torch.where(zone == PLACE, place * stride, base + torch.arange(slots, device=device))


def with_pictures(full: Sequence, layout: Layout) -> Sequence:
    """The sequences with a channel that says which picture a visual token belongs to, to count what truncation left."""
    channel = Channel(picture_rows(layout).to(full.embeds.device), -1, Rule.SOURCE)
    return replace(full, channels={**full.channels, "picture": channel})


def picture_rows(layout: Layout) -> Tensor:
    """Which picture of the layout every visual token belongs to, else -1: [R, S]."""
    kinds, numbers = layout.kinds, torch.full(layout.real.shape, -1)
    for index, picture in enumerate(layout.pictures):
        numbers[picture.row][(kinds.picture[picture.row] == picture.source) & (kinds.token[picture.row] >= 0)] = index
    return numbers


def counted(outcomes: list[PictureOutcome], picture: Tensor) -> list[PictureOutcome]:
    """The outcomes with the visual tokens that are left in the sequences [R, S]. Waits for the device."""
    return [outcome._replace(after=int((picture == index).sum())) for index, outcome in enumerate(outcomes)]
