"""Forwards that hooks between decoder layers (`layer_hooks.py`) take part in: the prefill that is cut, and decode steps
on the cache it left; and where every row of a batch stands meanwhile.

Counts are known beforehand and live on the CPU; which tokens stay is known to the device alone, so places are tensors
and nothing waits for it. Sequences are padded on the left from the first cut on, since sliding windows count rows
from the last one, and put back to their full length after the last layer. Letters: R rows of the batch, S full
length, W current length, P pictures, v their tokens.
"""

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import CutDecoder, Heads, PictureOutcome, Tiles
from llava_consensus.hosts.caches import cache_given
from llava_consensus.hosts.derived.tap import heads_of
from llava_consensus.hosts.sequence import (
    NEVER,
    PART,
    ROW,
    TAILS,
    Assembled,
    Channel,
    Inserts,
    Layout,
    Unit,
    edit,
    pad_left,
    rows_of,
    wide,
)
from llava_consensus.hosts.source import MethodInputs, padded_rows, read_heads
from llava_consensus.hosts.towers import OLD
from llava_consensus.reduction import selection
from llava_consensus.reduction.calibration import far_logits, seen_logits
from llava_consensus.reduction.decoder import Chosen, Cut, DecoderView
from llava_consensus.reduction.tokens import Reduction, TextProbe

CUT_ROWS = 1 << 16  # of the sequences of pictures that are cut together; a copy of the keys is made for each picture
VALUES = "values"  # a method's `attention` that reads no queries and keys


@dataclass(eq=False)
class ImageState:
    """State of an image whose tokens are pruned between layers, in one row of the forward."""

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
    centres: Tensor | None = None  # [M] which of its n tokens those made at the last cut stand for
    joined: Tensor | None = None  # [n] which of the M each of them went into, -1 for none; None where nobody says


class BatchRows(NamedTuple):
    """The current sequences of a batch. Padding has `real` false and `origin` S."""

    positions: Tensor  # [R, W] position ids, or [R, W, A] of A axes
    origin: Tensor  # [R, W] place in the full sequence; a merged token's is that of the dropped token it stands for
    owner: Tensor  # [R, W] which seen picture a visual token belongs to, else -1
    place: Tensor  # [R, W] int64 place of `edit`: what orders them
    weight: Tensor  # [R, W] float32 number of tokens each row was made of
    real: Tensor  # [R, W]
    lengths: tuple[int, ...]  # real rows of each sequence
    first: Tensor  # [R, 1] position id of each sequence's first real row, or [R, 1, A]
    size: int  # S

    @property
    def padded(self) -> bool:
        """True if any sequence is shorter than the longest."""
        return min(self.lengths) < self.real.shape[1]


def image_states(layout: Layout, units: list[tuple[Unit, list[Cut]]], beams: int, asks: str) -> list[ImageState]:
    """The pictures that will be cut, once for each beam of their prompt."""
    seen = []
    for unit, cuts in units:
        picture = layout.pictures[unit.picture]
        text = picture.text.tolist()
        if asks == "last" or not text:
            text = [int(layout.asked[picture.row].nonzero()[-1])]
        for beam in range(beams):
            row, count = picture.row * beams + beam, len(unit.places)
            seen.append(ImageState(unit, row, picture.end, text, cuts, count, 0, beam == 0, []))
    return seen


def full_rows(layout: Layout, seen: list[ImageState], positions: Tensor, beams: int) -> BatchRows:
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
    weight = torch.ones(real.shape, device=positions.device)
    return BatchRows(positions, origin, owner, place * ROW, weight, real, lengths, rows_of(positions, start), size)


def columns_of(rows: BatchRows, seen: list[ImageState], indices: list[int]) -> Tensor:
    """Places of the visual tokens of these pictures in the current sequences, in order: [P, v]."""
    device = rows.owner.device
    batch = torch.tensor([seen[index].row for index in indices], device=device)
    owned = rows.owner[batch] == torch.tensor(indices, device=device)[:, None]
    return selection.indices(owned, seen[indices[0]].left)


