"""Official LLaVA 1.5 and 1.6 (the `llava` package, wheel and git HEAD), with Llama and Mistral language models.

    prepare    LLaVA's own function, wrapped: images are reduced in the sequences that it has assembled
    decoder    pre-hook and post-hook, for methods that cut these sequences between its layers

`generate` is given embeddings only, so that everything counts the rows that are left.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts.arguments import Pass, State, compact, held_masks
from llava_consensus.hosts.before_tower import ImageLeft, check_equal, shares_left, units_left
from llava_consensus.hosts.entrance import Entrance
from llava_consensus.hosts.environment import STOCK
from llava_consensus.hosts.images import check_tiles
from llava_consensus.hosts.inputs import Inputs
from llava_consensus.hosts.kernels import OLD, uncompiled
from llava_consensus.hosts.official_model import (
    Arguments,
    LlavaTower,
    Official,
    aligned,
    changed,
    check_images,
    check_layout,
    counted,
    encoded_in,
    for_beams,
    laid_out,
    most_tiles,
    open_tower,
    read_structure,
    with_encoded,
)
from llava_consensus.hosts.open_tower import EncoderRun
from llava_consensus.hosts.outcomes import Report
from llava_consensus.hosts.pinned import Held, PinnedLayers, angles_of, layers_of
from llava_consensus.hosts.prompts import IGNORE, Prompt, asking_rows, prompt_of, refuse_packed
from llava_consensus.hosts.rows import Book, book_of, by_name, cache_in, cached_rows, gather, given_rows, upload
from llava_consensus.hosts.taps import EncodedImage, Reader, encoded_images, split_heads
from llava_consensus.hosts.tower import READ, argument_names
from llava_consensus.hosts.units import Unit, units_of
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.saliency import rotate
from llava_consensus.reduction.tokens import Need, TextProbe

PREPARE = "prepare_inputs_labels_for_multimodal"
COUNTING = "_prepare_generated_length"  # function of transformers 5 that settles how long an answer may be
LIMIT = "tokenizer_model_max_length"  # entry of the configuration: rows that a sequence is cut to
AFTER = "_reduction_after"  # attribute of a cache


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
    size: int = 0  # rows of the full prompts


class OfficialState(State):
    prepared: Prepared | None = None
    after: After | None = None
    keeps = False  # whether the last method at the entrance keeps positions
    following: Any = None  # [R, 1] rows of each prompt by which the position behind it is counted
    book: Book | None = None  # of the last prompt, on 4.37
    replica: Any = None  # of DataParallel, which runs in this thread


class OfficialEntrance(Entrance):
    """The hooks of one attachment to official LLaVA."""

    view, state = Official, OfficialState

    def __init__(self, owner: Any, model: Any, options: Mapping[str, str]) -> None:
        methods: list[Method] = [stage.method for stage in owner._stages]
        self.start(owner, model)
        self.options = options
        self.check(model, methods)
        if methods[-1].place is Place.DECODER:
            self.layers = layers_of(model.get_model(), methods[-1])
        if methods[0].acts_inside:
            self.before = open_tower(model, owner._stages[0])
        self.inner = argument_names(type(model.get_model()).forward)[1:]
        self.reader: Reader | None = None
        tower = model.get_vision_tower()
        reading = next((method for method in methods if method.needs & READ), None)
        if tower is not None and reading is not None:
            view = LlavaTower(tower)
            self.reader = Reader(reading, len(view.blocks), view.fed)
            if self.reader.short:
                raise OptionError(self.reader.short)

    def check(self, model: Any, methods: list[Method]) -> None:
        for method in methods:
            self.view.check(method)
        check_images(vars(model.config))
        check_layout(self.options.get("layout", STOCK), getattr(model.config, "image_aspect_ratio", None))
        tower = model.get_vision_tower()
        if tower is not None and not tower.is_loaded:
            raise OptionError("the vision tower has no weights yet: call model.get_vision_tower().load_model() first")
        if getattr(tower, "select_feature", "patch") != "patch":
            raise OptionError(
                f"mm_vision_select_feature={tower.select_feature!r} must be 'patch': "
                "a class token among the patches is no candidate"
            )

    def base(self) -> Any:
        model = self.model()
        tower = None if model is None else model.get_vision_tower()
        return None if tower is None else LlavaTower(tower).vision

    @property
    def clip_name(self) -> str:
        return str(self.model().get_vision_tower().vision_tower_name)  # type: ignore[union-attr]

    def replaced(self, model: Any) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        for block in self.unread(model):
            yield block, "forward", partial(self.skip_unread, block.forward)
        yield model, PREPARE, self.called
        if self.layers is not None:
            yield model.get_model(), "forward", self.forward
        if not OLD:
            yield model, COUNTING, self.count

    def register(self) -> list[Any]:
        model: Any = self.model()
        decoder = model.model
        return [
            model.register_forward_pre_hook(self.note_running),
            decoder.register_forward_pre_hook(self.begin, with_kwargs=True),
            decoder.register_forward_hook(self.end, with_kwargs=True),
            *(self.layers.widen(decoder) if isinstance(self.layers, PinnedLayers) else ()),
        ]

    def unread(self, model: Any) -> list[Any]:
        """Blocks of a CLIP tower after the last one that the projector or a method reads."""
        tower = model.get_vision_tower()
        view = None if tower is None else LlavaTower(tower)
        if view is None or not hasattr(view.vision, "post_layernorm"):
            return []
        return list(view.blocks)[max(view.fed, 0 if self.reader is None else self.reader.last) + 1 :]

    def note_running(self, model: nn.Module, args: Any) -> None:
        self.local.replica = model if getattr(model, "_is_replica", False) else None

    @property
    def running(self) -> Any:
        """The model, or its replica that runs in this thread."""
        return self.model() if self.local.replica is None else self.local.replica

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The decoder's own forward, kept out of compiled graphs, in which hooks are traced once and for all."""
        decoder = self.running.get_model()
        return type(decoder).forward(decoder, *args, **kwargs)

    def count(self, inputs_tensor: Tensor, **given: Any) -> Any:
        """The function in which `generate` sets its lengths: `max_length` counts the full prompt."""
        model, prepared = self.model(), self.local.prepared
        if prepared is not None and prepared.embeds() is inputs_tensor:
            inputs_tensor = inputs_tensor.new_empty(len(inputs_tensor), prepared.size)
        return getattr(type(model), COUNTING)(model, inputs_tensor=inputs_tensor, **given)

    # LLaVA's function

    @uncompiled
    def called(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Takes the place of LLaVA's function: same arguments, same results."""
        return self.prepare(Arguments(*args, **kwargs))

    def prepare(self, given: Arguments) -> tuple[Any, ...]:
        model, owner = self.running, self.owner
        official, tower = self.official(model), model.get_vision_tower()
        if given.input_ids.shape[1] == 1 or given.images is None or tower is None:
            if given.input_ids.shape[1] > 1:
                owner._tell_plain()
            return official(model, *given)
        refuse_packed(given.position_ids, given.attention_mask)
        if self.options.get("layout", STOCK) != STOCK:
            check_tiles(given.tiles)
        config = laid_out(model, self.options, owner._settings)
        limit = getattr(config, LIMIT, None)
        uncut = changed(config, {LIMIT: None}) if self.entering else config
        prompt, origins = self._known(given, uncut)
        reduces = any(self._reduces(stage, prompt) for stage in self.entering)
        if not reduces and self.layers is not None and limit is not None:
            prompt, origins = self._known(given, config)
        encoded: list[EncodedImage] = []

        def encode(pixels: Tensor) -> Tensor:
            encoded[:] = encoded_in(given.images) or self.encode(pixels, given.tiles)
            parts = [one.projected for one in encoded]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        results = official(changed(model, {"config": uncut if reduces else config, "encode_images": encode}), *given)
        prompt = with_encoded(prompt, [encoded[origin] for origin in origins])
        run, after = Pass(model.get_model(), self.base(), prompt, {}), None
        if reduces:
            results, after = self._reduced(run, results, config)
        elif limit is not None and self.layers is None:
            outcomes = counted(run.report.outcomes, prompt, prompt.real & (prompt.real.cumsum(1) <= limit))
            run.report = replace(run.report, outcomes=outcomes)
        depth = self.layers.count if self.layers is not None else 0
        entering = [one._replace(entering=(one.after,) * depth) for one in run.report.outcomes]
        owner._tell(replace(run.report, outcomes=entering))
        size = run.size if limit is None else min(run.size, limit)
        self.local.prepared = Prepared(weakref.ref(results[4]), run.prompt, run.report, after, size)
        return results

    def official(self, model: Any) -> Any:
        """LLaVA's own function, of seven arguments."""
        return getattr(type(model), PREPARE)

    def _known(self, given: Arguments, config: Any) -> tuple[Prompt, list[int]]:
        """The prompts, before anything is known of the pixels, and which of the images the user passed each one is."""
        model, tower = self.running, self.running.get_vision_tower()
        known = read_structure(self.official(model), tower, given, config, LlavaTower(tower).size)
        ids, real, unlabelled, images, origins = known
        asks = asking_rows(self.owner, real, unlabelled, images)
        return prompt_of(ids, real, asks, images, [], [], model.config), origins

    def _reduces(self, stage: Any, prompt: Prompt) -> bool:
        if stage.method.acts_inside:
            return bool(units_left(prompt.images, [self.left(image.tiles) for image in prompt.images]))
        return bool(units_of(prompt.images, self.owner._budgets(stage, prompt), stage.method, self.most_tiles()))

    def most_tiles(self) -> int:
        return most_tiles(self.running, laid_out(self.running, self.options))

    def left(self, tiles: int, slot: Any = None) -> ImageLeft:
        """Tokens that a method before the projector leaves of an image of `tiles` tiles."""
        stage, tower = self.owner._stages[0], LlavaTower(self.running.get_vision_tower())
        return ImageLeft(slot, tower.side, shares_left(tiles, tower.size, stage.budget, stage.method))

    def encode(self, pixels: Tensor, tiles: list[int]) -> list[EncodedImage]:
        """Tiles [T, 3, h, w] through tower and projector.

        Args:
            tiles: how many each image has.
        """
        model, reader = self.running, self.reader
        view = LlavaTower(model.get_vision_tower())
        left = [self.left(count) for count in tiles] if self.before is not None else []
        run = EncoderRun([share for own in left for share in own.shares], (view.side, view.side), False)
        acting = any(share < view.size for share in run.shares)
        if acting and reader is not None:
            check_equal(reader.method, self.owner._stages[0].method, run.shares)
        with self.before.running(run) if acting else nullcontext(), self.noting(skips=True):
            found = encoded_images(reader, view, model.encode_images, pixels, tiles)
        if not any(Need.FINGERPRINT in stage.method.needs for stage in self.owner._stages):
            found = [one._replace(pixels=None) for one in found]
        if acting:
            assert run.slot is not None
            slots = run.slot.split(tiles)
            found = [
                one._replace(left=own._replace(slot=slot)) for one, own, slot in zip(found, left, slots, strict=True)
            ]
        return found

    def _reduced(self, run: Pass, results: tuple[Any, ...], config: Any) -> tuple[tuple[Any, ...], After | None]:
        """The results for the rows that are left, padded on the side that LLaVA's function pads, cut to its limit."""
        _, positions, mask, past, embeds, labels = results
        whole, device, local = run.whole, embeds.device, self.local
        (places,) = upload([np.maximum(whole.real.cumsum(1) - 1, 0)], device)  # [R, S] position of each row
        local.keeps, local.following = False, whole.real.sum(1)[:, None]
        run.kwargs = {"inputs_embeds": embeds, "position_ids": places, "labels": labels}
        self._enter(run)
        assert run.rows is not None
        embeds, places, labels = (run.kwargs[name] for name in ("inputs_embeds", "position_ids", "labels"))
        real = run.rows.real
        left, limit = getattr(config, "tokenizer_padding_side", "right") == "left", getattr(config, LIMIT, None)
        cropped = limit is not None and real.shape[1] > limit
        if cropped or not (left or real.all()):
            rows = aligned(run.rows, left, limit)
            index, real = rows.index, rows.real
            embeds, places = gather(embeds, index, 1), places.gather(1, index)
            labels = None if labels is None else labels.gather(1, index)
            if cropped or self.layers is not None:
                own = compact(whole, run.rows, config) if self.layers is None else run.prompt
                run.prompt = compact(own, rows, config)
            if cropped:
                run.report = replace(run.report, outcomes=counted(run.report.outcomes, run.prompt, real))
        shown, offset = upload([real, local.following - real.shape[1]], device)
        shown = shown.bool()
        if not real.all():
            embeds = embeds.masked_fill(~shown[..., None], 0.0)
            labels = None if labels is None else labels.masked_fill(~shown, IGNORE)
        if local.keeps or positions is not None:
            positions = places * shown if positions is None else (places * shown).to(positions.dtype)
        # without a mask, gaps between positions would be taken for the ends of packed sequences
        if mask is not None or local.keeps:
            mask = shown if mask is None else shown.to(mask.dtype)
        after = After(offset, places[:, -1:] + 1 - real.shape[1]) if local.keeps else None
        return (None, positions, mask, past, embeds, labels), after

    def projector(self, base: Any) -> Any:
        return self.running.get_model().mm_projector

    def read_probe(self, inputs: Inputs, run: Pass) -> None:
        """By the layer's own projections, queries of the text only."""
        if Need.PROBE not in inputs.needs:
            return
        decoder: Any = run.decoder
        embeds, places, layer = run.kwargs["inputs_embeds"], run.kwargs["position_ids"], decoder.layers[0]
        attention = layer.self_attn
        heads = partial(split_heads, width=attention.head_dim)
        with inputs.watch.time("probe"), torch.autocast(embeds.device.type, enabled=False), torch.no_grad():
            normed = layer.input_layernorm(embeds)
            which, where, mask, keys, padded = inputs.asking_rows()
            query, key = heads(attention.q_proj(normed[which, where])), heads(attention.k_proj(normed))
            rotated = getattr(inputs.method, "scap_rope", True)
            cos, sin = angles_of(decoder, normed, places if rotated else torch.zeros_like(places))
            query, key = rotate(query, cos[which, where], sin[which, where]), rotate(key, cos, sin)
            turned, scale = key.new_empty(len(key), key.shape[2], 0), attention.head_dim**-0.5
            inputs.probe = TextProbe(query, key, turned, turned, scale, where, mask, keys, padded)

    def _at_entrance(self, run: Pass, stage: Any, units: list[Unit]) -> None:
        super()._at_entrance(run, stage, units)
        self.local.keeps = stage.method.positions != "renumber"
        if not self.local.keeps and run.rows is not None:
            self.local.following = run.rows.real.sum(1)[:, None]

    # The entrance of the decoder

    @uncompiled
    def begin(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arms the hooks between layers for prepared prompts. Later steps get positions and masks of the cache."""
        self._disarm()
        kwargs = by_name(self.inner, args, kwargs)
        cache, prepared = cache_in(kwargs), self._awaited(kwargs.get("inputs_embeds"))
        mask = kwargs.get("attention_mask")
        self.local.mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        if prepared is not None:
            self._stay()
            self.local.after = prepared.after
            if self.layers is not None:
                self._cut(decoder, prepared, kwargs, cache)
            return (), kwargs
        if not cached_rows(cache):  # a prompt without images
            self.owner._tell_plain()
            return (), kwargs
        if OLD:
            cache = Held(cache, self.local.book)
        book = book_of(cache)
        if book is not None and self._open(cache, book):
            kwargs.update(held_masks(kwargs, cache, book))
        kwargs = self._step(decoder, _ahead(kwargs, cache), book, cache)
        if OLD and book is not None:
            self.local.book = book_of(cache)
        return (), kwargs

    def _awaited(self, embeds: Tensor | None) -> Prepared | None:
        """The prompts that these embeddings are of, or copies of them for beams."""
        prepared, self.local.prepared = self.local.prepared, None
        own = None if prepared is None else prepared.embeds()
        if own is None or embeds is None or embeds.shape[1:] != own.shape[1:] or len(embeds) % len(own):
            return None
        return prepared

    def _cut(self, decoder: Any, prepared: Prepared, kwargs: dict[str, Any], cache: Any) -> None:
        embeds = kwargs["inputs_embeds"]
        beams = len(embeds) // len(prepared.prompt.real)
        prompt, report = prepared.prompt, prepared.report
        if beams > 1:
            prompt = for_beams(prompt, beams)
            report = replace(report, outcomes=report.outcomes * beams)
        run = Pass(decoder, self.base(), prompt, kwargs, cache)
        run.report = report
        self._between(run)

    def _keep(self, cache: Any, book: Book) -> None:
        if OLD:  # a tuple cannot store it
            self.local.book = book
        else:
            super()._keep(cache, book)

    @uncompiled
    def end(self, decoder: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        after, self.local.after, hold = self.local.after, None, self.local.hold
        restored = super().end(decoder, args, kwargs, output)
        cache = cache_in(output) if after is not None else None
        if cache is not None:
            setattr(cache, AFTER, after)
            cache.reduction_hold = hold
        return restored


def _ahead(kwargs: dict[str, Any], cache: Any) -> dict[str, Any]:
    """Positions of rows behind a prompt that has kept its positions: those that are counted by the cache, or on from
    the last row that is left, are ahead by the number of rows that have left.
    """
    after: After | None = getattr(cache, AFTER, None)
    if after is None:
        return kwargs
    offset, last, cached = after.offset, after.last, int(cache.get_seq_length())
    rows, new = given_rows(kwargs).shape[:2]
    counted = torch.arange(cached, cached + new, device=offset.device)
    given = kwargs.get("position_ids")
    offset, last = (value.repeat_interleave(rows // len(offset), 0) for value in (offset, last))
    ahead = counted + offset
    if given is not None:
        by_rows = (given == counted) | (given == counted + last)
        ahead = torch.where(by_rows, ahead, given)
    return {**kwargs, "position_ids": ahead}
