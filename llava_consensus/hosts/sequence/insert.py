"""Reductions as rows of a sequence: which rows leave, what takes their place, and what became of each picture."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from llava_consensus.hosts.base import PictureOutcome
from llava_consensus.hosts.sequence.layout import Layout, Unit
from llava_consensus.hosts.sequence.slots import Keys, Reduced, slots_of
from llava_consensus.hosts.sequence.splice import Channel, Inserts, Rule, Sequence, Slots, rows_of, wide
from llava_consensus.reduction.tokens import PLACE, Reduction


class Group(NamedTuple):
    """Units that went through the method together."""

    units: list[Unit]
    reduction: Reduction


def outcomes(layout: Layout, groups: list[Group]) -> list[PictureOutcome]:
    """Tokens before and after of every picture, with the bookkeeping of its units in order."""
    after = [picture.before for picture in layout.pictures]
    parts: list[list[tuple[int, Reduction]]] = [[] for _ in layout.pictures]
    for units, reduction in groups:
        for index, unit in enumerate(units):
            after[unit.picture] += reduction.tokens.shape[1] - len(unit.places)
            parts[unit.picture].append((unit.part, _of_unit(reduction, index)))
    return [
        PictureOutcome(
            picture.row,
            picture.before,
            after[i],
            picture.structural,
            tuple(sorted(parts[i], key=lambda part: part[0])),
            origin=layout.origin(picture),
        )
        for i, picture in enumerate(layout.pictures)
    ]


def _of_unit(reduction: Reduction, index: int) -> Reduction:
    """What one unit of a group became."""
    if len(reduction.tokens) == 1:
        return reduction
    return Reduction._make(value[index : index + 1] if isinstance(value, Tensor) else value for value in reduction)


def planned(full: Sequence, layout: Layout, groups: list[Group], order: str) -> tuple[Slots, list[Keys]]:
    """Where the reduced tokens go, and of what their sort keys are made."""
    reduced = [Reduced(tuple(units), one.kept.shape[1], one.tokens.shape[1]) for units, one in groups]
    return slots_of(layout, reduced, order, full.embeds.device)


def inserts(full: Sequence, groups: list[Group], keys: list[Keys]) -> Inserts:
    """The reduced tokens with what goes with them, and their places."""
    values: dict[str, list[Tensor]] = {name: [] for name in full.everything()}
    sort_keys = []
    for group, group_keys in zip(groups, keys, strict=True):
        place = group_keys.columns.gather(1, group.reduction.source.clamp_min(0))  # of no patch: the unit's first
        for name, value in _values(full, group.reduction, group_keys, place).items():
            values[name].append(value.flatten(0, 1))
        sort_keys.append(_sort_keys(group.reduction, group_keys, place).flatten())
    return Inserts(values, sort_keys)


def _values(full: Sequence, reduction: Reduction, keys: Keys, place: Tensor) -> dict[str, Tensor]:
    """What the reduced tokens of a group, whose sources stand at `place` [B, K + M], get in each channel:
    [B, K + M, ...].
    """
    values = {"embeds": reduction.tokens}
    for name, channel in full.everything().items():
        if name == "embeds":
            continue
        if channel.rule is Rule.BLANK:
            values[name] = channel.values.new_full((*place.shape, *channel.values.shape[2:]), channel.blank)
        elif channel.rule is Rule.SOURCE:
            values[name] = channel.values[keys.row, place]
        else:
            values[name] = _means(channel.values[keys.row, keys.columns], reduction)
    return values


def _sort_keys(reduction: Reduction, keys: Keys, place: Tensor) -> Tensor:
    """Sort keys [B, K + M] of reduced tokens, by the zones of the method or else by its order."""
    at_source = place * keys.stride
    if reduction.zone is not None:
        by_zone = keys.by_zone.gather(1, reduction.zone[:, None])[:, 0]
        return torch.where(reduction.zone == PLACE, at_source, by_zone)
    return at_source if keys.fixed is None else torch.where(keys.at_source, at_source, keys.fixed)


def _means(values: Tensor, reduction: Reduction) -> Tensor:
    """Mean of a channel over the tokens each slot was made of, rounded where its values are whole numbers:
    [B, N, ...] -> [B, K + M, ...]. Kept tokens have their own value, bit for bit; a slot that stands for no patch is
    zero.
    """
    slots = reduction.source.shape[1]
    whole = not values.is_floating_point()
    dtype = torch.float32 if whole else values.dtype
    member = one_hot(reduction.owner + 1, slots + 1)[..., 1:].transpose(1, 2).to(dtype)  # [B, K + M, N]
    flat = (values.flatten(2) if values.ndim > 2 else values[..., None]).to(dtype)
    count = member.sum(-1, keepdim=True)
    mean = (member @ flat / count.clamp_min(1)).reshape(len(values), slots, *values.shape[2:])
    if whole:
        mean = mean.round().to(values.dtype)
    source_values = rows_of(values, reduction.source.clamp_min(0))
    return torch.where(wide(count[..., 0] == 1, source_values), source_values, mean)


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
