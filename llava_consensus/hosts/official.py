"""Official LLaVA 1.5 and 1.6 (the `llava` package, wheel and git HEAD), with Llama and Mistral language models.

    prepare    LLaVA's own function, wrapped: images are reduced in the sequences that it has assembled
    decoder    pre-hook and post-hook, for methods that cut these sequences between its layers

`generate` is given embeddings only, so that everything counts the rows that are left.
"""

import ast
import copy
import threading
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts.arguments import Cut, compact, held_masks
from llava_consensus.hosts.cache import Book, book_of, cache_in
from llava_consensus.hosts.entrance import _NUMBERS, Entrance
from llava_consensus.hosts.environment import check_llava_version
from llava_consensus.hosts.facts import TowerFacts
from llava_consensus.hosts.inputs import Inputs, Prompt, needs_of, prompt_of
from llava_consensus.hosts.kernels import OLD, uncompiled
from llava_consensus.hosts.layers import Layers
from llava_consensus.hosts.next_grid import STOCK, check_layout, check_pictures, check_tiles, fixed_grid
from llava_consensus.hosts.official_prompt import (
    IGNORE,
    Arguments,
    EncodedImage,
    Reader,
    Structure,
    blank_images,
    encoded_in,
    read_structure,
    vision_of,
)
from llava_consensus.hosts.outcomes import Report, reduced, unchanged
from llava_consensus.hosts.pinned import Held, PinnedLayers
from llava_consensus.hosts.rows import Rows, drop_rows, reduced_rows, upload
from llava_consensus.hosts.tower import READ, Learnt, Tiles, Tower, argument_names
from llava_consensus.hosts.units import Unit, units_of, visual_rows
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.tokens import Need

PREPARE = "prepare_inputs_labels_for_multimodal"
COUNTING = "_prepare_generated_length"  # function of transformers 5 that settles how long an answer may be
LIMIT = "tokenizer_model_max_length"  # entry of the configuration: rows that a sequence is cut to
AFTER = "_reduction_after"  # attribute of a cache

__all__ = ["PREPARE", "EncodedImage", "Official", "OfficialEntrance", "blank_images"]


