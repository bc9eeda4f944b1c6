"""Where every row of a batch stands while methods cut inside the decoder: bookkeeping of shortened sequences.

Counts are known beforehand and live on the CPU; which tokens stay is known to the device alone, so places are tensors
and nothing waits for it. Sequences are padded on the right from the first cut on, and put back to their full length
behind the last layer. Letters: R rows of the batch, S full length, W current length, P pictures, v their tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from llava_consensus.hosts.base import PictureOutcome
from llava_consensus.hosts.sequence.layout import Layout, Unit
from llava_consensus.hosts.sequence.splice import NEVER, rows_of, wide
from llava_consensus.reduction.decoder import Chosen, Cut
from llava_consensus.reduction.tokens import Reduction

STRIDE = 1 << 24  # sort key of a row is its place times this; tokens merged behind a place rank below it
PER_CUT = 1 << 16


@dataclass(eq=False)
class Seen:
    """One picture that will be cut, in one row of the forward."""

    unit: Unit
    row: int  # of the forward: beams repeat the rows of the layout
    end: int  # place of its last row in the full sequence
    text: list[int]  # places of the rows whose queries are asked
    cuts: list[Cut]
    left: int  # visual tokens now
    merged: int  # of them made at the last cut
    first: bool  # of the beams of one prompt: the one that is reported
    entering: list[int]  # visual tokens entering each layer so far
    measures: dict[str, list[Tensor]] = field(default_factory=dict)  # what the method says of its choices, cut by cut


class Rows(NamedTuple):
    """The current sequences of a batch. Padding has `real` false and `origin` S."""

    positions: Tensor  # [R, W] position ids, or [R, W, A] of A axes
    origin: Tensor  # [R, W] place in the full sequence; a merged token's is that of the dropped token it stands for
    owner: Tensor  # [R, W] which seen picture a visual token belongs to, else -1
    key: Tensor  # [R, W] int64 order
    real: Tensor  # [R, W]
    lengths: tuple[int, ...]  # real rows of each sequence
    first: Tensor  # [R, 1] position id of each sequence's first real row, or [R, 1, A]
    size: int  # S

    @property
    def padded(self) -> bool:
        """Whether any sequence is shorter than the longest."""
        return min(self.lengths) < self.real.shape[1]


def seen_pictures(layout: Layout, units: list[tuple[Unit, list[Cut]]], beams: int, asks: str) -> list[Seen]:
    """The pictures that will be cut, once for each beam of their prompt."""
    seen = []
    for unit, cuts in units:
        picture = layout.pictures[unit.picture]
        text = picture.text.tolist()
        if asks == "last" or not text:
            text = [int(layout.asked[picture.row].nonzero()[-1])]
        for beam in range(beams):
            row, count = picture.row * beams + beam, len(unit.places)
            seen.append(Seen(unit, row, picture.end, text, cuts, count, 0, beam == 0, []))
    return seen


def full_rows(layout: Layout, seen: list[Seen], positions: Tensor, beams: int) -> Rows:
    """The sequences before the first cut.

    Args:
        positions: [R, S] position ids the decoder was given, or [R, S, A].
    """
    real = layout.real.repeat_interleave(beams, 0)
    owner = torch.full(real.shape, -1)
    for index, picture in enumerate(seen):
        owner[picture.row, picture.unit.places] = index
    lengths, start = tuple(real.sum(1).tolist()), real.int().argmax(1, keepdim=True)
    real, owner, start = (values.to(positions.device) for values in (real, owner, start))
    size = real.shape[1]
    place = torch.arange(size, device=positions.device).expand_as(real)
    origin = torch.where(real, place, size)
    return Rows(positions, origin, owner, place * STRIDE, real, lengths, rows_of(positions, start), size)


def columns_of(rows: Rows, seen: list[Seen], indices: list[int]) -> Tensor:
    """Places of the visual tokens of these pictures in the current sequences, in order: [P, v]."""
    device = rows.owner.device
    batch = torch.tensor([seen[index].row for index in indices], device=device)
    owned = (rows.owner[batch] == torch.tensor(indices, device=device)[:, None]).to(torch.uint8)
    return torch.sort(owned, dim=1, descending=True, stable=True).indices[:, : seen[indices[0]].left]


def text_of(rows: Rows, seen: list[Seen], indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The asked rows of these pictures, padded at the end: places in the full and in the current sequence, and which
    are real. Each [P, L].
    """
    device = rows.origin.device
    batch = torch.tensor([seen[index].row for index in indices], device=device)
    count = torch.tensor([len(seen[index].text) for index in indices])
    places = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(seen[index].text) for index in indices], batch_first=True, padding_value=0
    ).to(device)
    slots = torch.arange(rows.origin.shape[1], device=device).expand_as(rows.origin)
    now = torch.zeros(len(slots), rows.size + 1, dtype=torch.long, device=device).scatter(1, rows.origin, slots)
    mask = (torch.arange(places.shape[1]) < count[:, None]).to(device)
    return places, now[batch].gather(1, places), mask


class Group(NamedTuple):
    """Pictures that were cut together."""

    indices: list[int]  # into the seen pictures
    columns: Tensor  # [P, v]
    cut: Cut
    chosen: Chosen


