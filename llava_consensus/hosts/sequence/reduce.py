"""Reduces assembled sequences: the seam every host shares once its full input sequence and the layout of it are known.

Collects what the method needs, hands over the units in batches, and puts the reduced tokens back where they belong.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llava_consensus.hosts.base import ImageOutcome, VisionTaps
from llava_consensus.hosts.sequence.layout import Layout, Unit
from llava_consensus.hosts.sequence.splice import NEVER, Inserts, Sequences, splice
from llava_consensus.hosts.tower import taps as capture
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.stopwatch import Stopwatch
from llava_consensus.reduction.tokens import (
    BEHIND,
    PLACE,
    ClipSides,
    Reduction,
    TextProbe,
    VisionAttention,
    VisualTokens,
)


class Source(NamedTuple):
    """Where a method's inputs come from."""

    taps: VisionTaps  # of all tiles of the batch, in the order the host encodes them
    decoder: Any  # inner language model, for the probe
    prompts: Tensor  # [R] int64 fingerprint of each row's prompt
    clip: ClipSides | None = None  # patches of all tiles; text of each row


class Group(NamedTuple):
    """Units that went through the method together."""

    units: list[Unit]
    reduction: Reduction


def reduce_sequences(
    full: Sequences, layout: Layout, method: Method, source: Source, stages: Stopwatch
) -> tuple[Sequences, list[ImageOutcome]]:
    """The sequences with their visual tokens reduced and padding on the right, and what became of each picture."""
    with stages.time("probe"):
        probe = _probe(full, layout, source.decoder) if "probe" in method.needs else None
    groups = []
    for units in layout.groups(method.adaptive):
        with stages.time("gather"):
            tokens = _gather(full, layout, units, source)._replace(probe=probe)
        groups.append(Group(units, _timed(method, tokens, units[0].budget)))
    with stages.time("splice"):
        dropped, inserts = _inserts(full, layout, groups, method.order)
        out = splice(full, dropped, inserts, _lengths(layout, groups))
    return out, outcomes(layout, groups)


def _lengths(layout: Layout, groups: list[Group]) -> list[int]:
    """Real rows of each sequence after the reduction; known from shapes, nothing waits for the device."""
    lengths: list[int] = layout.real.sum(1).tolist()
    for units, reduction in groups:
        for unit in units:
            lengths[layout.pictures[unit.picture].row] -= len(unit.places) - reduction.tokens.shape[1]
    return lengths


def _timed(method: Method, tokens: VisualTokens, budget: Budget) -> Reduction:
    """The reduction with its time: by the method's own stages, or as one where it has none."""
    whole = Stopwatch(tokens.projected.device)
    with whole.time("method"):
        reduction = method.reduce(tokens, budget)
    return reduction if reduction.stages is not None else reduction._replace(stages=whole)


def outcomes(layout: Layout, groups: list[Group]) -> list[ImageOutcome]:
    """Tokens before and after of every picture, with the bookkeeping of its units in order."""
    after = [picture.before for picture in layout.pictures]
    parts: list[list[tuple[int, Reduction]]] = [[] for _ in layout.pictures]
    for units, reduction in groups:
        for index, unit in enumerate(units):
            after[unit.picture] += reduction.tokens.shape[1] - len(unit.places)
            own = [value[index : index + 1] if isinstance(value, Tensor) else value for value in reduction]
            parts[unit.picture].append((unit.part, Reduction._make(own)))
    return [
        ImageOutcome(
            picture.row, picture.before, after[i], picture.structural, tuple(sorted(parts[i], key=lambda part: part[0]))
        )
        for i, picture in enumerate(layout.pictures)
    ]


