"""The two kinds of forward that hooks between decoder layers take part in: the prefill that is cut, and the steps on
the cache it left. `hooks.py` recognises them.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import transformers
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import CutDecoder, PictureOutcome, Tiles
from llava_consensus.hosts.decoder.rows import (
    Group,
    Rows,
    columns_of,
    full_rows,
    note_measures,
    outcome,
    put_back,
    seen_pictures,
    shorten,
    text_of,
)
from llava_consensus.hosts.decoder.tower import tower_source
from llava_consensus.hosts.sequence.layout import Layout, Unit
from llava_consensus.hosts.sequence.splice import wide
from llava_consensus.reduction.decoder import Cut, DecoderView
from llava_consensus.reduction.tokens import TextProbe


class Hooks(Protocol):
    """The hooks that started a forward: their method chooses tokens, and they are told what was cut (`hooks.py`)."""

    attachment: Any
    method: Any

    def remember(self, cache: Any, cut_cache: "CutCache") -> None: ...
    def report(self, call: Any, cut: dict[int, PictureOutcome]) -> None: ...


class Armed(NamedTuple):
    """A sequence that is about to be read, and what to do with it."""

    layout: Layout
    units: list[tuple[Unit, list[Cut]]]
    embeds: Callable[[], Tensor | None]  # dead once the sequence is gone
    tiles: list[Tiles]  # of each picture, for methods that read the tower


class Columns(NamedTuple):
    """The cached columns that layers of one depth share after the prefill."""

    width: int
    padded: bool
    real: Tensor  # [R, W]
    shift: Tensor  # [R, 1] how far behind the full sequence's the next position is


@dataclass(eq=False)
class CutCache:
    """What decode steps must know of a prefill."""

    size: int  # S
    columns: dict[int, Columns]  # of each layer from the first cut on
    holes: bool = False  # whether a later turn may have left padding behind the prompt

    def grown(self, cache: Any) -> int:
        """Rows a cache was given since. Its own length is that of the first layer, which may have been cut before."""
        first = self.columns.get(0)
        length: int = cache.get_seq_length()
        return length - (self.size if first is None else first.width)


class CutForward:
    """The forward that is cut."""

    def __init__(
        self, hooks: Hooks, call: Any, armed: Armed, embeds: Tensor, kwargs: dict[str, Any], cache: Any
    ) -> None:
        self.hooks, self.call, self.layout, self.embeds, self.cache = hooks, call, armed.layout, embeds, cache
        self.method, self.decoder = hooks.method, hooks.attachment.here.decoder
        self.watch = call.watch
        check_window(self.decoder, armed.layout.real.shape[1])
        check_first_layer(armed.units)
        beams = len(embeds) // len(armed.layout.real)
        self.seen = seen_pictures(armed.layout, armed.units, beams, self.method.asks)
        self.cuts: dict[int, list[int]] = defaultdict(list)  # layer -> seen pictures
        for index, picture in enumerate(self.seen):
            for cut in picture.cuts:
                self.cuts[cut.layer].append(index)
        positions = self.decoder.positions(kwargs, len(embeds), call.outer)
        self.source = tower_source(hooks.attachment, armed, embeds[::beams], positions[::beams])
        self.rows: Rows = full_rows(armed.layout, self.seen, positions, beams)
        self.full, self.reach = self.rows, self.rows.size
        self.columns: dict[int, Columns] = {}
        self.memories: dict[tuple[int, ...], dict[str, Tensor]] = defaultdict(dict)  # of pictures cut together
        self.changes: dict[str, Any] = {}  # to the arguments of the layers since the last cut

    def wants(self, layer: int) -> bool:
        """Whether queries and keys of a layer are needed."""
        return layer + 1 in self.cuts

    def enter(self, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """States and changed arguments of layer `index`."""
        if index in self.cuts:
            hidden = self._cut(index, hidden)
            need = self.rows.padded or self.decoder.kernel == "eager"
            mask = causal(self.rows.real, hidden.shape[1]) if need else None
            self.changes = self.decoder.arguments(hidden, self.rows.positions, mask)
            self.cached = self._cached(index)
        for picture in self.seen:
            picture.entering.append(picture.left)
        if self.changes:
            self.columns[index] = self.cached
        return hidden, self.changes

    def _cached(self, layer: int) -> Columns:
        """What the cache of the layers from here on will hold."""
        rows, full = self.rows, self.full
        shift = torch.tensor(full.lengths) - torch.tensor(rows.lengths) if self._closes(layer) else torch.tensor([0])
        return Columns(rows.real.shape[1], rows.padded, rows.real, shift[:, None].to(rows.real.device))

    def _closes(self, layer: int) -> bool:
        """Whether positions are closed up from this layer on."""
        closes: bool = self.method.closes_gaps(layer)
        return closes and not getattr(self.decoder, "keeps_positions", False)

    def _cut(self, layer: int, hidden: Tensor) -> Tensor:
        """Lets the method choose among all pictures cut here, equal ones together, and shortens the sequences."""
        method, watch = self.method, self.watch
        batches: dict[Any, list[int]] = defaultdict(list)
        for index in self.cuts[layer]:
            picture = self.seen[index]
            cut = next(cut for cut in picture.cuts if cut.layer == layer)
            batches[
                picture.unit.budget, len(picture.unit.places), picture.left, cut, index if method.adaptive else 0
            ].append(index)
        groups = []
        for (*_, cut, _), indices in batches.items():
            with watch.time("view"):
                view = self._view(layer, cut, indices, hidden)
            with torch.autocast(hidden.device.type, enabled=False):
                groups.append(Group(indices, view.columns, cut, method.select(view, watch)))
        with watch.time("shorten"):
            self.rows, hidden = shorten(self.rows, hidden, self.seen, groups, self._closes(layer))
        for indices, _, _, chosen in groups:
            for index in indices:
                self.seen[index].merged = 0 if chosen.merged is None else chosen.merged.shape[1]
                self.seen[index].left = chosen.kept.shape[1] + self.seen[index].merged
            note_measures(self.seen, indices, chosen.measures)
        return hidden

    def _view(self, layer: int, cut: Cut, indices: list[int], hidden: Tensor) -> DecoderView:
        """What a method sees of these pictures."""
        rows, decoder = self.rows, self.decoder
        batch = torch.tensor([self.seen[index].row for index in indices], device=hidden.device)
        text_places, asked_columns, mask = text_of(rows, self.seen, indices)
        columns = columns_of(rows, self.seen, indices)
        visual_places = torch.stack([self.seen[index].unit.places for index in indices]).to(hidden.device)
        query, key = self._projected(layer, hidden.detach(), asked_columns, batch)
        cos, sin = decoder.rotary(hidden, rows.positions)
        all_rows = [self.seen[index].row for index in indices] == list(range(len(hidden)))  # then nothing is copied
        key, cos, sin, real = (tensor if all_rows else tensor[batch] for tensor in (key, cos, sin, rows.real))
        probe = TextProbe(query, key, cos, sin, decoder.scale(layer), asked_columns, mask, real)
        embeds = self.embeds.detach()
        inputs = embeds[batch[:, None], visual_places], embeds[batch[:, None], text_places]
        states = hidden[batch[:, None], columns], hidden[batch[:, None], asked_columns]
        units = [self.seen[index].unit for index in indices]
        tower = None if self.source is None else self.source.tokens(units)
        memory = self.memories[tuple(indices)]
        return DecoderView(units[0].budget.tokens, cut, *states, columns, probe, *inputs, decoder.norm, tower, memory)

    @torch.no_grad()
    def _projected(self, layer: int, hidden: Tensor, asked_columns: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [P, H, L, d] of the asked rows and keys [R, H_kv, W, d], of the layer the method looks at."""
        if self.method.attention == "own":
            normed = self.decoder.normed(layer, hidden)
            return self.decoder.query(layer, normed[batch[:, None], asked_columns]), self.decoder.key(layer, normed)
        query, key = self.call.layer_parts["query"], self.call.layer_parts["key"]  # [R, H, W, d], [R, H_kv, W, d]
        return query.transpose(1, 2)[batch[:, None], asked_columns].transpose(1, 2), key

    def end(self, hidden: Tensor) -> Tensor:
        """Reports what was cut, remembers the cache, and gives the states at the full length again."""
        self.hooks.remember(self.cache, CutCache(self.rows.size, self.columns))
        index_of = {picture.unit.picture: index for index, picture in enumerate(self.seen) if picture.first}
        outcomes = {
            number: outcome(self.layout, self.rows, hidden, self.seen, index) for number, index in index_of.items()
        }
        self.hooks.report(self.call, outcomes)
        return put_back(self.rows, hidden)


