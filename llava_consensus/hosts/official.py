"""Official LLaVA 1.5 and 1.6 (the `llava` package, wheel and git HEAD), with Llama and Mistral language models.

    prepare    LLaVA's own function, wrapped: images are reduced in the sequences that it has assembled
    decoder    pre-hook and post-hook, for methods that cut these sequences between its layers

`generate` is given embeddings only, so that everything counts the rows that are left.
"""

import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts.arguments import Cut, asking_rows, held_masks
from llava_consensus.hosts.before_tower import ImageLeft, check_equal, numbered, shares_left, units_left
from llava_consensus.hosts.cache import Book, book_of, cache_in, cached_rows
from llava_consensus.hosts.entrance import Entrance
from llava_consensus.hosts.inputs import EncodedImage, Prompt, needs_of, prompt_of
from llava_consensus.hosts.kernels import OLD, uncompiled
from llava_consensus.hosts.layers import Layers
from llava_consensus.hosts.next_grid import STOCK, check_layout, check_pictures, check_tiles
from llava_consensus.hosts.official_facts import (
    changed,
    fed_block,
    laid_out,
    most_tiles,
    open_tower,
    patches_of,
    side_of,
)
from llava_consensus.hosts.official_prompt import (
    Arguments,
    Reader,
    Structure,
    encoded_in,
    read_structure,
    vision_of,
)
from llava_consensus.hosts.official_rows import After, Sequences, counted, for_beams, with_encoded
from llava_consensus.hosts.open_tower import Run
from llava_consensus.hosts.outcomes import Report, unchanged
from llava_consensus.hosts.pinned import Held, PinnedLayers
from llava_consensus.hosts.rows import upload
from llava_consensus.hosts.tower import READ, Learnt, Tiles, Tower, argument_names
from llava_consensus.hosts.units import Unit, units_of
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.tokens import Need

PREPARE = "prepare_inputs_labels_for_multimodal"
COUNTING = "_prepare_generated_length"  # function of transformers 5 that settles how long an answer may be
LIMIT = "tokenizer_model_max_length"  # entry of the configuration: rows that a sequence is cut to
AFTER = "_reduction_after"  # attribute of a cache


