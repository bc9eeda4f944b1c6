"""The entrance of the language model: hooks by which rows leave, while `generate` and every `forward` stay as they are.

    model      pre-hook    notes rows of the answer
    base       pre-hook    notes ids and the mask; in later steps on a shortened cache, shortens 2D masks
    encoders   wrapped     tensors recorded in the tower travel on the output
    decoder    pre-hook    chooses tokens, and gathers the rows that stay in every argument with a row axis
    decoder    post-hook   puts the last states back to full length, and stores a `Book` in the cache

Everything outside of the decoder sees the prompt that the user passed.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts.arguments import LATER_TURN, Pass, State, compact, held_masks, joined_outcomes, leave
from llava_consensus.hosts.before_tower import BeforeTower, numbered, tiles_left, units_left, whole_tiles
from llava_consensus.hosts.environment import STOCK
from llava_consensus.hosts.images import (
    MODALITIES,
    Image,
    Integers,
    base_of,
    clip_of,
    decoder_of,
    family_of,
    images_of,
    kind_of,
    most_tiles,
    on_grid,
    packed_whole,
    parts_of,
    with_class,
)
from llava_consensus.hosts.inputs import KEPT, Inputs, check_finite, needs_of
from llava_consensus.hosts.kernels import OLD, KernelCall, first_attention, forget_graphs, skip_in_probe, uncompiled
from llava_consensus.hosts.layers import Layers, later_step, runs_again
from llava_consensus.hosts.outcomes import Report, reduced, unchanged
from llava_consensus.hosts.prefill import Prefill
from llava_consensus.hosts.prompts import (
    Forward,
    Prompt,
    ids_of,
    prompt_of,
    question_rows,
    read_prompt,
    split_packed,
    waiting_records,
    with_images,
)
from llava_consensus.hosts.rows import Book, Hold, by_name, cached_rows, held_in, reduced_rows, shorten, spread_rows
from llava_consensus.hosts.tower import READ, RECORD, Learnt, Tiles, Tower, argument_names, records_of
from llava_consensus.hosts.units import Unit, units_of
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.tokens import Need

UNRECORDED = (
    "mm_encoder_outputs: images that were encoded before the method was attached are not reduced. Pass pixels, or "
    "encode them with the method attached"
)
ENCODING = "_maybe_prepare_encoder_kwargs_for_generation"  # the step of `generate` that encodes images
_NUMBERS = itertools.count(1)
# facts found out about towers, by the module with `get_image_features`
_LEARNT: "weakref.WeakKeyDictionary[nn.Module, Learnt]" = weakref.WeakKeyDictionary()


class Entrance:
    """The hooks of one attachment.

    Args:
        owner: the attachment.
        model: a model of transformers.
        options: of its family (`HostEntry.options`).
    """

    cache_axis = 2  # of rows in the keys of its cache
    inputs, state = Inputs, State  # classes of the inputs of its methods, and of its notes
    first_attention: Callable[..., KernelCall] = staticmethod(first_attention)  # that SCAP reads
    before: Any = None  # a method before the projector
    layers: Layers | None = None  # for a method between layers

    def __init__(self, owner: Any, model: Any, options: Mapping[str, str]) -> None:
        base = base_of(model)
        decoder = decoder_of(model)
        if base is None or decoder is None:
            raise OptionError(
                f"model of class {type(model).__name__} encodes no images in a step of their own (get_image_features)"
            )
        self.family = family_of(model.config)
        self.start(owner, model)
        self.fixed = options.get("layout", STOCK) != STOCK  # whether every image has the same grid of tiles
        methods: list[Method] = [stage.method for stage in owner._stages]
        reader = next((method for method in methods if method.needs & READ), methods[0])
        self.tower = Tower(base, decoder, reader, _LEARNT.setdefault(base, Learnt({}, {}, {})))
        self.skipped = self.tower.unread(base, decoder) if self.family.projects else []
        if methods[-1].place is Place.DECODER:
            self.layers = Layers(decoder, methods[-1])
        if methods[0].acts_inside:
            self.before = BeforeTower(base, kind_of(base.config), methods[0], owner._stages[0].budget)
        self.names = argument_names(type(base).forward)[1:]
        self.outer = argument_names(type(model).forward)[1:]
        self.inner = argument_names(type(decoder).forward)[1:]

    def start(self, owner: Any, model: Any) -> None:
        self.owner, self.local, self.model = owner, self.state(), weakref.ref(model)
        self.entering = [stage for stage in owner._stages if stage.method.place is not Place.DECODER]
        self.number = next(_NUMBERS)
        self.open = False  # whether new prompts are reduced
        self.hold: Hold | None = None  # the hooks, as long as they are
        self.held: Callable[[], Hold | None] = lambda: None  # a weak reference to them

    def base(self) -> Any:
        return base_of(self.model())

    @property
    def clip_name(self) -> str:
        return clip_of(self.model().config)  # type: ignore[union-attr]

    def replaced(self, model: Any) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Functions that the model has while methods are attached: an object, a name, and the function in its place."""
        base = base_of(model)
        for block in self.unread(model):
            yield block, "forward", partial(self.skip_unread, block.forward)
        if self.fixed:
            yield base, "pack_image_features", partial(packed_whole, type(base).pack_image_features, base)
        if self.before is not None or self.family.projects:
            yield model, ENCODING, partial(self.note_prompt, model)
        for modality in MODALITIES:
            name = f"get_{modality}_features"
            plain = getattr(type(base), name, None)
            if plain is not None:
                yield base, name, functools.wraps(plain)(partial(self.encode, name, modality))

    def unread(self, model: Any) -> list[Any]:
        """Blocks of the tower after the last one that the projector or a method reads."""
        return [base_of(model).get_submodule(name) for name in self.skipped]

    def skip_unread(self, plain: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.local.skips:
            return plain(hidden, *args, **kwargs)
        return (hidden,) if OLD else hidden

    def install(self) -> None:
        self.open = True
        # those that stayed for a shortened cache: a second set would act twice
        self.hold = self.held() or Hold(self.register())
        self.held = weakref.ref(self.hold)
        for target, name, function in self.replaced(self.model()):
            object.__setattr__(target, name, function)
        if self.before is not None:
            self.before.install()
        forget_graphs()

    def register(self) -> list[Any]:
        model: Any = self.model()
        base, decoder = self.base(), decoder_of(model)
        probes = any(Need.PROBE in stage.method.needs for stage in self.owner._stages)
        return [
            model.register_forward_pre_hook(self.note_answer, with_kwargs=True),
            base.register_forward_pre_hook(self.enter, with_kwargs=True),
            decoder.register_forward_pre_hook(self.begin, with_kwargs=True),
            decoder.register_forward_hook(self.end, with_kwargs=True),
            *(skip_in_probe(decoder) if probes else ()),
        ]

    def remove(self) -> None:
        """From now on new prompts are read whole. Hooks stay as long as a shortened cache does, which needs them."""
        self.open, model = False, self.model()
        if self.before is not None:
            self.before.remove()
        for target, name, _ in self.replaced(model) if model is not None else ():
            function = vars(target).pop(name, None)
            plain = function.args[0] if isinstance(function, partial) and name == "forward" else None
            if plain is not None and getattr(plain, "__func__", None) is not type(target).forward:
                object.__setattr__(target, name, plain)  # of a block that is offloaded
        self._disarm()
        self.hold = None
        forget_graphs()

    def _stay(self) -> bool:
        """Keeps the hooks until this forward ends; False if another thread has removed them meanwhile."""
        self.local.hold = self.held()
        return self.local.hold is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Entrance":
        from copy import deepcopy

        copied = object.__new__(type(self))
        memo[id(self)] = copied
        for name, value in vars(self).items():
            if name == "model":
                copied.__dict__[name] = weakref.ref(memo.get(id(value()), value()))
            elif name in ("owner", "before"):
                copied.__dict__[name] = deepcopy(value, memo)
            else:
                copied.__dict__[name] = value
        copied.local, hold = self.state(), self.held()
        if hold is not None:
            copied.hold = Hold(deepcopy(hold.handles, memo))
            copied.held = weakref.ref(copied.hold)
        return copied

    # The entrance of the model

    @uncompiled
    def note_answer(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes rows that are no part of the question: the answer in training, which has labels, and guesses of
        assisted decoding, whose logits are kept.
        """
        given = by_name(self.outer, args, kwargs)
        keep = given.get("logits_to_keep")
        self.local.labels, self.local.guesses = given.get("labels"), keep - 1 if isinstance(keep, int) and keep else 0

    def note_prompt(self, model: Any, prompt: Tensor, *args: Any, **options: Any) -> Any:
        """Takes the place of the step in which `generate` encodes images: notes the ids that `before` needs."""
        ids = None
        if self.before is not None:
            ids = (prompt if prompt.ndim == 2 else ids_of(self.base(), prompt)).cpu().numpy()
        with self.noting(ids=ids, generates=True):
            return getattr(type(model), ENCODING)(model, prompt, *args, **options)

    @contextmanager
    def noting(self, **values: Any) -> Iterator[None]:
        """Notes this for the hooks that run in the body (`State`)."""
        vars(self.local).update(values)
        try:
            yield
        finally:
            for name in values:
                vars(self.local).pop(name, None)

    def showing(self, ids: Integers) -> AbstractContextManager[None]:
        """Images that are encoded in the body are those of these prompts [R, S]."""
        return self.noting(ids=ids)

    @uncompiled
    def enter(self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kwargs = by_name(self.names, args, kwargs)
        self.local.forward, (cache, book) = None, held_in(kwargs)
        if book is not None and book.owner == self.number:
            kwargs.update(held_masks(kwargs, cache, book))
        mask = kwargs.get("attention_mask")
        self.local.mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        outputs = kwargs.get("mm_encoder_outputs") or {}
        given = {name: records_of(value) for name, value in outputs.items() if hasattr(value, RECORD)}
        waiting, self.local.waiting = self.local.waiting, {}
        if len(given) < len(outputs) and self.open and any(stage.method.reduces for stage in self.owner._stages):
            given |= waiting_records(outputs, waiting)
            if not waiting:
                self.owner._warn(UNRECORDED)
        shows = given or any("pixel_values" in name and value is not None for name, value in kwargs.items())
        if shows and self.open:
            model = self.model()
            pack = split_packed(kwargs, cache, decoder_of(model).config, base is model)
            self.local.forward = Forward(base, *read_prompt(base, kwargs, cache), pack, given)
        return (), kwargs

    @uncompiled
    def encode(self, name: str, modality: str, *args: Any, **inputs: Any) -> Any:
        forward = self.local.forward
        base: Any = self.base() if forward is None else forward.base
        straight, plain = self._straight(modality), getattr(type(base), name).__get__(base)
        inputs = by_name(argument_names(plain.__func__)[1:], args, inputs)
        if self.fixed and modality == "image":
            inputs = on_grid(base.config, inputs)
        ids = self.local.ids if forward is None else forward.ids
        ours = forward is not None or self.local.generates  # another caller may read the last states
        with self.noting(skips=ours and straight and self.tower.reads_as_named(inputs, base.config)):
            if self.before is None or ids is None or getattr(self.tower.busy, "on", False):
                output = self.tower.encode(plain, base, self.family.mapped, not straight, **inputs)
            else:
                output = self.before.encode(self.tower, plain, base, modality, ids, not straight, inputs)
        if not hasattr(output, RECORD):  # an encoder of videos calls the one of images
            return output
        if forward is not None:
            forward.encoded[modality] = records_of(output)
        else:
            self.local.waiting = {**self.local.waiting, modality: records_of(output)}
        return output

    def _straight(self, modality: str) -> bool:
        return self.family.projects and (modality == "image" or self.family.video is with_class)

    # The entrance of the decoder

    @uncompiled
    def begin(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reduces a prompt with images. Later steps get positions and masks that fit the cache."""
        self._disarm()
        forward, self.local.forward = self.local.forward, None
        labels, self.local.labels = self.local.labels, None
        self.local.pack = None if forward is None else forward.pack
        kwargs = by_name(self.inner, args, kwargs)
        if forward is not None and forward.base is decoder and kwargs.get("inputs_embeds") is None:
            self.local.forward = forward  # for `encode`
            kwargs, self.local.forward = with_images(decoder, kwargs), None
        cache, book = held_in(kwargs)
        self._open(cache, book)
        if forward is None or not forward.encoded:
            if self.open and book is None and (cache is None or not int(cache.get_seq_length())):
                self.owner._tell_plain()  # a prompt without images
            return (), self._step(decoder, kwargs, book, cache)
        if not self._stay():
            return (), kwargs
        prompt, short = self._prompt(forward, labels)
        run = Pass(decoder, forward.base, prompt, kwargs, cache, book, short, self.local.mask)
        self._enter(run)
        if run.rows is None:
            run.kwargs = self._step(decoder, kwargs, book, cache)
        self._between(run)
        return (), run.kwargs

    def _open(self, cache: Any, book: Book | None) -> bool:
        """Lets this forward continue a cache if these hooks filled it, and says so."""
        own = book is not None and book.owner == self.number
        if own:
            cache.reduction_open = True
        return own

    def _prompt(self, forward: Forward, labels: Tensor | None) -> tuple[Prompt, str]:
        """The prompts with the tensors recorded for their images, and why attention to be read is absent."""
        model: Any = self.model()
        images: list[Image] = []
        tiles: list[Tiles] = []
        encoded: list[dict[str, Any]] = []
        left: list[Any] = []
        later: list[Tiles] = []
        short, most = "", 1
        for modality, record, own, beams in images_of(forward.base, model.config, forward.encoded, forward.ids):
            straight = self._straight(modality)
            fewer = record.left
            if not fewer and self.tower.reads and not straight and None in self.tower.map(record, own)[0]:
                own = [part for image in own for part in parts_of(image)]
            if self.family.mapped and not straight:
                maps, _ = self.tower.map(record, own)
                own = [
                    image
                    if mapped is None
                    else image._replace(tile=mapped.tile, token=mapped.token, tiles=mapped.tiles)
                    for image, mapped in zip(own, maps, strict=True)
                ]
            next_read: list[Tiles] = []
            if fewer:
                read, why = [whole_tiles(*of) for of in zip(own, fewer.images, strict=True)], ""
                if len(self.owner._stages) > 1:
                    next_read, why = tiles_left(self.tower, fewer, own, straight, not self.family.mapped)
            else:
                read, why = self.tower.tiles(record, own, straight, not self.family.mapped)
            left += (fewer.images if fewer else [None] * len(own)) * beams
            later += (next_read or read) * beams
            short, most = short or why, max(most, beams)
            images += [image._replace(row=image.row * beams + beam) for beam in range(beams) for image in own]
            tiles, encoded = tiles + read * beams, encoded + [record.inputs] * (len(own) * beams)
        asks = question_rows(self.owner, forward, labels, self.local.guesses, images)
        prompt = prompt_of(forward.ids, forward.real, asks, images, tiles, encoded, model.config)
        return prompt._replace(beams=most, left=left, later=later), short

    def _enter(self, run: Pass) -> None:
        """The methods at the entrance, one after the other."""
        owner, whole = self.owner, run.whole
        for stage in self.entering:
            inside = stage.method.acts_inside
            if inside:
                units = units_left(whole.images, whole.left)
            else:
                units = units_of(run.prompt.images, owner._budgets(stage, run.prompt), stage.method, self.most_tiles())
            if units:
                self._at_entrance(run, stage, units)
            if inside and len(owner._stages) > 1:
                images = numbered(run.prompt.images, whole.left)
                run.prompt = run.prompt._replace(images=images, tiles=list(whole.later))

    def most_tiles(self) -> int:
        return most_tiles(self.model())

    def projector(self, base: Any) -> Any:
        """The projector, if it takes patches one by one."""
        return base.multi_modal_projector if self.family.projects else None

    def read_probe(self, inputs: Inputs, run: Pass) -> None:
        inputs.read_probe(run.decoder, run.kwargs, self.first_attention)

    def _at_entrance(self, run: Pass, stage: Any, units: list[Unit]) -> None:
        """Units through the method, and the arguments of the decoder without the rows that leave."""
        model, prompt, embeds, method = self.model(), run.prompt, run.kwargs["inputs_embeds"], stage.method
        projector = self.projector(run.base)
        try:
            needs = needs_of(prompt, method, model, projector is not None, run.short)
        except OptionError:
            check_finite(prompt, embeds)
            raise
        clip = self.owner._clip_sides(prompt, run.base) if Need.QUESTION in needs else None
        inputs = self.inputs(prompt, embeds, method, needs, projector, clip)
        self.read_probe(inputs, run)
        groups = inputs.reduce(units)
        drops = [method.newlines == "drop" and not image.video for image in prompt.images]
        with inputs.watch.time("splice"):
            rows, pool = reduced_rows(embeds, prompt.real, prompt.images, groups, method, drops)
            leave(run, rows, pool, method)
        positions = run.kwargs.get("position_ids")
        axes = isinstance(positions, Tensor) and positions.ndim > 2 and method.positions == "renumber"
        outcomes, notes = reduced(unchanged(prompt.images, prompt.beams), groups, drops), inputs.notes + (KEPT,) * axes
        if stage is not self.owner._stages[0]:
            outcomes = joined_outcomes(run.report.outcomes, dict(enumerate(outcomes)), True)
            notes = run.report.notes + notes
        run.report = Report(outcomes, notes, inputs.watch)
        if stage is not self.owner._stages[-1]:
            run.prompt = compact(prompt, rows, model.config)  # type: ignore[union-attr]

    def _between(self, run: Pass) -> None:
        """Arms the hooks between layers for prompts whose images they cut, and reports the rows that have left."""
        if self.layers is not None:
            self._arm(run, self.layers)
        prompt = run.prompt
        run.reported = [number for number, image in enumerate(prompt.images) if image.row % prompt.beams == 0]
        self.owner._tell(replace(run.report, outcomes=[run.report.outcomes[number] for number in run.reported]))
        self.local.run = run

    def _arm(self, run: Pass, layers: Layers) -> None:
        stage, prompt, embeds = self.owner._stages[-1], run.prompt, run.kwargs["inputs_embeds"]
        outcomes = [outcome._replace(entering=(outcome.after,) * layers.count) for outcome in run.report.outcomes]
        run.report = replace(run.report, outcomes=outcomes)
        units = units_of(prompt.images, self.owner._budgets(stage, prompt), stage.method)
        if not units:
            return
        if cached_rows(run.cache):
            raise OptionError(LATER_TURN)
        inputs = None
        if stage.method.needs:
            projector = self.projector(run.base)
            needs = needs_of(prompt, stage.method, self.model(), projector is not None, run.short)
            inputs = Inputs(prompt, embeds, stage.method, needs, projector)
        run.prefill = self.local.armed = Prefill(layers, run.decoder, prompt, units, inputs, run.kwargs)
        run.prefill.arm(range(layers.count), True)
        run.report = replace(run.report, watch=run.report.watch or run.prefill.watch)

    def _step(self, decoder: Any, kwargs: dict[str, Any], book: Book | None, cache: Any) -> dict[str, Any]:
        """Rows behind a shortened prompt: positions continue from its length, layers of own lengths get own masks."""
        if book is None or book.owner != self.number:  # hooks of a detached method continue from its own caches
            return kwargs
        kwargs, self.local.armed = later_step(self.layers, decoder, kwargs, book, cache, self.local.mask)
        return kwargs

    # Behind the decoder

    @uncompiled
    def end(self, decoder: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """The last states at full length; the cache gets its `Book`."""
        hold, self.local.hold = self.local.hold, None
        self._restore(decoder, kwargs, output)
        del hold  # from here on the cache holds the hooks
        pack, self.local.pack = self.local.pack, None
        if pack is not None:
            output["last_hidden_state"] = pack.join(output["last_hidden_state"])
        return output

    def _restore(self, decoder: nn.Module, kwargs: dict[str, Any], output: Any) -> None:
        run, self.local.run = self.local.run, None
        held, book = held_in(kwargs)
        if book is not None:
            held.reduction_open = False
        if self.local.armed is not None and not (run and run.prefill and runs_again(decoder)):
            self._disarm()
        if run is None or (run.rows is None and run.prefill is None):
            return
        cache = held_in(output)[0] if run.cache is None else run.cache
        book, states = run.book, output["last_hidden_state"]
        if run.prefill is not None:
            run.prefill.replays = True
            later = run.prefill.outcomes(states)
            self.owner._finish({new: later[old] for new, old in enumerate(run.reported) if old in later})
            book = run.prefill.finish(book)
        if cache is not None and book is not None:
            self._keep(cache, book._replace(owner=self.number))
        if run.rows is not None:
            output["last_hidden_state"] = spread_rows(states, run.rows)

    def _keep(self, cache: Any, book: Book) -> None:
        if hasattr(cache, "layers"):
            shorten(cache, book, self.held())

    def _disarm(self) -> None:
        armed, self.local.armed = self.local.armed, None
        self.local.run = self.local.hold = None  # of a forward pass that ended in an error
        if armed is not None:
            armed.disarm()