def shorten(rows: Rows, hidden: Tensor, seen: list[Seen], groups: list[Group], renumber: bool) -> tuple[Rows, Tensor]:
    """The sequences without the dropped tokens and with the merged ones behind their pictures.

    Args:
        hidden: [R, W, D] states that enter the layer.
        renumber: whether position ids close the gaps.
    """
    device, (count, width) = hidden.device, rows.origin.shape
    dropped = torch.zeros(count, width, dtype=torch.bool, device=device)
    added: list[list[Tensor]] = []  # of each picture with merged tokens: row, states, owner, key, origin
    lengths = list(rows.lengths)
    for group in groups:
        indices, columns, _, chosen = group
        batch = torch.tensor([seen[index].row for index in indices], device=device)
        kept_mask = torch.zeros_like(columns, dtype=torch.bool).scatter(1, chosen.kept, True)
        dropped[batch[:, None].expand_as(columns), columns] = ~kept_mask
        for index in indices:
            lengths[seen[index].row] += chosen.kept.shape[1] - columns.shape[1]
        if chosen.merged is not None and chosen.centres is not None:
            added += _merged(rows, seen, group, batch)
            for index in indices:
                lengths[seen[index].row] += chosen.merged.shape[1]
    keys = rows.key.masked_fill(dropped | ~rows.real, NEVER)
    pool, channels = hidden, [rows.positions, rows.origin, rows.owner, keys]
    if added:
        pool, channels = _append(pool, channels, added)
    order = channels[3].sort(dim=1, stable=True).indices[:, : max(lengths)]
    real = torch.arange(order.shape[1], device=device) < torch.tensor(lengths, device=device)[:, None]
    positions, origin, owner, key = (rows_of(values, order) for values in channels)
    if renumber:
        step = torch.arange(order.shape[1], device=device)
        positions = rows.first + wide(step[None], rows.first)
    positions, origin = positions.where(wide(real, positions), 0), origin.where(real, rows.size)
    owner = owner.where(real, -1)
    shorter = Rows(positions, origin, owner, key, real, tuple(lengths), rows.first, rows.size)
    return shorter, rows_of(pool, order).where(real[..., None], 0)


def _merged(rows: Rows, seen: list[Seen], group: Group, batch: Tensor) -> list[list[Tensor]]:
    """Row, states, position, origin, owner and key of the merged tokens of every picture of a group."""
    merged, centres = group.chosen.merged, group.chosen.centres
    assert merged is not None and centres is not None
    slots = group.columns.gather(1, centres)  # [P, M]
    positions, origin = rows.positions[batch[:, None], slots], rows.origin[batch[:, None], slots]
    rank = 1 + torch.arange(merged.shape[1], device=merged.device) + group.cut.layer * PER_CUT
    merged_rows = []
    for place, index in enumerate(group.indices):
        owner = torch.full_like(origin[place], index)
        key = rank + seen[index].end * STRIDE
        merged_rows.append([batch[place].expand_as(owner), merged[place], positions[place], origin[place], owner, key])
    return merged_rows


def _append(hidden: Tensor, channels: list[Tensor], added: list[list[Tensor]]) -> tuple[Tensor, list[Tensor]]:
    """Rows with the merged tokens behind them, in a block as wide as all merged tokens together."""
    row, states, *values = (torch.cat(parts) for parts in zip(*added, strict=True))
    in_row = row[None] == torch.arange(len(hidden), device=hidden.device)[:, None]  # [R, all merged]
    pool = torch.cat((hidden, states.to(hidden.dtype).expand(len(hidden), -1, -1)), dim=1)
    blank = (0, 0, -1, NEVER)
    longer = [
        torch.cat((channel, torch.where(wide(in_row, channel), value, filler)), dim=1)
        for channel, value, filler in zip(channels, values, blank, strict=True)
    ]
    return pool, longer


def note_measures(seen: list[Seen], indices: list[int], measures: Mapping[str, Tensor]) -> None:
    """What a method says of its choice at one cut, [P, ...] each, is kept with every picture."""
    for name, values in measures.items():
        for place, index in enumerate(indices):
            seen[index].measures.setdefault(name, []).append(values[place].detach())


def put_back(rows: Rows, hidden: Tensor) -> Tensor:
    """States at their places in the full sequence, zero where a token was dropped: [R, W, D] -> [R, S, D]."""
    full = hidden.new_zeros(hidden.shape[0], rows.size + 1, hidden.shape[2])
    return full.scatter(1, rows.origin[..., None].expand_as(hidden), hidden)[:, :-1]


def outcome(layout: Layout, rows: Rows, hidden: Tensor, seen: list[Seen], index: int) -> PictureOutcome:
    """What became of one picture, after its last cut."""
    seen_picture = seen[index]
    picture = layout.pictures[seen_picture.unit.picture]
    columns = columns_of(rows, seen, [index])
    places = rows.origin[seen_picture.row, columns[0]]
    source = torch.searchsorted(seen_picture.unit.places.to(places.device), places)[None]  # [1, v]
    kept_count = seen_picture.left - seen_picture.merged
    slots = torch.arange(seen_picture.left, device=places.device)[None]
    owner = torch.full((1, len(seen_picture.unit.places)), -1, device=places.device).scatter(1, source, slots)
    reduction = Reduction(
        hidden[seen_picture.row, columns[0]][None].detach(),
        source[:, :kept_count].sort(1).values,
        source[:, kept_count:],
        source,
        owner,
        measures={name: torch.stack(values)[None] for name, values in seen_picture.measures.items()},
    )
    return PictureOutcome(
        picture.row,
        picture.before,
        seen_picture.left,
        picture.structural,
        ((0, reduction),),
        tuple(seen_picture.entering),
        layout.origin(picture),
    )