class Overlay:
    """An object with some attributes replaced; the object itself stays as it is."""

    def __init__(self, own: Any, **replaced: Any) -> None:
        vars(self).update(replaced, own=own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


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
        self.start(owner, model)
        self.options = options
        self.check(model, methods)
        self.decodes = methods[-1].place is Place.DECODER
        self.layers = layers_of(model.get_model(), methods[-1]) if self.decodes else None
        self.before = open_tower(model, owner.stages[0]) if methods[0].acts_inside else None
        self.inner = argument_names(type(model.get_model()).forward)[1:]
        self.reader: Reader | None = None
        tower = model.get_vision_tower()
        if tower is not None:
            reading = next((method for method in methods if method.needs & READ), methods[0])
            known = Tower(vision_of(tower), None, reading, Learnt({}, {}, {}))  # type: ignore[arg-type]
            if known.reads:
                (name, count), *_ = known.lists.items()
                self.reader = Reader(known, (name, fed_block(tower.select_layer, count)))
                if self.reader.short:
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
        keeps = next((m.positions for m in methods if m.place is not Place.DECODER and m.positions != "renumber"), None)
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
        for block in self.unread(model):
            object.__setattr__(block, "forward", partial(_skip_unread, self.owner, block.forward))
        if self.before is not None:
            self.before.install()
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
        if self.before is not None:
            self.before.remove()
        model: Any = self.model()
        for block in self.unread(model) if model is not None else ():
            vars(block).pop("forward", None)
        for name in (PREPARE, COUNTING) if model is not None else ():
            vars(model).pop(name, None)
        if self.decodes and model is not None:
            vars(model.get_model()).pop("forward", None)
        self._leave()

    def unread(self, model: Any) -> list[Any]:
        """Blocks of a CLIP tower after the last one that the projector or a method reads."""
        tower = model.get_vision_tower()
        if tower is None or not hasattr(vision_of(tower), "post_layernorm"):
            return []
        blocks: Any = vision_of(tower).encoder.layers  # type: ignore[union-attr]
        read = [fed_block(tower.select_layer, len(blocks))]
        read += [] if self.reader is None else [self.reader.last]
        return list(blocks)[max(read) + 1 :]

    def note_running(self, model: nn.Module, args: Any) -> None:
        """Notes the replica that runs (DataParallel)."""
        self.local.replica = model if getattr(model, "_is_replica", False) else None

    @property
    def running(self) -> Any:
        """The model, or its replica that runs in this thread."""
        replica = getattr(self.local, "replica", None)
        return self.model() if replica is None else replica

    # LLaVA's function

    def called(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Takes the place of LLaVA's function: same arguments, same results."""
        return self.prepare(Arguments(*args, **kwargs))

    def prepare(self, given: Arguments) -> tuple[Any, ...]:
        """Its six results, with the images reduced."""
        model, owner = self.running, self.owner
        official, tower = self.official(model), model.get_vision_tower()
        if given.input_ids.shape[1] == 1 or given.images is None or tower is None:
            if given.input_ids.shape[1] > 1:
                owner.tell_plain()
            return official(model, *given)
        if self.options.get("layout", STOCK) != STOCK:
            check_tiles(given.tiles)
        config = laid_out(model, self.options, owner.settings)
        limit = getattr(config, LIMIT, None)
        uncut = changed(config, {LIMIT: None}) if self.entering else config
        prompt, pictures = self._known(read_structure(official, model, given, uncut, patches_of(tower)), model)
        reduces = any(self._units(stage, prompt, config) for stage in self.entering)
        if not reduces and self.layers is not None and limit is not None:
            uncut = config
            prompt, pictures = self._known(read_structure(official, model, given, config, patches_of(tower)), model)
        encoded: list[EncodedImage] = []

        def encode(pixels: Tensor) -> Tensor:
            encoded[:] = encoded_in(given.images) or self.encode(pixels, given.tiles)
            parts = [one.projected for one in encoded]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        results = official(Overlay(model, config=uncut if reduces else config, encode_images=encode), *given)
        prompt = with_encoded(prompt, [encoded[picture] for picture in pictures])
        size, report, after = prompt.real.shape[1], Report(unchanged(prompt.images)), None
        if reduces:
            results, prompt, report, after = self._reduced(model, results, prompt, config)
        elif limit is not None and self.layers is None:
            outcomes = counted(report.outcomes, prompt, prompt.real & (prompt.real.cumsum(1) <= limit))
            report = replace(report, outcomes=outcomes)
        depth = self.layers.count if self.layers is not None else 0
        entering = [one._replace(entering=(one.after,) * depth) for one in report.outcomes]
        owner.tell(replace(report, outcomes=entering))
        self.local.more = min(size, limit or size) - results[4].shape[1]
        self.local.prepared = Prepared(weakref.ref(results[4]), prompt, report, after)
        return results

    def official(self, model: Any) -> Any:
        """LLaVA's own function, of seven arguments."""
        return getattr(type(model), PREPARE)

    def _known(self, structure: Structure, model: Any) -> tuple[Prompt, list[int]]:
        """The prompts, before anything is known of the pixels, and which of the images the user passed each one is."""
        asks = asking_rows(self.owner, structure.real, structure.asks, structure.images)
        prompt = prompt_of(structure.ids, structure.real, asks, structure.images, [], [], model.config)
        return prompt, structure.pictures

    def _units(self, stage: Any, prompt: Prompt, config: Any) -> list[Unit]:
        """Tokens that are ranked together, of images with more than their budget."""
        if stage.method.acts_inside:
            return units_left(prompt.images, prompt.left or [self.left(image.tiles) for image in prompt.images])
        most = most_tiles(self.running, config)
        return units_of(prompt.images, self.owner.budgets(stage, prompt), stage.method, most)

    def left(self, tiles: int, slot: Any = None) -> ImageLeft:
        """What a method before the projector leaves of an image of so many tiles."""
        stage, tower = self.owner.stages[0], self.running.get_vision_tower()
        size = patches_of(tower)
        return ImageLeft(slot, side_of(tower), shares_left(tiles, size, stage.budget, stage.method))

    def encode(  # type: ignore[override]
        self, pixels: Tensor, tiles: list[int]
    ) -> list[EncodedImage]:
        """Tiles [T, 3, h, w] through tower and projector.

        Args:
            tiles: how many each image has.
        """
        model = self.running
        tower, parts, scales = model.get_vision_tower(), dict[str, Tensor](), (1.0, 1.0)
        vision, left = vision_of(tower), [self.left(count) for count in tiles] if self.before is not None else []
        run, shares = nullcontext(), [share for own in left for share in own.shares]
        acting = any(share < patches_of(tower) for share in shares)
        if acting and self.reader is not None:
            check_equal(self.reader.method, self.owner.stages[0].method, shares)
        if acting:
            side = side_of(tower)
            run = self.before.running(acts := Run(shares, (side, side), False))
        if self.reader is not None:
            scales = self.reader.scales(vision)
        with run, self.reader.reading(vision) if self.reader is not None else nullcontext(parts) as parts:
            self.local.encoding = True
            try:
                projected = model.encode_images(pixels)
            finally:
                self.local.encoding = False
        split = {name: value.split(tiles) for name, value in parts.items()}
        draws = any(Need.FINGERPRINT in stage.method.needs for stage in self.owner.stages)
        slots = acts.slot.split(tiles) if acting else []  # type: ignore[union-attr]
        found = []
        for number, (count, features, own) in enumerate(
            zip(tiles, projected.split(tiles), pixels.split(tiles), strict=True)
        ):
            read = {name: value[number] for name, value in split.items()}
            image = Tiles(count, features.shape[1], side_of(tower), read, None, 1, *scales)
            found.append(EncodedImage(features, image, own if draws else None, None))
            if acting:
                found[-1] = found[-1]._replace(left=left[number]._replace(slot=slots[number]))
        return found

    def _reduced(
        self, model: Any, results: tuple[Any, ...], prompt: Prompt, config: Any
    ) -> tuple[tuple[Any, ...], Prompt, Report, After | None]:
        """The results for the rows that are left."""
        sequences, last = Sequences(model, prompt, results), self.owner.stages[-1]
        short = self.reader.short if self.reader is not None else ""
        for number, stage in enumerate(self.entering):
            units = self._units(stage, sequences.prompt, config)
            if units:
                needs = needs_of(sequences.prompt, stage.method, model, True, short)
                asks = Need.QUESTION in needs
                clip = self.owner.clip_sides(sequences.prompt, self.base()) if asks else None
                sequences.reduce(stage.method, units, needs, clip, number > 0, stage is last)
            if stage.method.acts_inside and len(self.owner.stages) > 1:
                sequences.prompt = sequences.prompt._replace(
                    images=numbered(sequences.prompt.images, prompt.left), tiles=list(prompt.later)
                )
        left = getattr(config, "tokenizer_padding_side", "right") == "left"
        sequences.align(left, getattr(config, LIMIT, None), self.layers is not None)
        return sequences.results(), sequences.prompt, sequences.report, sequences.after

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
        restored = super().end(decoder, args, kwargs, output)
        cache = cache_in(output) if after is not None else None
        if cache is not None:
            setattr(cache, AFTER, after)
        return restored


def layers_of(decoder: Any, method: Method) -> Layers:
    """The layers of a decoder, on any version."""
    return PinnedLayers(decoder, method) if OLD else Layers(decoder, method)


def _skip_unread(owner: Any, plain: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
    """Forward of a block that nothing reads."""
    if not getattr(owner.entrance.local, "encoding", False):
        return plain(hidden, *args, **kwargs)
    return (hidden,) if OLD else hidden


@uncompiled
def _forward(owner: Any, *args: Any, **kwargs: Any) -> Any:
    """The decoder's own forward, kept out of compiled graphs, in which hooks are traced once and for all."""
    decoder = owner.entrance.running.get_model()
    return type(decoder).forward(decoder, *args, **kwargs)


@uncompiled
def _prepare(owner: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Takes the place of LLaVA's function."""
    results: tuple[Any, ...] = owner.entrance.called(*args, **kwargs)
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