def text_of(rows: BatchRows, seen: list[ImageState], indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The asked rows of these pictures, padded at the end: places in the full and in the current sequence, and which
    are real. Each [P, L]. In the place of a picture's row that was dropped the last one before it asks.
    """
    device = rows.origin.device
    batch = torch.tensor([seen[index].row for index in indices], device=device)
    places, mask = (part.to(device) for part in padded_rows([torch.tensor(seen[index].text) for index in indices]))
    slots = torch.arange(rows.origin.shape[1], device=device).expand_as(rows.origin)
    now = torch.full((len(slots), rows.size + 1), -1, device=device).scatter(1, rows.origin, slots)
    now = now.where(now >= 0, now.cummax(1).values).clamp_min(0)
    return places, now[batch].gather(1, places), mask


class CutGroup(NamedTuple):
    """Pictures that were cut together."""

    indices: list[int]  # into the seen pictures
    columns: Tensor  # [P, v]
    cut: Cut
    chosen: Chosen


def shorten(
    rows: BatchRows, hidden: Tensor, seen: list[ImageState], groups: list[CutGroup], renumber: bool
) -> tuple[BatchRows, Tensor]:
    """The sequences without the dropped tokens and with the merged ones, at their centres or after their pictures.

    Args:
        hidden: [R, W, D] states that enter the layer.
        renumber: whether position ids close the gaps.
    """
    device, lengths = hidden.device, list(rows.lengths)
    dropped = torch.zeros_like(rows.real)
    into: list[int] = []  # sequence of every merged token, and what goes with each
    merged: dict[str, list[Tensor]] = defaultdict(list)
    for indices, columns, cut, chosen in groups:
        own = [seen[index].row for index in indices]
        batch = torch.tensor(own, device=device)[:, None]
        kept = torch.zeros_like(columns, dtype=torch.bool).scatter(1, chosen.kept, True)
        dropped[batch.expand_as(columns), columns] = ~kept
        for row in own:
            lengths[row] += chosen.kept.shape[1] - columns.shape[1]
        if chosen.merged is None or chosen.centres is None:
            continue
        count, centres = chosen.merged.shape[1], columns.gather(1, chosen.centres)  # [P, M]
        for row in own:
            lengths[row] += count
            into += [row] * count
        ends = torch.tensor([[seen[index].end] for index in indices], device=device)
        after = ends * ROW + TAILS + cut.layer * PART + torch.arange(count, device=device)
        at = rows.place[batch, centres] if chosen.in_place else after.expand_as(centres)
        values = {"hidden": chosen.merged, "positions": rows.positions[batch, centres], "place": at}
        values |= {"origin": rows.origin[batch, centres], "weight": chosen.sizes()}
        values |= {"owner": torch.tensor(indices, device=device)[:, None].expand_as(centres)}
        for name, value in values.items():
            merged[name].append(value.flatten(0, 1))
    place = rows.place.masked_fill(dropped | ~rows.real, NEVER)
    channels = {
        "hidden": Channel(hidden, 0),
        "positions": Channel(rows.positions, 0),
        "origin": Channel(rows.origin, rows.size),
        "owner": Channel(rows.owner, -1),
        "place": Channel(place, NEVER),
        "weight": Channel(rows.weight, 1.0),
    }
    together = {name: torch.cat(parts) for name, parts in merged.items()}
    new, real, unpadded = edit(channels, place, lengths, Inserts(into, together["place"], together) if into else None)
    if renumber:
        positions = rows.first + wide(torch.arange(real.shape[1], device=device)[None], rows.first)
        new["positions"] = positions.expand(new["positions"].shape)
    others = {name: channels[name]._replace(values=new[name]) for name in ("origin", "owner", "place", "weight")}
    out = pad_left(Assembled(new["hidden"], real, new["positions"], others, unpadded))
    origin, owner, place, weight = (channel.values for channel in out.channels.values())
    shorter = BatchRows(out.positions, origin, owner, place, weight, out.real, tuple(lengths), rows.first, rows.size)
    return shorter, out.embeds


def note_choice(picture: ImageState, places: Tensor, chosen: Chosen, number: int) -> None:
    """Stores what one cut left of a picture, the one of that number among those cut together.

    Args:
        places: [v] where its tokens stood in the full sequence.
    """
    picture.merged = 0 if chosen.merged is None else chosen.merged.shape[1]
    picture.left = chosen.kept.shape[1] + picture.merged
    if chosen.centres is None:
        picture.centres = picture.joined = None
        return
    own = torch.searchsorted(picture.unit.places.to(places.device), places)  # [v] which of its n tokens
    picture.centres = own[chosen.centres[number]]
    if chosen.joined is not None:
        none = torch.full((len(picture.unit.places),), -1, device=places.device)
        picture.joined = none.scatter(0, own, chosen.joined[number])


def note_measures(seen: list[ImageState], indices: list[int], measures: Mapping[str, Tensor]) -> None:
    """Stores the measures of a method at one cut, [P, ...] each, with every picture."""
    for name, values in measures.items():
        for place, index in enumerate(indices):
            seen[index].measures.setdefault(name, []).append(values[place].detach())


def outcome(layout: Layout, rows: BatchRows, hidden: Tensor, seen: list[ImageState], index: int) -> PictureOutcome:
    """Outcome of one picture after its last cut."""
    seen_picture = seen[index]
    picture = layout.pictures[seen_picture.unit.picture]
    columns = columns_of(rows, seen, [index])
    places = rows.origin[seen_picture.row, columns[0]]
    source = torch.searchsorted(seen_picture.unit.places.to(places.device), places)[None]  # [1, v]
    slots = torch.arange(seen_picture.left, device=places.device)[None]
    owner = torch.full((1, len(seen_picture.unit.places)), -1, device=places.device).scatter(1, source, slots)
    centres = source.new_empty(0) if seen_picture.centres is None else seen_picture.centres
    made = torch.isin(source, centres)
    if seen_picture.joined is not None:
        owner = owner.where(seen_picture.joined < 0, owner[:, centres[seen_picture.joined]])
    # how many were made is known, which they are only to the device: the sort lets nothing wait for it
    parted = source.gather(1, made.to(torch.uint8).argsort(dim=1, stable=True))
    kept, anchors = parted.split((seen_picture.left - seen_picture.merged, seen_picture.merged), 1)
    reduction = Reduction(
        hidden[seen_picture.row, columns[0]][None].detach(),
        kept.sort(1).values,
        anchors,
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


class PendingPrefill(NamedTuple):
    """Sequences whose prefill comes next, and the cuts to apply to them."""

    layout: Layout
    units: list[tuple[Unit, list[Cut]]]
    embeds: Callable[[], Tensor | None]  # dead once the sequence is gone
    tiles: list[Tiles]  # of each picture, for methods that read the tower
    more: int = 0  # rows after the prompt that is cut, where there is no cache or where they are only guessed


@dataclass(eq=False)
class CutState:
    """State that the hooks between layers share during a call."""

    armed: PendingPrefill | None = None  # a sequence that is about to be read and cut
    forward: "CutForward | DecodeStep | None" = None  # under way
    given: Any = None  # mask that the model was given, where it makes those of layers itself
    placed: bool | None = None  # whether it was given positions; None where its entrance does not tell
    layer_parts: dict[str, Tensor] = field(default_factory=dict)  # queries and keys of the layer before a cut
    kernel_call: Any = None  # or the call of its attention kernel
    mask: Any = None  # [R, columns] of the forward under way
    outer: Mapping[str, Any] = field(default_factory=dict)  # positions among the arguments of that forward
    cache: Any = None  # that a prefill which is cut will fill


class Columns(NamedTuple):
    """The cached columns that layers of one depth share after the prefill."""

    width: int
    padded: bool
    real: Tensor  # [R, W]
    shift: Tensor  # [R, 1] how much smaller the next position is than in the full sequence
    sizes: Tensor | None = None  # [R, W] how many tokens each column stands for, where attention is calibrated


@dataclass(eq=False)
class CutCache:
    """Metadata of a prefill that decode steps need."""

    size: int  # S
    columns: dict[int, Columns]  # of each layer from the first cut on
    holes: bool = False  # whether a later turn may have left padding after the prompt

    @property
    def behind(self) -> int:
        """Rows of the prompt that are missing in the first layer, by whose length models and `generate` count."""
        return self.size - self.columns[0].width if 0 in self.columns else 0

    def grown(self, cache: Any) -> int:
        """Rows a cache was given since. Its own length is that of the first layer, which may have been cut before."""
        first = self.columns.get(0)
        return cache.get_seq_length() - (self.size if first is None else first.width)


class CutForward:
    """The forward that is cut."""

    def __init__(
        self, attachment: Any, call: Any, state: CutState, armed: PendingPrefill, embeds: Tensor, kwargs: dict[str, Any]
    ) -> None:
        self.state, self.layout, self.embeds, self.more = state, armed.layout, embeds, armed.more
        self.method, self.decoder = attachment.stages[-1].method, attachment.here.decoder
        self.watch = call.report.watch
        check_window(self.decoder, armed.layout.real.shape[1])
        check_first_layer(armed.units)
        if self.method.calibrates:
            check_kernel(self.decoder)
        beams = len(embeds) // len(armed.layout.real)
        self.seen = image_states(armed.layout, armed.units, beams, self.method.asks)
        self.cuts: dict[int, list[int]] = defaultdict(list)  # layer -> seen pictures
        for index, picture in enumerate(self.seen):
            for cut in picture.cuts:
                self.cuts[cut.layer].append(index)
        positions = self.decoder.positions(kwargs, len(embeds), state.outer)
        self.source: MethodInputs | None = None  # of what the vision tower says of these pictures
        if attachment.cuts_by_tower and armed.tiles:  # of a host that hands them over
            real = armed.layout.real.to(embeds.device)
            full = Assembled(embeds[::beams], real, positions[::beams])
            prompts = torch.zeros(len(real), dtype=torch.long)  # no fingerprint is asked for here
            self.source = MethodInputs(full, armed.layout, armed.tiles, attachment.here.tower, self.method, prompts)
        self.rows: BatchRows = full_rows(armed.layout, self.seen, positions, beams)
        self.full, self.reach = self.rows, self.rows.size
        self.sees_ahead: bool = getattr(self.decoder, "sees_ahead", False)
        self.columns: dict[int, Columns] = {}
        self.memories: dict[tuple[int, ...], dict[str, Tensor]] = defaultdict(dict)  # of pictures cut together
        self.cached: Columns | None = None  # of the layers since the last cut
        self.sizes: Tensor | None = None  # [R, W] how many tokens each row stands for there
        self.changes: dict[str, dict[str, Any]] = {}  # to the arguments of those of each kind

    def wants(self, layer: int) -> bool:
        """True if the queries and keys of a layer are needed."""
        return layer + 1 in self.cuts

    def enter(self, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """States and changed arguments of layer `index`."""
        entering = hidden
        if index in self.cuts:
            hidden = self._cut(index, hidden, kwargs)
        calibrates = self.method.calibrates
        if index in self.cuts or (calibrates and index == 1 and 0 in self.columns):  # sizes are others from there on
            self.sizes, self.changes = self._sizes(index) if calibrates else None, {}
            self.cached = self._cached(index)
        for picture in self.seen:
            picture.entering.append(picture.left)
        if self.cached is None:
            return hidden, {}
        self.columns[index], view = self.cached, at(self.decoder, index)
        kind = getattr(view, "kind", "")
        if kind not in self.changes:
            mask = self._mask(view, hidden, kwargs.get("attention_mask"))
            self.changes[kind] = view.arguments(hidden, self.rows.positions, mask)
        others = {
            name: along(value, self.rows.origin)
            for name, value in kwargs.items()
            if name not in self.changes[kind] and isinstance(value, Tensor) and value is not entering and value.ndim > 1
            and value.shape[1] == self.rows.size and value.shape[0] in (1, len(hidden))
        }  # fmt: skip
        return hidden, {**self.changes[kind], **others}

    def _mask(self, view: CutDecoder, hidden: Tensor, given: Any) -> Tensor | None:
        """Attention mask of a layer for rows [R, W, D]: [R, 1, W, W], boolean or additive; None is plain causal.
        `given` is that of the full prompt.
        """
        rows, width, window = self.rows, hidden.shape[1], getattr(view, "window", None)
        ahead = None
        if self.sees_ahead and isinstance(given, Tensor) and given.ndim == 4:
            seen = given if given.dtype == torch.bool else given > torch.finfo(given.dtype).min / 2
            ahead = seen[:, 0].triu(1)
            ahead = ahead | ahead.transpose(1, 2)  # merged rows stand behind some that they see
            ahead = along(along(ahead, rows.origin).transpose(1, 2), rows.origin)  # [R, W, W], symmetric
        need = rows.padded or view.kernel == "eager" or ahead is not None or self.sizes is not None
        if not need and (window is None or width <= window):
            return None
        mask = causal(rows.real, width, window, ahead)
        if self.sizes is None:
            return mask
        angles = getattr(view, "angles", view.rotary)  # of another package's view they are those of its taps
        far = far_logits(*angles(hidden, rows.positions))
        if self.more:  # rows after the prompt, which are read as decode steps are
            far = far.masked_fill((rows.origin >= rows.size - self.more)[..., None], 0.0)
        return seen_logits(mask, self.sizes, far, hidden.dtype)

    def _sizes(self, layer: int) -> Tensor:
        """Number of tokens each row stands for, [R, W]: those it was made of, and in the first layer for each visual
        token an equal part of its picture, as in the code of RESTORE's authors.
        """
        if layer:
            return self.rows.weight
        parts = [len(one.unit.places) / one.left for one in self.seen]
        return torch.tensor([*parts, 1.0], device=self.rows.owner.device)[self.rows.owner]  # no picture's is the last

    def _cached(self, layer: int) -> Columns:
        """Columns that the KV cache of the layers from here on will hold."""
        rows, full = self.rows, self.full
        shift = torch.tensor(full.lengths) - torch.tensor(rows.lengths) if self._closes(layer) else torch.tensor([0])
        real = rows.real[:, : rows.real.shape[1] - self.more]  # guesses come one prompt at a time, so at the very end
        sizes = None if self.sizes is None else self.sizes[:, : real.shape[1]]
        return Columns(real.shape[1], rows.padded, real, shift[:, None].to(real.device), sizes)

    def _closes(self, layer: int) -> bool:
        """True if positions are renumbered from this layer on."""
        return self.method.closes_gaps(layer) and not getattr(self.decoder, "keeps_positions", False)

    def _cut(self, layer: int, hidden: Tensor, given: dict[str, Any]) -> Tensor:
        """Lets the method choose among all pictures cut here, equal ones together, and shortens the sequences."""
        method, watch = self.method, self.watch
        batches: dict[Any, list[int]] = defaultdict(list)
        for index in self.cuts[layer]:
            picture = self.seen[index]
            cut = next(cut for cut in picture.cuts if cut.layer == layer)
            batches[
                picture.unit.budget, len(picture.unit.places), picture.left, cut, index if method.adaptive else 0
            ].append(index)
        groups, most = [], max(1, CUT_ROWS // self.full.size)
        together = [(cut, own[i : i + most]) for (*_, cut, _), own in batches.items() for i in range(0, len(own), most)]
        for cut, indices in together:
            with watch.time("view"):
                view = self._view(layer, cut, indices, hidden, given)
            # as in `reduce`: autocast would compute saliencies in half precision
            with torch.autocast(hidden.device.type, enabled=False):
                groups.append(CutGroup(indices, view.columns, cut, method.select(view, watch)))
        with watch.time("shorten"):
            before = self.rows
            self.rows, hidden = shorten(before, hidden, self.seen, groups, self._closes(layer))
        for indices, columns, _, chosen in groups:
            for number, index in enumerate(indices):
                note_choice(self.seen[index], before.origin[self.seen[index].row, columns[number]], chosen, number)
            note_measures(self.seen, indices, chosen.measures)
        return hidden

    def _view(
        self, layer: int, cut: Cut, indices: list[int], hidden: Tensor, given: dict[str, Any]
    ) -> DecoderView:  # fmt: skip
        """Input of the method at a cut, for these pictures."""
        rows, decoder = self.rows, self.decoder
        batch = torch.tensor([self.seen[index].row for index in indices], device=hidden.device)
        text_places, asked_columns, mask = text_of(rows, self.seen, indices)
        columns = columns_of(rows, self.seen, indices)
        visual_places = torch.stack([self.seen[index].unit.places for index in indices]).to(hidden.device)
        query, key, cos, sin, scale, cap = self._heads(layer, hidden.detach(), asked_columns, batch, given)
        all_rows = [self.seen[index].row for index in indices] == list(range(len(hidden)))  # then nothing is copied
        key, cos, sin, real = (tensor if all_rows else tensor[batch] for tensor in (key, cos, sin, rows.real))
        probe = TextProbe(query, key, cos, sin, scale, asked_columns, mask, real, cap=cap)
        embeds = self.embeds.detach()
        inputs = embeds[batch[:, None], visual_places], embeds[batch[:, None], text_places]
        states = hidden[batch[:, None], columns], hidden[batch[:, None], asked_columns]
        units = [self.seen[index].unit for index in indices]
        tower = None if self.source is None else self.source.tokens(*self.source.indexed([units]))
        memory = self.memories[tuple(indices)]
        return DecoderView(units[0].budget.tokens, cut, *states, columns, probe, *inputs, decoder.norm, tower, memory)

    @torch.no_grad()
    def _heads(
        self, layer: int, hidden: Tensor, asked_columns: Tensor, batch: Tensor, given: dict[str, Any]
    ) -> Heads:  # fmt: skip
        """Queries [P, H, L, d] of the asked rows and keys [R, H_kv, W, d], of the layer the method looks at; without
        heads where it looks at none.
        """
        if self.method.attention == "none":
            query = hidden.new_empty(len(batch), 0, asked_columns.shape[1], 1)
            none = hidden.new_empty(len(hidden), 0, hidden.shape[1], 1)
            return Heads(query, none, none.sum(1), none.sum(1), 1.0)
        if self.method.attention == "own":
            more = {"given": given} if hasattr(self.decoder, "read") else {}
            return read_heads(self.decoder, layer, hidden, self.rows.positions, batch, asked_columns, **more)
        if self.state.kernel_call is not None:
            heads = heads_of(self.state.kernel_call, batch, asked_columns)
            return heads if self.method.attention != VALUES else self._of_values(layer, hidden, *heads[:2])
        looked = max(layer - 1, 0)
        query, key = self.state.layer_parts["query"], self.state.layer_parts["key"]  # [R, H, W, d], [R, H_kv, W, d]
        query = query.transpose(1, 2)[batch[:, None], asked_columns].transpose(1, 2)
        if self.method.attention == VALUES:
            return self._of_values(layer, hidden, query, key)
        angles = at(self.decoder, looked).rotary(hidden, self.rows.positions)
        return Heads(query, key, *angles, self.decoder.scale(looked))

    def _of_values(self, layer: int, hidden: Tensor, query: Tensor, key: Tensor) -> Heads:
        """Values in the place of queries and keys, with the angles of a layer, mean over the axes of positions."""
        angles = at(self.decoder, layer).angles(hidden, self.rows.positions)
        cos, sin = (part.mean(0) if part.ndim > 3 else part for part in angles)
        return Heads(query, key, cos, sin, key.shape[-1] ** -0.5)

    def end(self, hidden: Tensor) -> Tensor:
        """The states at the full length again, zero where a token was dropped."""
        full = hidden.new_zeros(hidden.shape[0], self.rows.size + 1, hidden.shape[2])
        return full.scatter(1, self.rows.origin[..., None].expand_as(hidden), hidden)[:, :-1]

    def outcomes(self, hidden: Tensor) -> dict[int, PictureOutcome]:
        """Outcomes of the pictures that were cut, by their number in the layout, given the last states."""
        return {
            picture.unit.picture: outcome(self.layout, self.rows, hidden, self.seen, index)
            for index, picture in enumerate(self.seen)
            if picture.first
        }


@functools.cache
def counts_cache(forward: Any) -> bool:
    """True for the forward of a model that makes positions from the length of its cache where it is given none."""
    return "position_ids" in inspect.signature(forward).parameters


class DecodeStep:
    """A forward on a cache that was cut: a decode step, or a later turn of text."""

    def __init__(self, decoder: CutDecoder, cut_cache: CutCache, grown: int, state: CutState) -> None:
        self.decoder, self.cut_cache, self.grown, self.outer = decoder, cut_cache, grown, state.outer
        placed = state.placed
        if placed is None:  # a model that names its positions otherwise is given them, it counts no cache
            placed = state.outer.get("position_ids") is not None or not counts_cache(type(decoder.module).forward)
        self.behind = 0 if placed else cut_cache.behind
        mask = state.mask if isinstance(state.mask, Tensor) and state.mask.ndim == 2 else None
        self.mask = None if mask is None else mask[:, cut_cache.size :].bool()
        self.reach = 0
        self.layer_arguments: dict[Any, dict[str, Any]] = {}  # arguments of the layers that share their columns

    def enter(self, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """States as they are, and changed arguments of layer `index`."""
        self.reach = self.cut_cache.size + self.grown + hidden.shape[1]
        columns = self.cut_cache.columns.get(index)
        if columns is None:
            return hidden, {}
        view = at(self.decoder, index)
        alike = id(columns), getattr(view, "kind", "")
        if alike not in self.layer_arguments:
            positions = self.decoder.positions(kwargs, len(hidden), self.outer)
            positions = positions + self.behind - wide(columns.shift, positions)
            given = columns.width + self.grown + hidden.shape[1]
            if hasattr(cache := cache_given(kwargs), "get_mask_sizes"):  # a sliding window keeps no more than it needs
                given = cache.get_mask_sizes(hidden.shape[1], index)[0]
            mask = self._columns_mask(columns, hidden, getattr(view, "window", None), given)
            self.layer_arguments[alike] = view.arguments(hidden, positions, mask)
        return hidden, self.layer_arguments[alike]

    def wants(self, layer: int) -> bool:
        """False: no tokens are chosen in a step on a cache."""
        return False

    def end(self, hidden: Tensor) -> Tensor:
        """The states unchanged: a step on a cache is never shortened."""
        return hidden

    def _columns_mask(self, columns: Columns, hidden: Tensor, window: int | None, given: int) -> Tensor | None:
        """Attention mask of new rows over the last `given` columns of a layer: [R, 1, q, given], boolean or additive;
        None is plain causal.
        """
        new = hidden.shape[1]
        self.cut_cache.holes |= new > 1 and self.mask is not None
        plain = not (columns.padded or self.cut_cache.holes or self.decoder.kernel == "eager")
        plain &= window is None or given <= window
        if columns.sizes is None and new == 1 and plain:
            return None
        later = torch.ones(len(hidden), self.grown + new, dtype=torch.bool, device=hidden.device)
        if self.mask is not None and self.mask.shape[1] == later.shape[1]:
            later = self.mask
        seen = causal(torch.cat((columns.real, later), dim=1), new, window)[..., -given:]
        if columns.sizes is None:
            return seen
        sizes = torch.cat((columns.sizes, columns.sizes.new_ones(later.shape)), dim=1)[:, -given:]
        return seen_logits(seen, sizes, None, hidden.dtype)


def at(decoder: CutDecoder, layer: int) -> CutDecoder:
    """View of a decoder with the rotary angles, kwargs and window of a layer; the decoder itself if all are alike."""
    return decoder.at(layer) if hasattr(decoder, "at") else decoder


def along(values: Tensor, origin: Tensor) -> Tensor:
    """Values [R or 1, S, ...] of the rows that are left, by their places in the full sequence [R, W]; zero for
    padding, whose place is S.
    """
    values = torch.cat((values, torch.zeros_like(values[:, :1])), dim=1)
    return rows_of(values.expand(len(origin), *values.shape[1:]), origin)


def causal(real: Tensor, new: int, window: int | None = None, ahead: Tensor | None = None) -> Tensor:
    """Mask of the last `new` rows over real columns up to themselves, `window` of them where that is given, and over
    those that attend to each other `ahead` [R, W, W]. Padding sees itself, so that it stays finite.
    [R, W] -> [R, 1, new, W].
    """
    width = real.shape[1]
    place = torch.arange(width, device=real.device)
    row = place[width - new :, None]
    seen = (place <= row) & real[:, None]
    if ahead is not None:
        seen |= ahead
    if window is not None:
        seen &= place > row - window
    return (seen | (place == row))[:, None]


def fits(cut_cache: CutCache, cache: Any) -> bool:
    """True if the layers of a cache are as long as this prefill left them, or have grown alike since."""
    grown = cut_cache.grown(cache)
    return grown >= 0 and all(
        cache.get_seq_length(i) == columns.width + grown for i, columns in cut_cache.columns.items()
    )


def check_first_layer(units: list[tuple[Unit, list[Cut]]]) -> None:
    """Raises OptionError where tokens leave before the first layer and `generate` counts the prompt by its cache."""
    shortened = any(cut.layer == 0 and cut.left < len(unit.places) for unit, cuts in units for cut in cuts)
    if shortened and OLD:
        raise OptionError(
            f"a cut before the first decoder layer needs transformers >= 5: generate() of {transformers.__version__} "
            "takes the length of the prompt from that layer's cache"
        )


def check_window(decoder: CutDecoder, size: int) -> None:
    """Raises OptionError where a sliding window would be narrower than the prompt, and transformers is old, or where a
    prompt is longer than the chunks that rows attend within.
    """
    chunk = getattr(getattr(decoder.module, "config", None), "attention_chunk_size", None)
    if chunk and size > chunk:
        raise OptionError(
            f"attention_chunk_size={chunk} is less than this prompt of {size} rows, whose chunks a cut between layers "
            "would move. Take a method that acts before the language model"
        )
    window = getattr(decoder, "window", None)
    if window and size >= window and OLD:
        raise OptionError(
            f"sliding_window={window} is narrower than this prompt of {size} rows: methods that cut between layers "
            f"need every row to be seen on transformers {transformers.__version__}, or transformers >= 5"
        )


def check_kernel(decoder: Any) -> None:
    """Raises OptionError for a kernel of attention that takes no numbers to add to its logits."""
    if decoder.kernel not in ("sdpa", "eager"):
        raise OptionError(
            f"attn={decoder.kernel}: attention is calibrated by adding to its logits, which this kernel does not take. "
            "Load the model with attn=sdpa"
        )