class Overlay:
    """An object with some attributes replaced; the object itself stays as it is."""

    def __init__(self, own: Any, **replaced: Any) -> None:
        vars(self).update(replaced, own=own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


class Official:
    """A `LlavaLlamaForCausalLM` or `LlavaMistralForCausalLM` as its configuration describes it.

    Args:
        module: the model.
        options: `layout` of the tiles of an image, see `hosts.LAYOUTS`.
    """

    def __init__(self, module: Any, options: Mapping[str, str] = MappingProxyType({})) -> None:
        if type(module).__name__ == "LlavaMptForCausalLM":
            raise OptionError(
                "LLaVA's MPT class is broken upstream (it calls a five-argument form that is gone): "
                "use a Llama or Mistral checkpoint"
            )
        check_llava_version()
        self.module, self.options = module, options

    @property
    def config(self) -> Any:
        """The configuration, or a copy of it with the entries that make the layout."""
        return laid_out(self.module, self.options)

    @property
    def most_tiles(self) -> int:
        """The most tiles an image can have."""
        return most_tiles(self.module, self.config)

    @property
    def tower(self) -> TowerFacts:
        """Sizes of the vision side."""
        tower = self.module.get_vision_tower()
        blocks = range(len(vision_of(tower).encoder.layers))  # type: ignore[union-attr, arg-type]
        offers = frozenset({Need.ATTENTION, Need.FEATURES, Need.CLASS_FEATURE, Need.PROJECTOR})
        block = fed_block(tower.select_layer, len(blocks))
        return TowerFacts(tower.num_patches, side_of(tower), blocks, block, 1, 1, False, offers)


class After(NamedTuple):
    """By how much positions behind a prompt are ahead of the rows that its cache holds, each [R, 1]."""

    offset: Tensor
    last: Tensor  # if they are counted on from the last row that is left


class Prepared(NamedTuple):
    """Prompts that were prepared and that the decoder has not read yet."""

    embeds: Any  # weak reference to the embeddings [R, S, D]
    prompt: Prompt
    report: Report
    after: After | None  # if positions are kept


class OfficialEntrance(Entrance):
    """The hooks of one attachment to official LLaVA."""

    def __init__(self, owner: Any, model: Any, options: Mapping[str, str]) -> None:
        methods: list[Method] = [stage.method for stage in owner.stages]
        self.owner, self.local, self.options = owner, threading.local(), options
        self.model = weakref.ref(model)
        self.check(model, methods)
        self.decodes = methods[-1].place is Place.DECODER
        self.layers = layers_of(model.get_model(), methods[-1]) if self.decodes else None
        self.entering = next((method for method in methods if method.place is Place.TOKENS), None)
        self.inner = argument_names(type(model.get_model()).forward)[1:]
        self.number, self.caches, self.open = next(_NUMBERS), 0, False
        self.handles = []
        self.reader: Reader | None = None
        tower = model.get_vision_tower()
        if tower is not None:
            reading = next((method for method in methods if method.needs & READ), methods[0])
            known = Tower(vision_of(tower), None, reading, Learnt({}, {}, {}))  # type: ignore[arg-type]
            if known.reads:
                (name, count), *_ = known.lists.items()
                self.reader = Reader(known, (name, fed_block(tower.select_layer, count)))
                if self.reader.short and reading.instead is None:
                    raise OptionError(self.reader.short)

    def check(self, model: Any, methods: list[Method]) -> None:
        """Raises OptionError for what cannot be attached, with the remedy."""
        check_pictures(vars(model.config))
        check_layout(self.options.get("layout", STOCK), getattr(model.config, "image_aspect_ratio", None))
        tower = model.get_vision_tower()
        if tower is not None and not tower.is_loaded:
            raise OptionError("the vision tower has no weights yet: call model.get_vision_tower().load_model() first")
        if getattr(tower, "select_feature", "patch") != "patch":
            raise OptionError(
                f"mm_vision_select_feature={tower.select_feature!r} must be 'patch': "
                "a class token among the patches is no candidate"
            )
        keeps = next((m.positions for m in methods if m.place is Place.TOKENS and m.positions != "renumber"), None)
        if keeps and OLD:
            raise OptionError(
                f"positions={keeps} needs transformers >= 5: "
                f"generate() of {transformers.__version__} does not advance given positions"
            )

    def base(self) -> Any:
        """The vision model."""
        model = self.model()
        tower = None if model is None else model.get_vision_tower()
        return None if tower is None else vision_of(tower)

    @property
    def clip_name(self) -> str:
        """The CLIP model that the vision tower is of."""
        return str(self.model().get_vision_tower().vision_tower_name)  # type: ignore[union-attr]

    def install(self) -> None:
        """Registers the hooks, and wraps LLaVA's function."""
        model: Any = self.model()
        decoder, self.open = model.get_model(), True
        self.handles = [
            model.register_forward_pre_hook(self.note_running),
            decoder.register_forward_pre_hook(self.begin, with_kwargs=True),
            decoder.register_forward_hook(self.end, with_kwargs=True),
        ]
        object.__setattr__(model, PREPARE, partial(_prepare, self.owner))
        if isinstance(self.layers, PinnedLayers):
            self.handles += self.layers.widen(decoder)
        if self.decodes:
            object.__setattr__(decoder, "forward", partial(_forward, self.owner))
        if hasattr(type(model), COUNTING):
            object.__setattr__(model, COUNTING, partial(_count, self.owner))

    def remove(self) -> None:
        """From now on new prompts are read whole. Hooks stay as long as a shortened cache does, which needs them."""
        self.open = False
        model = self.model()
        for name in (PREPARE, COUNTING) if model is not None else ():
            vars(model).pop(name, None)
        if self.decodes and model is not None:
            vars(model.get_model()).pop("forward", None)
        self._leave()

    def note_running(self, model: nn.Module, args: Any) -> None:
        """Notes the replica that runs (DataParallel)."""
        self.local.replica = model if getattr(model, "_is_replica", False) else None

    @property
    def running(self) -> Any:
        """The model, or its replica that runs in this thread."""
        replica = getattr(self.local, "replica", None)
        return self.model() if replica is None else replica

    # LLaVA's function

    def prepare(self, given: Arguments) -> tuple[Any, ...]:
        """Its six results, with the images reduced."""
        model, owner = self.running, self.owner
        official = self.official(model)
        tower = model.get_vision_tower()
        if given.input_ids.shape[1] == 1 or given.images is None or tower is None:
            if given.input_ids.shape[1] > 1:
                owner.tell_plain()
            return official(model, *given)
        if self.options.get("layout", STOCK) != STOCK:
            check_tiles(given.tiles)
        config = laid_out(model, self.options, owner.settings)
        uncut = config if self.entering is None else changed(config, {LIMIT: None})
        structure = read_structure(official, model, given, uncut, tower.num_patches)
        prompt = self._prompt(structure, model)
        units: list[Unit] = []
        if self.entering is not None:
            stage = next(stage for stage in owner.stages if stage.method is self.entering)
            units = units_of(prompt.images, owner.budgets(stage, prompt), stage.method, most_tiles(model, config))
        limit = getattr(config, LIMIT, None)
        if not units and self.layers is not None and limit is not None:
            structure = read_structure(official, model, given, config, tower.num_patches)
            prompt = self._prompt(structure, model)
        encoded: list[EncodedImage] = []

        def encode(pixels: Tensor) -> Tensor:
            encoded[:] = encoded_in(given.images) or self.encode(pixels, given.tiles)
            parts = [one.projected for one in encoded]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        overlay = Overlay(model, config=uncut if units else config, encode_images=encode)
        results = official(overlay, *given)
        own = [encoded[picture] for picture in structure.pictures]
        pixels = [{} if one.pixels is None else {"pixel_values": one.pixels} for one in own]
        prompt = prompt._replace(tiles=[one.tiles for one in own], encoded=pixels)
        report, after = Report(unchanged(prompt.images)), None
        if units:
            results, prompt, report, after = self._reduced(model, given, results, prompt, units, config)
        elif limit is not None and self.layers is None:
            report = replace(report, outcomes=_counted(report, prompt, prompt.real.cumsum(1) <= limit))
        depth = self.layers.count if self.layers is not None else 0
        entering = [one._replace(entering=(one.after,) * depth) for one in report.outcomes]
        owner.tell(replace(report, outcomes=entering))
        self.local.more = min(len(structure.real[0]), limit or len(structure.real[0])) - results[4].shape[1]
        self.local.prepared = Prepared(weakref.ref(results[4]), prompt, report, after)
        return results

    def official(self, model: Any) -> Any:
        """LLaVA's own function, of seven arguments."""
        return getattr(type(model), PREPARE)

    def _prompt(self, structure: Structure, model: Any) -> Prompt:
        """The prompts, before anything is known of the pixels."""
        asks = structure.real
        if not any(stage.method.answer_rows for stage in self.owner.stages):
            asks = structure.asks | (visual_rows(structure.images, asks.shape) & asks)
        return prompt_of(structure.ids, structure.real, asks, structure.images, [], [], model.config)

    def encode(self, pixels: Tensor, tiles: list[int]) -> list[EncodedImage]:
        """Tiles [T, 3, h, w] through tower and projector.

        Args:
            tiles: how many each image has.
        """
        model = self.running
        tower, parts, scales = model.get_vision_tower(), dict[str, Tensor](), (1.0, 1.0)
        if self.reader is None:
            projected = model.encode_images(pixels)
        else:
            vision, scales = vision_of(tower), self.reader.scales(vision_of(tower))
            with self.reader.reading(vision) as parts:
                projected = model.encode_images(pixels)
        split = {name: value.split(tiles) for name, value in parts.items()}
        draws = any(Need.FINGERPRINT in stage.method.needs for stage in self.owner.stages)
        return [
            EncodedImage(
                features,
                Tiles(count, features.shape[1], side_of(tower), {name: value[number] for name, value in split.items()},
                      None, 1, *scales),
                own if draws else None,
            )
            for number, (count, features, own) in enumerate(
                zip(tiles, projected.split(tiles), pixels.split(tiles), strict=True)
            )
        ]  # fmt: skip

    def _reduced(
        self, model: Any, given: Arguments, results: tuple[Any, ...], prompt: Prompt, units: list[Unit], config: Any
    ) -> tuple[tuple[Any, ...], Prompt, Report, After | None]:
        """The results for the rows that are left. Truncation judges the reduced length."""
        method: Any = self.entering
        _, positions, mask, past, embeds, labels = results
        decoder, real = model.get_model(), prompt.real
        project, limit = decoder.mm_projector, getattr(config, LIMIT, None)
        short = self.reader.short if self.reader is not None else ""
        needs = needs_of(prompt, method, model, True, short)
        clip = self.owner.clip_sides(prompt, self.base()) if Need.QUESTION in needs else None
        inputs = Inputs(prompt, embeds, method, needs, project, clip)
        counted, shown = upload([np.maximum(real.cumsum(1) - 1, 0), real], embeds.device)
        inputs.read_probe(decoder, {
            "inputs_embeds": embeds, "attention_mask": None if real.all() else shown, "position_ids": counted
        })  # fmt: skip
        groups = inputs.reduce(units)
        drops = [method.newlines == "drop"] * len(prompt.images)
        left = getattr(config, "tokenizer_padding_side", "right") == "left"
        with inputs.watch.time("splice"):
            rows, pool = reduced_rows(embeds, real, prompt.images, groups, method, drops)
            rows, order = aligned(rows, left, limit)
            if order is not None:
                pool = pool._replace(picked=pool.picked.gather(1, order))
            new = pool.take(embeds, [group.reduction.tokens for group in groups])
            if rows.padded:
                new = new.masked_fill(~rows.shown[..., None], 0.0)
            keeps = method.positions != "renumber"
            if keeps:
                every = pool.mean(counted) if method.positions == "mean" else drop_rows(counted, rows)
                positions = every * rows.shown
            elif positions is not None:
                positions = _counted_rows(rows).to(positions.dtype)
            # without a mask, gaps between positions would be taken for the ends of packed sequences
            if mask is not None or keeps:
                mask = rows.shown if mask is None else rows.shown.to(mask.dtype)
            if labels is not None:
                labels = drop_rows(labels, rows)
                labels = labels.masked_fill(~rows.shown, IGNORE) if rows.padded else labels
        outcomes = reduced(unchanged(prompt.images), groups, drops)
        report = Report(outcomes, inputs.notes, inputs.watch)
        after = None
        if keeps:  # padding of the prompts is on the left here, if an answer follows
            size = rows.real.shape[1]
            (offset,) = upload([real.sum(1)[:, None] - size], embeds.device)
            after = After(offset, positions[:, -1:] + 1 - size)
        if limit is not None and rows.real.sum() < reduced_size(prompt, report):
            report = replace(report, outcomes=_counted(report, prompt, rows.real, rows.index.cpu().numpy()))
        prompt = compact(prompt, rows, model.config) if self.layers is not None else prompt
        return (None, positions, mask, past, new, labels), prompt, report, after

    # The entrance of the decoder

    @uncompiled
    def begin(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arms the hooks between layers for prompts that were prepared. Later steps get positions and masks that fit
        the cache.
        """
        self._disarm()
        kwargs = {**dict(zip(self.inner, args, strict=False)), **kwargs}
        cache, prepared = cache_in(kwargs), self._awaited(kwargs.get("inputs_embeds"))
        mask = kwargs.get("attention_mask")
        self.local.mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        if prepared is not None:
            self.local.after = prepared.after
            if self.layers is not None:
                self._cut(decoder, prepared, kwargs, cache)
            return (), kwargs
        if not cached_rows(cache):  # a prompt without images
            self.owner.tell_plain()
            return (), kwargs
        if type(cache) is tuple:  # transformers 4.37
            cache = Held(cache, getattr(self.local, "book", None))
            if not cache.fits:
                return (), kwargs
        book = book_of(cache)
        if isinstance(self.layers, PinnedLayers) and book is not None:
            self.layers.reach = max(self.layers.reach, book.size + int(cache.get_seq_length()))
        elif book is not None and book.owner == self.number:
            kwargs.update(held_masks(kwargs, cache, book))
        return (), self._step(decoder, _ahead(kwargs, cache), book, cache)

    def _awaited(self, embeds: Tensor | None) -> Prepared | None:
        """The prompts that these embeddings are of, or copies of them for beams."""
        prepared: Prepared | None = getattr(self.local, "prepared", None)
        self.local.prepared = None
        own = None if prepared is None else prepared.embeds()
        if own is None or embeds is None or embeds.shape[1:] != own.shape[1:] or len(embeds) % len(own):
            return None
        return prepared

    def _cut(self, decoder: Any, prepared: Prepared, kwargs: dict[str, Any], cache: Any) -> None:
        embeds, beams = kwargs["inputs_embeds"], len(kwargs["inputs_embeds"]) // len(prepared.prompt.real)
        prompt, report = prepared.prompt, prepared.report
        if beams > 1:
            prompt = for_beams(prompt, beams)
            report = replace(report, outcomes=report.outcomes * beams)
        mask = kwargs.get("attention_mask")
        if not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)):
            (mask,) = upload([prompt.real], embeds.device)  # generate makes others for a static cache
            kwargs["attention_mask"] = mask
        if isinstance(self.layers, PinnedLayers):
            self.layers.check(prompt.real.shape[1])
            self.layers.reach = max(self.layers.reach, 2 * prompt.real.shape[1])
        cut = Cut(None, prompt.real.shape[1], cache, None, None)
        base = SimpleNamespace(multi_modal_projector=decoder.mm_projector)
        short = self.reader.short if self.reader is not None else ""
        report = self._between(decoder, base, prompt, short, kwargs, cut, report)  # type: ignore[arg-type]
        cut.reported = [number for number, image in enumerate(prompt.images) if image.row % beams == 0]
        self.owner.tell(replace(report, outcomes=[report.outcomes[number] for number in cut.reported]))
        self.local.cut = cut

    def _keep(self, cache: Any, book: Book) -> None:
        """Stores in a cache what it holds; the tuples of transformers 4.37 cannot."""
        super()._keep(cache, book)
        self.local.book = book if type(cache) is tuple else None

    @uncompiled
    def end(self, decoder: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """The last states at full length; the cache says what it holds."""
        after, self.local.after = getattr(self.local, "after", None), None
        changed = super().end(decoder, args, kwargs, output)
        cache = cache_in(output) if after is not None else None
        if cache is not None:
            setattr(cache, AFTER, after)
        return changed


def layers_of(decoder: Any, method: Method) -> Layers:
    """The layers of a decoder, on any version."""
    return PinnedLayers(decoder, method) if OLD else Layers(decoder, method)


@uncompiled
def _forward(owner: Any, *args: Any, **kwargs: Any) -> Any:
    """The decoder's own forward, kept out of compiled graphs, in which hooks are traced once and for all."""
    decoder = owner.entrance.running.get_model()
    return type(decoder).forward(decoder, *args, **kwargs)


@uncompiled
def _prepare(owner: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Takes the place of LLaVA's function: same arguments, same six results."""
    results: tuple[Any, ...] = owner.entrance.prepare(Arguments(*args, **kwargs))
    return results


def _count(owner: Any, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of the function by which `generate` settles its lengths: `max_length` and `min_length` count the
    prompt, and `generate` counts the rows that are left of it.
    """
    entrance = owner.entrance
    model, local = entrance.model(), entrance.local
    function = getattr(type(model), COUNTING)
    kwargs = {**dict(zip(argument_names(function)[1:], args, strict=False)), **kwargs}
    prepared: Prepared | None = getattr(local, "prepared", None)
    config = kwargs["generation_config"]
    own = prepared is not None and prepared.embeds() is kwargs["inputs_tensor"]
    more = local.more if own else 0
    if config.max_new_tokens is None and not kwargs["has_default_max_length"]:
        config.max_length = max(config.max_length - more, 1)
    if config.min_new_tokens is None and config.min_length and not kwargs["has_default_min_length"]:
        config.min_length = max(config.min_length - more, 0)
    return function(model, **kwargs)


def aligned(rows: Rows, left: bool, limit: int | None) -> tuple[Rows, Tensor | None]:
    """Rows that are padded on this side, and are cut to a limit; and which of the given ones they are, None if all."""
    lengths, width = rows.real.sum(1)[:, None], rows.real.shape[1]
    most = width if limit is None else min(width, limit)
    if most == width and (left or not rows.padded):
        return rows, None
    kept = np.minimum(lengths, most)
    columns = np.arange(most)[None]
    place = columns - (most - kept) if left else columns
    real = (place >= 0) & (place < kept)
    order, shown = upload([np.where(real, width - lengths + place, 0), real], rows.index.device)
    at = None if rows.at is None else rows.at.gather(1, order)
    return rows._replace(index=rows.index.gather(1, order), at=at, real=real, shown=shown.bool()), order


def _counted_rows(rows: Rows) -> Tensor:
    (positions,) = upload([np.maximum(rows.real.cumsum(1) - 1, 0) * rows.real], rows.index.device)
    return positions


def reduced_size(prompt: Prompt, report: Report) -> int:
    """Rows of all prompts without truncation."""
    lost = sum(one.before - one.after for one in report.outcomes)
    structural = sum(int((image.token < 0).sum()) for image in prompt.images)
    return int(prompt.real.sum()) - lost - structural + sum(one.structural for one in report.outcomes)


def _counted(report: Report, prompt: Prompt, real: Any, index: Any = None) -> list[Any]:
    """Outcomes of truncated prompts.

    Args:
        real: [R, W] rows that are left.
        index: [R, W] rows of the prompt that they are; None if these are the same.
    """
    found = []
    for outcome, image in zip(report.outcomes, prompt.images, strict=True):
        own = np.zeros(prompt.real.shape[1], dtype=bool)
        own[image.places[image.token >= 0]] = True
        here = own if index is None else own[index[image.row]]
        found.append(outcome._replace(after=int((here & real[image.row]).sum())))
    return found


def for_beams(prompt: Prompt, beams: int) -> Prompt:
    """Prompts each of which is repeated."""
    ids, real, asks = (np.repeat(value, beams, 0) for value in (prompt.ids, prompt.real, prompt.asks))
    images = [one._replace(row=one.row * beams + beam) for beam in range(beams) for one in prompt.images]
    return prompt._replace(
        ids=ids, real=real, asks=asks, images=images, tiles=prompt.tiles * beams, encoded=prompt.encoded * beams,
        text=prompt.text * beams, beams=beams,
    )  # fmt: skip


def cached_rows(cache: Any) -> int:
    """Rows that a cache holds, on any version."""
    if cache is None or not hasattr(cache, "get_seq_length"):
        return int(cache[0][0].shape[-2]) if cache else 0
    return int(cache.get_seq_length())


def _ahead(kwargs: dict[str, Any], cache: Any) -> dict[str, Any]:
    """Positions of rows behind a prompt that has kept its positions: those that are counted by the cache, or on from
    the last row that is left, are ahead by as many rows as have left.
    """
    after: After | None = getattr(cache, AFTER, None)
    if after is None:
        return kwargs
    offset, last, cached = after.offset, after.last, int(cache.get_seq_length())
    embeds = kwargs.get("inputs_embeds")
    rows, new = (kwargs["input_ids"] if embeds is None else embeds).shape[:2]
    counted = torch.arange(cached, cached + new, device=offset.device)
    given = kwargs.get("position_ids")
    offset, last = (value.repeat_interleave(rows // len(offset), 0) for value in (offset, last))
    ahead = counted + offset
    if given is not None:
        by_rows = (given == counted) | (given == counted + last)
        ahead = torch.where(by_rows, ahead, given)
    return {**kwargs, "position_ids": ahead}


def fed_block(layer: Any, count: int) -> int:
    """The block whose output is `hidden_states[layer]`, which has one entry more than blocks."""
    if not isinstance(layer, int):
        raise OptionError(f"vision layer {layer!r}: features of several layers are not adapted, give one number")
    return layer + count if layer < 0 else layer - 1


def side_of(tower: Any) -> int:
    """Tokens in a row of a tile."""
    return int(round(tower.num_patches**0.5))


def laid_out(model: Any, options: Mapping[str, str], settings: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """The configuration, or a copy of it with the entries that make the layout, and with these settings."""
    changes = dict(settings)
    if options.get("layout", STOCK) != STOCK:
        grid = fixed_grid(model.get_vision_tower().config.image_size)
        changes |= {"image_grid_pinpoints": grid, "mm_patch_merge_type": "spatial"}
    return changed(model.config, changes) if changes else model.config


def changed(config: Any, changes: Mapping[str, Any]) -> Any:
    """A copy of a configuration with changes; the original is never written to."""
    altered = copy.copy(config)
    for name, value in changes.items():
        setattr(altered, name, value)
    return altered


def most_tiles(model: Any, config: Any) -> int:
    """The most tiles an image can have: the base view and the largest grid; 1 without anyres."""
    tower = model.get_vision_tower()
    points = getattr(config, "image_grid_pinpoints", None)
    if tower is None or getattr(config, "image_aspect_ratio", None) != "anyres" or not points:
        return 1
    points, size = ast.literal_eval(points) if isinstance(points, str) else points, tower.config.image_size
    return 1 + max((width // size) * (height // size) for width, height in points)