def _gather(full: Sequences, layout: Layout, units: list[Unit], source: Source) -> VisualTokens:
    """What the method reads of these units, on the device of the sequences."""
    taps, device = source.taps, full.embeds.device
    row = torch.tensor([layout.pictures[unit.picture].row for unit in units], device=device)
    columns = torch.stack([unit.places for unit in units]).to(device)
    tile = torch.stack([unit.tile for unit in units])
    used, tile = tile.unique(
        return_inverse=True
    )  # saliency is worked out once for each tile, not for each question about it
    used, tile = used.to(device), tile.to(device)

    def of_used(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.to(device)[used]

    query, key = of_used(taps.query), of_used(taps.key)
    fingerprint = of_used(taps.fingerprint)
    return VisualTokens(
        projected=full.embeds[row[:, None], columns],
        tile=tile,
        patch=torch.stack([unit.patch for unit in units]).to(device),
        tiles_per_unit=units[0].tiles,
        side=math.isqrt(taps.projected.shape[1]),
        slot=of_used(taps.slot),
        attention=None if query is None or key is None else VisionAttention(query, key, taps.scale, taps.classes),
        features=of_used(taps.features),
        class_feature=of_used(taps.class_feature),
        project=taps.project,
        clip=None
        if source.clip is None
        else ClipSides(source.clip.patches[used], *(side[row] for side in source.clip[1:])),
        probed=torch.tensor([layout.probes[1][unit.picture] for unit in units], device=device),
        columns=columns,
        fingerprint=None if fingerprint is None else fingerprint[tile[:, 0]] ^ source.prompts.to(device)[row],
    )


def _probe(full: Sequences, layout: Layout, decoder: Any) -> TextProbe:
    """Layer 0's view of the text rows after each picture, once where several pictures have the same."""
    device, (pictures, _) = full.embeds.device, layout.probes
    rows = torch.nn.utils.rnn.pad_sequence([picture.text for picture in pictures], batch_first=True)
    count = torch.tensor([len(picture.text) for picture in pictures])
    row_mask = (torch.arange(rows.shape[1]) < count[:, None]).to(device)
    batch = torch.tensor([picture.row for picture in pictures], device=device)
    rows = rows.to(device)
    fields = capture.probe_first_layer(decoder, full.embeds, full.positions, rows, batch)
    return TextProbe(rows=rows, row_mask=row_mask, key_mask=full.real[batch], **fields)


def _inserts(full: Sequences, layout: Layout, groups: list[Group], order: str) -> tuple[Tensor, Inserts]:
    """Which rows leave [R, S], and the reduced tokens with their places."""
    rows, width, depth = full.embeds.shape
    device = full.embeds.device
    dropped = torch.zeros(rows, width, dtype=torch.bool)
    longest = max(reduction.tokens.shape[1] for _, reduction in groups) + 1
    stride = 3 * (longest * (1 + max(unit.part for unit in layout.units)) + 1)
    used = [0] * rows
    slot_row: list[int] = []
    slot_column: list[int] = []
    tokens, keys, positions = [], [], []
    for units, reduction in groups:
        for unit in units:
            row, count = layout.pictures[unit.picture].row, reduction.tokens.shape[1]
            dropped[row, unit.places] = True
            slot_row += [row] * count
            slot_column += range(used[row], used[row] + count)
            used[row] += count
        place = torch.stack([unit.places for unit in units]).to(device)  # [B, N]
        place = place.gather(1, reduction.source.clamp_min(0))  # [B, K + M]; no patch: the place of the first
        at_row = torch.tensor([layout.pictures[unit.picture].row for unit in units], device=device)[:, None]
        tokens.append(reduction.tokens.flatten(0, 1))
        positions.append(full.positions[at_row, place].flatten())
        keys.append(_sort_keys(place, reduction, layout, units, (order, stride, longest)).flatten())
    slot = (torch.tensor(slot_row, device=device), torch.tensor(slot_column, device=device))
    size = max(used)
    inserts = Inserts(
        full.embeds.new_zeros(rows, size, depth).index_put(slot, torch.cat(tokens).to(full.embeds.dtype)),
        torch.full((rows, size), NEVER, device=device).index_put(slot, torch.cat(keys)),
        torch.zeros(rows, size, dtype=torch.long, device=device).index_put(slot, torch.cat(positions)),
        stride,
    )
    return dropped.to(device), inserts


def _sort_keys(
    place: Tensor, reduction: Reduction, layout: Layout, units: list[Unit], scheme: tuple[str, int, int]
) -> Tensor:
    """Sort keys [B, K + M] of reduced tokens, by zone: ahead of their unit, at their source's place, right after their
    unit, or behind the last row of their picture. A unit whose rows are mixed with those of other tiles has no place of
    its own: what belongs ahead of it stands behind the picture, and what belongs after it behind that.

    Behind each row there is room for three blocks of `stride // 3`: heads, tails, and what goes ahead of the next row.
    """
    order, stride, longest = scheme
    block, slots = stride // 3, place.shape[1]
    bases = []  # of the zones AHEAD, PLACE, AFTER, BEHIND
    for unit in units:
        picture = layout.pictures[unit.picture]
        first, last = int(unit.places[0]), int(unit.places[-1])
        heads = picture.end * stride + unit.part * longest + 1
        tails = heads + block
        alone = last - first == len(unit.places) - 1 or len(unit.places) == picture.before
        own = [first * stride - longest, 0, last * stride + block + 1] if alone else [heads, 0, tails]
        bases.append([*own, tails])
    zone = reduction.zone
    if zone is None:
        merged = torch.arange(slots, device=place.device) >= reduction.kept.shape[1]
        zone = torch.where(merged, PLACE if order == "raster" else BEHIND, PLACE).expand_as(place)
    base = torch.tensor(bases, device=place.device).gather(1, zone)
    return torch.where(zone == PLACE, place * stride, base + torch.arange(slots, device=place.device))
