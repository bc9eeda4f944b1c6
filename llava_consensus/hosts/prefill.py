"""The forward pass of prompts whose images are cut between layers."""

from collections import defaultdict
from collections.abc import MutableMapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts import kernels
from llava_consensus.hosts.inputs import Inputs, structural_rows
from llava_consensus.hosts.layers import CutImage, Hooks, Layers
from llava_consensus.hosts.outcomes import ImageOutcome
from llava_consensus.hosts.prompts import Prompt
from llava_consensus.hosts.rows import (
    CACHE_NAMES,
    ROW,
    Book,
    Rows,
    cache_in,
    drop_rows,
    is_static,
    padded_columns,
    restore_rows,
    row_axis,
    upload,
)
from llava_consensus.hosts.units import Unit
from llava_consensus.reduction.calibration import far_logits, seen_logits
from llava_consensus.reduction.decoder import Chosen, Cut, DecoderView
from llava_consensus.reduction.selection import indices
from llava_consensus.reduction.tokens import Reduction, Stopwatch, TextProbe

NO_CUT = "none of them can be cut before. Take a method that acts before the language model"
UNTURNED = {"cohere2": "full_attention"}  # layers of a decoder that do not rotate queries and keys
CUT_ROWS = 1 << 16  # of the sequences of images that are cut together; a copy of the keys is made for each image