class Step:
    """A forward on a cache that was cut: a decode step, or a later turn of text."""

    def __init__(self, decoder: CutDecoder, cut_cache: CutCache, grown: int, call: Any) -> None:
        self.decoder, self.cut_cache, self.grown, self.outer = decoder, cut_cache, grown, call.outer
        mask: Tensor | None = call.mask
        self.mask = None if mask is None or mask.ndim != 2 else mask[:, cut_cache.size :].bool()
        self.reach = 0
        self.layer_arguments: dict[Any, dict[str, Any]] = {}  # arguments of the layers that share their columns

    def enter(self, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """States as they are, and changed arguments of layer `index`."""
        self.reach = self.cut_cache.size + self.grown + hidden.shape[1]
        columns = self.cut_cache.columns.get(index)
        if columns is None:
            return hidden, {}
        if id(columns.real) not in self.layer_arguments:
            positions = self.decoder.positions(kwargs, len(hidden), self.outer)
            positions = positions - wide(columns.shift, positions)
            mask = self._columns_mask(columns, hidden)
            self.layer_arguments[id(columns.real)] = self.decoder.arguments(hidden, positions, mask)
        return hidden, self.layer_arguments[id(columns.real)]

    def wants(self, layer: int) -> bool:
        """False: no tokens are chosen in a step on a cache."""
        return False

    def end(self, hidden: Tensor) -> Tensor:
        """The states unchanged: a step on a cache is never shortened."""
        return hidden

    def _columns_mask(self, columns: Columns, hidden: Tensor) -> Tensor | None:
        """Which columns of a layer the new rows see: [R, 1, q, columns], or None for all."""
        new = hidden.shape[1]
        self.cut_cache.holes |= new > 1 and self.mask is not None
        if new == 1 and not columns.padded and not self.cut_cache.holes and self.decoder.kernel != "eager":
            return None
        later = torch.ones(len(hidden), self.grown + new, dtype=torch.bool, device=hidden.device)
        if self.mask is not None and self.mask.shape[1] == later.shape[1]:
            later = self.mask
        return causal(torch.cat((columns.real, later), dim=1), new)


def causal(real: Tensor, new: int) -> Tensor:
    """Mask of the last `new` rows over real columns up to themselves; padding sees itself, so that it stays finite.
    [R, W] -> [R, 1, new, W].
    """
    width = real.shape[1]
    place = torch.arange(width, device=real.device)
    row = place[width - new :, None]
    return (((place <= row) & real[:, None]) | (place == row))[:, None]


def fits(cut_cache: CutCache, cache: Any) -> bool:
    """Whether a cache's layers are as long as this prefill left them, and grown alike since."""
    grown = cut_cache.grown(cache)
    return grown >= 0 and all(
        cache.get_seq_length(i) == columns.width + grown for i, columns in cut_cache.columns.items()
    )


def check_first_layer(units: list[tuple[Unit, list[Cut]]]) -> None:
    """Raises OptionError where tokens leave before the first layer and `generate` counts the prompt by its cache."""
    shortened = any(cut.layer == 0 and cut.left < len(unit.places) for unit, cuts in units for cut in cuts)
    if shortened and int(transformers.__version__.split(".")[0]) < 5:
        raise OptionError(
            f"a cut before the first decoder layer needs transformers >= 5: generate() of {transformers.__version__} "
            "takes the length of the prompt from that layer's cache"
        )


def check_window(decoder: Any, size: int) -> None:
    """Raises OptionError where a sliding window would be narrower than the prompt."""
    window = getattr(decoder, "window", None)
    if window and size >= window:
        raise OptionError(
            f"sliding_window={window} is narrower than this prompt of {size} rows: "
            "methods that cut between layers need every row to be seen"
        )