class Prefill(Hooks):
    """The forward of prompts whose images are cut.

    Args:
        layers: of the decoder.
        decoder: that runs.
        prompt: as the decoder is given it.
        units: images with more tokens than their budget.
        inputs: tensors of the tower that the method reads; None if it reads nothing.
        arguments: of the decoder.
    """

    def __init__(
        self, layers: Layers, decoder: Any, prompt: Prompt, units: list[Unit], inputs: Inputs | None,
        arguments: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__(layers, decoder)
        self.method, self.prompt, self.inputs = layers.method, prompt, inputs
        self.embeds: Tensor = arguments["inputs_embeds"]
        self.cache: Any = cache_in(arguments)
        self.watch, device = Stopwatch(self.embeds.device), self.embeds.device
        positions = arguments.get("position_ids")
        self.axes = positions.shape[0] if isinstance(positions, Tensor) and positions.ndim == 3 else 1
        self.images = [CutImage.of(prompt, unit, layers.cuts_of(unit), self.method.asks) for unit in units]
        self.cuts: dict[int, list[int]] = defaultdict(list)
        (count, size), owner = prompt.real.shape, np.full(prompt.real.shape, -1)
        self._check(size)
        for number, image in enumerate(self.images):
            owner[image.row, image.unit.places] = number
            for layer in image.cuts:
                self.cuts[layer].append(number)
        place = np.tile(np.arange(size), (count, 1))
        parts = [owner, place, place * ROW, prompt.real, prompt.real.argmax(1)[:, None]]
        self.owner, index, self.key, alive, self.first = upload(parts, device)
        self.alive = alive.bool()
        self.rows: Rows | None = None
        self.every = Rows(size, index, None, prompt.real, self.alive, torch.zeros_like(self.first), False)
        self.weight: Tensor | None = None  # [R, S] tokens that each row was made of
        self.calls: dict[int, kernels.KernelCall] = {}  # of the layer before each cut
        self.reading: Any = None
        self.seen: dict[int, Rows] = {}  # rows of each layer from the first cut on
        self.weights: dict[int, Tensor] = {}
        self.masks: dict[int, Any] = {}  # of these layers
        self.full: dict[int, Tensor] = {}  # states that a layer's output is put back into
        self.given: dict[Any, Any] = {}  # arguments that were gathered already
        self.start: Tensor | None = None
        self.before: dict[int, Any] = {}  # state before each cut, for layers that run again
        # states that a layer put back, the rows it had, its states of these, and how often the former were written to
        self.last: tuple[Tensor, Rows, Tensor, int] | None = None
        self.memos: dict[Any, dict[str, Tensor]] = {}  # by images cut together, tensors kept between cuts

    def _check(self, size: int) -> None:
        self.layers.check(size)
        if self.method.calibrates and self.layers.kernel not in ("sdpa", "eager"):
            raise OptionError(
                f"attn={self.layers.kernel}: attention is calibrated by adding to its logits, which this kernel does "
                "not take. Load the model with attn=sdpa"
            )
        if self.method.calibrates and is_static(self.cache):
            raise OptionError("a static cache has no room for calibrated attention: leave cache_implementation out")

    def enter(self, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        if index == 0:
            self.cache = cache_in(kwargs)  # which the decoder makes itself if it is given none
            positions = kwargs.get("position_ids")
            if self.layers.renumbers(self.axes) and positions is not None:
                self.start = positions.expand(len(self.first), -1).gather(1, self.first)
        if index in self.cuts:
            hidden = self._cut(index, hidden, kwargs)
        if not self.replays:
            for image in self.images:
                image.entering.append(image.left)
            if index + 1 in self.cuts and self.method.attention in ("previous", "values"):
                self.reading = self.layers.read(self.decoder.layers[index], self._spy(index + 1))
        source = self.layers.sources[index]  # a layer that reads the keys of an earlier one has the rows of that
        rows = self.seen.get(index) if self.replays else self.rows if source == index else self.seen.get(source)
        if rows is None:
            self.full.pop(index, None)
            return hidden, kwargs
        self.seen[index] = rows
        if source in self.weights:
            self.weights[index] = self.weights[source]
        if row_axis(hidden[..., 0], rows.size, len(rows.index)) is None:
            # Gemma 4 runs layers with shared keys on the last rows of a prompt only
            return hidden, {**kwargs, "attention_mask": self._last_rows(index, hidden, rows)}
        self.full[index] = hidden
        return self._shortened(index, hidden, kwargs, rows)

    def disarm(self) -> None:
        super().disarm()
        if self.reading is not None:
            self.layers.stop(self.reading)
            self.reading = None

    def _spy(self, cut: int) -> Any:
        def spy(kernel: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None,
                *args: Any, **options: Any) -> Any:  # fmt: skip
            if cut in self.calls and key.shape[2] < self.calls[cut].key.shape[2]:
                return kernel(module, query, key, value, attention_mask, *args, **options)  # not over rows (Inkling 2)
            tensors = query.detach(), key.detach(), value.detach()
            self.calls[cut] = kernels.KernelCall(module, *tensors, attention_mask, options, None)
            return kernel(module, query, key, value, attention_mask, *args, **options)

        return spy

    def leave(self, index: int, output: Any) -> Any:
        if not self.replays and index + 1 in self.cuts and self.method.attention in ("previous", "values"):
            self.layers.stop(self.reading)
            self.reading = None
        full = self.full.pop(index, None)
        if full is None:
            return None
        states = output[0] if isinstance(output, tuple) else output
        full = restore_rows(full, states, self.seen[index])
        self.last = full, self.seen[index], states, 0 if full.is_inference() else full._version
        if index == self.layers.count - 1:
            self.last = None
            # a dropped row answers as the last one kept before it, so that a label behind an image is predicted by that
            axis = row_axis(full, self.every.size, len(self.alive))
            assert axis is not None
            place = torch.arange(self.every.size, device=full.device)
            kept = torch.where(self.alive, place, -1).cummax(1).values.clamp_min(0)
            full = drop_rows(full, self.every._replace(index=kept))
        return (full, *output[1:]) if isinstance(output, tuple) else full

    def _last_rows(self, index: int, hidden: Tensor, rows: Rows) -> Tensor | None:
        """Mask of the last rows of the prompts over the rows that are left."""
        new, mask = hidden.shape[1], self.masks[self.layers.sources[index]]
        if any(image.end >= rows.size - new for image in self.images):
            raise OptionError(f"logits_to_keep={new}: it reaches into an image. Ask for fewer, or detach the method")
        if mask is None:
            return None if new == 1 else self.layers.dense(index, rows.shown, new)
        return mask[:, :, -new:]

    def _shortened(
        self, index: int, hidden: Tensor, kwargs: dict[str, Any], rows: Rows
    ) -> tuple[Tensor, dict[str, Any]]:
        short, changed, source = self._short(hidden, rows), dict[str, Any](), self.layers.sources[index]
        shares = source != index  # the cache holds its rows already, and masks are made for rows behind it
        for name, value in kwargs.items():
            if name in CACHE_NAMES or isinstance(value, MutableMapping):  # which layers write to
                continue
            if name == "attention_mask" and shares:
                changed[name] = self.masks[source]
                continue
            key = name, id(value), self.layers.kinds[index], index == 0
            if key not in self.given or self.given[key][0] is not rows:
                self.given[key] = rows, self._argument(index, name, value, short, rows), value
            changed[name] = self.given[key][1]
        if self.method.calibrates and "attention_mask" in changed and not shares:
            changed["attention_mask"] = self._calibrated(index, short, kwargs, changed, rows)
        self.masks[index] = changed.get("attention_mask")
        return short, {**kwargs, **changed}

    def _short(self, hidden: Tensor, rows: Rows) -> Tensor:
        """The states of the rows that are left: as the layer before put them back, if nothing has written since."""
        full, own, states, version = self.last or (None, None, hidden, 0)
        kept = full is hidden and own is rows and not hidden.is_inference() and hidden._version == version
        return states if kept else drop_rows(hidden, rows)

    def _argument(self, index: int, name: str, value: Any, short: Tensor, rows: Rows) -> Any:
        if name == "attention_mask":
            ahead = self._ahead(value, rows)
            if self.method.calibrates:
                return ahead
            if value is None and not rows.padded:
                return None
            return self.layers.mask(index, short, rows.shown if rows.padded else None, self.cache, ahead)
        if self.start is not None and name in ("position_ids", "position_embeddings") and value is not None:
            place = rows.real.cumsum(1) - 1
            positions = upload([np.maximum(place, 0)], short.device)[0] + self.start
            return positions if name == "position_ids" else self.layers.rotation(self.decoder, index, short, positions)
        whole = isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64) and name != "position_ids"
        if whole and (value.shape[-2:] == (rows.size, rows.size) or value.ndim > 2):
            raise OptionError(f"layers take numbers of pairs of rows ({name}), and {NO_CUT}")
        return drop_rows(value, rows)

    def _ahead(self, mask: Any, rows: Rows) -> Tensor | None:
        """Pairs of rows that see each other, [R, W, W], by the prompt's mask; None if rows see earlier ones only."""
        if not isinstance(mask, Tensor) or mask.ndim != 4:
            return None
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        ahead = seen[:, 0, :, : rows.size].triu(1)  # a static cache has columns that are still empty
        if self.layers.sees_ahead is None:  # the only look at the device, once for an attachment
            self.layers.sees_ahead = bool(ahead.any())
        if not self.layers.sees_ahead:
            return None
        ahead = ahead | ahead.transpose(1, 2)  # merged tokens come after rows that they see
        return drop_rows(drop_rows(ahead, rows).transpose(1, 2), rows)

    def _calibrated(
        self, index: int, short: Tensor, kwargs: dict[str, Any], changed: dict[str, Any], rows: Rows
    ) -> Tensor:
        """Additive mask of a layer with RESTORE's calibration, made once for the layers that share it."""
        attention = getattr(self.decoder.layers[index], "self_attn", None)
        width, kind = getattr(attention, "head_dim", 0), self.layers.kinds[index]
        given = [rows, *(kwargs.get(name) for name in ("attention_mask", "position_ids", "position_embeddings"))]
        key = "calibrated", *map(id, given), kind, width
        if key not in self.given:
            angles = self.layers.angles(self.decoder, index, short, {**kwargs, **changed})
            cos, sin = _angles(angles)
            if kind == UNTURNED.get(self.layers.config.model_type):
                cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
            elif not isinstance(angles, Tensor) and width > cos.shape[-1]:  # channels that do not turn count too
                rest = (0, width - cos.shape[-1])
                cos, sin = nn.functional.pad(cos, rest, value=1.0), nn.functional.pad(sin, rest)
            seen = self.layers.dense(index, rows.shown, rows.index.shape[1], changed["attention_mask"])
            self.given[key] = far_logits(cos, sin), seen, given  # which live as long as their ids are looked up
        far, seen, _ = self.given[key]
        if (key, index == 0) not in self.given:
            if index == 0:  # in the first layer each visual token is an equal part of its image
                parts = torch.tensor([*(len(image.unit.places) / image.left for image in self.images), 1.0])
                sizes = parts.to(short.device)[self.owner.gather(1, rows.index)]
            elif self.weight is None:
                sizes = torch.ones(rows.index.shape, device=short.device)
            else:
                sizes = self.weight.gather(1, rows.index)
            self.given[key, index == 0] = sizes, seen_logits(seen, sizes, far, short.dtype)
        self.weights[index], made = self.given[key, index == 0]
        return made

    def _cut(self, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Lets the method choose, equal images together. Returns the states with merged tokens in place."""
        if self.replays:
            self.rows, self.alive, self.key, lefts = self.before[index]
            for image, left in zip(self.images, lefts, strict=True):
                image.left = left
        self.before[index] = self.rows, self.alive, self.key, [image.left for image in self.images]
        rows, short, given = self.rows or self.every, hidden, kwargs
        if self.rows is not None:
            short, given = self._shortened(index, hidden, kwargs, self.rows)
        call = self.calls.get(index)
        if self.method.attention == "own":
            layer = self.decoder.layers[index]
            call = self.layers.own_call(layer, short.detach(), given)
        together: dict[Any, list[int]] = defaultdict(list)
        for number in self.cuts[index]:
            image = self.images[number]
            tiles = self.prompt.tiles[image.unit.image]
            shape = () if self.inputs is None else (tiles.side, tiles.count, tiles.size)
            key = image.unit.budget, len(image.unit.places), image.left, image.cuts[index], shape
            together[key, number if self.method.adaptive else 0].append(number)
        most = max(1, CUT_ROWS // rows.size)
        for (key, _), numbers in together.items():
            for first in range(0, len(numbers), most):
                own = numbers[first : first + most]
                with self.watch.time("view"):
                    angles = self.layers.angles(self.decoder, index, short, given)
                    view, places = self._view(own, key[3], short, rows, call, angles)
                # autocast would compute saliencies in half precision
                with torch.autocast(hidden.device.type, enabled=False):
                    chosen = self.method.select(view, self.watch)
                with self.watch.time("shorten"):
                    hidden = self._note(index, own, places, chosen, hidden)
        self.rows, self.given = self._rows(), {}
        return hidden

    def _note(self, index: int, numbers: list[int], places: Tensor, chosen: Chosen, hidden: Tensor) -> Tensor:
        """Stores the tokens chosen of images [P, v places], and puts merged tokens into the states."""
        images = [self.images[number] for number in numbers]
        (row,) = upload([np.array([[image.row] for image in images])], hidden.device)
        gone = torch.ones_like(places, dtype=torch.bool).scatter(1, chosen.kept, False)
        self.alive = self.alive.index_put((row.expand_as(places), places), ~gone)
        for number, image in enumerate(images):
            image.left = chosen.kept.shape[1] + (0 if chosen.merged is None else chosen.merged.shape[1])
            if not self.replays:
                image.note(places[number], chosen, number)
        if chosen.merged is None or chosen.centres is None:
            return hidden
        centres = places.gather(1, chosen.centres)  # [P, M] dropped rows whose slots the merged tokens take
        at = row.expand_as(centres), centres
        self.alive = self.alive.index_put(at, torch.ones_like(centres, dtype=torch.bool))
        if not chosen.in_place:  # they come right after the image
            behind = [[image.end * ROW + (ROW >> 1) + (index << 20)] for image in images]
            after = np.array(behind) + np.arange(centres.shape[1])
            self.key = self.key.index_put(at, upload([after], hidden.device)[0])
        if self.weight is None:
            self.weight = torch.ones(self.alive.shape, device=hidden.device)
        self.weight = self.weight.index_put(at, chosen.sizes())
        return hidden.index_put(at, chosen.merged.to(hidden.dtype))

    def _rows(self) -> Rows:
        """The rows that are left, ordered by their keys behind padding. Lengths are known on the CPU."""
        full = self.prompt.real.sum(1)
        lost = np.zeros_like(full)
        for image in self.images:
            lost[image.row] += len(image.unit.places) - image.left
        size, width = self.prompt.real.shape[1], int((full - lost).max())
        order = torch.where(self.alive, self.key, -1).sort(dim=1, stable=True).indices[:, size - width :]
        real = np.arange(width) >= (width - (full - lost))[:, None]
        shown, removed = upload([real, lost[:, None]], order.device)
        return Rows(size, order, None, real, shown.bool(), removed, bool(lost.any()))

    def _view(
        self, numbers: list[int], cut: Cut, short: Tensor, rows: Rows, call: kernels.KernelCall | None, angles: Any
    ) -> tuple[DecoderView, Tensor]:
        """The method's view of these images, and the rows of the prompt that their tokens are: [P, v]."""
        images, device, width = [self.images[number] for number in numbers], short.device, rows.index.shape[1]
        texts, real = padded_columns([image.text for image in images])
        visual = np.stack([image.unit.places for image in images])
        batch, own, text, mask, whole = upload(
            [np.array([image.row for image in images]), np.array(numbers), texts, real, visual], device
        )
        shown, index, owner = (_rows_of(part, batch) for part in (rows.shown, rows.index, self.owner))
        mine = owner.gather(1, index) == own[:, None]
        columns = indices(mine & shown if rows.padded else mine, images[0].left)  # [P, v]
        slots = torch.arange(width, device=device).expand_as(index)
        column = torch.full((len(batch), rows.size), -1, device=device)
        column = column.scatter(1, index.where(shown, index[:, -1:]) if rows.padded else index, slots)
        column = column.where(column >= 0, column.cummax(1).values).clamp_min(0)
        asked = column.gather(1, text)  # [P, L]
        states = short  # merged tokens carry gradients
        if short.ndim > 3:  # several streams, the first axis or behind that of the rows
            states = short.mean(2) if row_axis(short, width, len(rows.index)) == 1 else short[0]
        pair = batch[:, None]
        seen = shown if rows.padded else None
        probe = self._probe(call, batch, asked, mask.bool(), seen, angles, states, width)
        probe = probe._replace(padded=not bool(real.all()))
        embeds = (self.embeds if self.embeds.ndim == 3 else self.embeds[0]).detach()
        tower = None
        if self.inputs is not None:
            tower = self.inputs.tokens(self.inputs.indexed([[image.unit for image in images]])[0])
        memo = self.memos.setdefault(tuple(numbers), {})
        if "inputs" not in memo:
            memo |= {"inputs": embeds[pair, whole], "text": embeds[pair, text]}
        norm: Any = next(child for name, child in self.decoder.named_children() if "norm" in name)
        view = DecoderView(
            images[0].unit.budget.tokens, cut, states[pair, columns], states[pair, asked], columns, probe,
            memo["inputs"], memo["text"], norm, tower, memo,
        )  # fmt: skip
        return view, index.gather(1, columns)

    def _probe(
        self, call: kernels.KernelCall | None, batch: Tensor, asked: Tensor, mask: Tensor,
        shown: Tensor | None, angles: Any, states: Tensor, width: int,
    ) -> TextProbe:  # fmt: skip
        """Queries of the asked rows and keys of the sequence, rotated; or values in their place, with angles."""
        if call is None:
            none = states.new_empty(len(batch), 0, asked.shape[1], 1)
            still = none.new_empty(len(batch), width, 0)
            return TextProbe(none, none, still, still, 1.0, asked, mask, shown)
        if self.method.attention == "values":
            value = call.value[batch][:, :, :width]
            cos, sin = _of_batch(angles, len(self.alive), batch)
            query = _of_rows(call.value, batch, asked)
            return TextProbe(query, value, cos, sin, value.shape[-1] ** -0.5, asked, mask, shown)
        key = _rows_of(call.key, batch)[:, :, :width]  # a static cache hands over columns that are still empty
        still = key.new_empty(len(batch), width, 0)
        cap = float(call.options.get("softcap") or 0.0)
        if isinstance(call.mask, Tensor) and call.mask.ndim == 4:  # saliency uses the kernel's mask, windows too
            seen = call.mask if call.mask.dtype == torch.bool else call.mask > torch.finfo(call.mask.dtype).min / 2
            seen = seen.expand(len(self.alive), -1, -1, -1)
            shown = seen[batch[:, None], 0, asked][..., :width]  # [P, L, W]
        query = _of_rows(call.query, batch, asked)
        own = partial(_of_batch, angles, len(self.alive), batch)
        more = call.extra(batch[:, None], asked, width)
        return TextProbe(query, key, still, still, call.scale, asked, mask, key_mask=shown, cap=cap, angles=own, **more)

    def finish(self, book: Book | None) -> Book | None:
        """The book of the cache that this forward filled, given that of rows that left before the first layer."""
        if not self.seen:
            return book
        rows = self.every
        book = book or Book(rows.size, rows.shown, rows.index, None, rows.padded, True, {}, {})
        uneven = any(one.padded for one in self.seen.values())
        return book._replace(layers=self.seen, weights=self.weights, uneven=uneven)

    def outcomes(self, hidden: Tensor) -> dict[int, ImageOutcome]:
        """Results of the images that were cut, given the last states [R, S, D]. If only the last rows went through all
        layers, their tokens are the states before.
        """
        rows = self.rows or self.every
        if row_axis(hidden[..., 0], rows.size, len(rows.index)) is None and self.last is not None:
            hidden = self.last[0]
        return {
            image.unit.image: cut_outcome(self.prompt, image, number, rows, self.owner, hidden)
            for number, image in enumerate(self.images)
            if image.reported
        }


def _rows_of(values: Tensor, batch: Tensor) -> Tensor:
    return values if len(values) == len(batch) == 1 else values[batch]


def _angles(given: Any) -> tuple[Tensor, Tensor]:
    """Cosines and sines [R or 1, W, d] of position embeddings, mean over the axes of positions."""
    cos, sin = (given.real, given.imag) if isinstance(given, Tensor) else given
    return (cos.mean(0), sin.mean(0)) if cos.ndim > 3 else (cos, sin)


def _of_batch(given: Any, count: int, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [P, W, d] of rows `batch` of R."""
    cos, sin = (_rows_of(part.expand(count, -1, -1), batch) for part in _angles(given))
    return cos, sin


def _of_rows(values: Tensor, batch: Tensor, asked: Tensor) -> Tensor:
    """Rows [P, L] of values [R, H, W, d]: [P, H, L, d]."""
    return values.transpose(1, 2)[batch[:, None], asked].transpose(1, 2)


def cut_outcome(prompt: Prompt, image: CutImage, number: int, rows: Rows, owner: Tensor, hidden: Any) -> ImageOutcome:
    """Result of one image after its last cut.

    Args:
        number: of the image in `owner` [R, S].
        rows: that are left.
        hidden: [R, S, D] last states.
    """
    own, count, device = prompt.images[image.unit.image], len(image.unit.places), owner.device
    index = rows.index[image.row]
    columns = indices(((owner[image.row][index] == number) & rows.shown[image.row])[None], image.left)[0]
    places = index[columns]
    (whole,) = upload([image.unit.places], device)
    source = torch.searchsorted(whole, places)[None]  # [1, v]
    slots = torch.arange(image.left, device=device)[None]
    joined = torch.full((1, count), -1, device=device).scatter(1, source, slots)
    centres = source.new_empty(0) if image.centres is None else image.centres
    made = torch.isin(source, centres)
    if image.joined is not None:
        joined = joined.where(image.joined < 0, joined[:, centres[image.joined]])
    # how many were made is known, which they are only to the device: the sort lets nothing wait for it
    parted = source.gather(1, made.to(torch.uint8).argsort(dim=1, stable=True))
    kept, anchors = parted.split((image.left - image.merged, image.merged), 1)
    measures = {name: torch.stack(values)[None] for name, values in image.measures.items()}
    tokens = hidden[image.row, places][None].detach()
    reduction = Reduction(tokens, kept.sort(1).values, anchors, source, joined, measures=measures)
    origin = torch.from_numpy(image.unit.tile), torch.from_numpy(image.unit.token)
    return ImageOutcome(
        own.row, count, image.left, structural_rows(own), ((0, reduction),), tuple(image.entering), origin
    )
