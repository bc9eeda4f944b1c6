"""Models whose decoder reads encoded images by cross attention, so that no row of its own sequence is of an image.

    exit       the image encoder gives fewer rows (BLIP, TrOCR, Idefics, Pix2Struct)
    argument   the decoder is given the images of a prompt and a mask over them (Llama 3.2 Vision)
    sequence   a text encoder reads images among words and gives fewer rows (Florence-2, T5Gemma 2)

Rows leave there, once for each image. `generate` stays as it is: cross attention has no positions, and caches the rows
it was given. Masks that are made for all rows are cut to those that are left.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts.entrance import ENCODING, Entrance
from llava_consensus.hosts.facts import Facts
from llava_consensus.hosts.images import Call, Image, Integers, placeholder_of, runs
from llava_consensus.hosts.inputs import Inputs, Prompt
from llava_consensus.hosts.prompts import ids_of
from llava_consensus.hosts.rows import (
    Hold,
    Pool,
    Rows,
    cache_in,
    cached_rows,
    drop_rows,
    gather,
    is_static,
    reduced_rows,
)
from llava_consensus.hosts.tower import Tiles, argument_names
from llava_consensus.hosts.units import Report, reduced, unchanged, units_of
from llava_consensus.reduction.method import Place

HELD = "_reduction_rows"  # attribute of a cache: the number of the entrance, and the rows that its images have left


class Side(NamedTuple):
    """Where the rows of images leave a model."""

    exits: tuple[str, ...] = ()  # modules whose output the decoder reads, the first of these that a model has
    field: str = "last_hidden_state"  # of that output
    argument: str = ""  # module that is given `cross_attention_states`
    sequence: str = ""  # text encoder
    masked: str = ""  # decoder that is given an `encoder_attention_mask` for all rows


SIDES = {
    "blip": Side(("vision_model",)),
    "vision-encoder-decoder": Side(("encoder",)),
    "idefics": Side(("model.perceiver_resampler", "model.vision_model")),
    "pp_formulanet": Side(("model.encoder",), "pooler_output"),
    "pix2struct": Side(("encoder",), masked="decoder"),
    "mllama": Side(argument="model.language_model"),
    "florence2": Side(sequence="model.language_model.encoder", masked="model.language_model.decoder"),
    "t5gemma2": Side(sequence="model.encoder.text_model", masked="model.decoder"),
}


class CrossFacts(Facts):
    entrance = "llava_consensus.hosts.cross_attention:CrossEntrance"


class CrossEntrance(Entrance):
    """The hooks of one attachment.

    Raises:
        OptionError: for a method that reads more than the rows, or acts elsewhere.
    """

    clip_name = ""

    def __init__(self, owner: Any, model: Any, options: Mapping[str, str]) -> None:
        self.start(owner, model)
        self.side, self.layers = SIDES[model.config.model_type], None
        method, name = owner.method, type(owner.method).__name__
        if len(owner._stages) > 1 or method.needs or method.place is not Place.TOKENS or method.adaptive:
            raise OptionError(
                f"{name} on {type(model).__name__}: its decoder reads images by cross attention, and a method can read "
                "their rows only, and leave a fixed number of them. Take one like that (divprune, otprune)"
            )
        if method.by_grid or (self.side.sequence and method.positions != "renumber"):
            what = "the grid of an image" if method.by_grid else f"positions={method.positions}"
            raise OptionError(f"{name}: {what} is not known on {type(model).__name__}. Take divprune or otprune")
        self.outer = argument_names(type(model).forward)[1:]

    def base(self) -> Any:
        return self.model()

    def install(self) -> None:
        self.hook()
        if self.side.masked:
            model: Any = self.model()
            setattr(model, ENCODING, partial(self.note_encoded, model))

    def register(self) -> list[Any]:
        model: Any = self.model()
        side, modules = self.side, dict(model.named_modules())
        hooks = [model.register_forward_pre_hook(self.note, with_kwargs=True)]
        if side.exits:
            source = next(modules[name] for name in side.exits if name in modules)
            hooks.append(source.register_forward_hook(self.leave, with_kwargs=True))
        if side.argument:
            hooks.append(modules[side.argument].register_forward_pre_hook(self.shorten, with_kwargs=True))
            hooks.append(modules[side.argument].register_forward_hook(self.keep))
        if side.sequence:
            hooks.append(modules[side.sequence].register_forward_pre_hook(self.join, with_kwargs=True))
        if side.masked:
            hooks.append(modules[side.masked].register_forward_pre_hook(self.fit, with_kwargs=True))
        return hooks

    def remove(self) -> None:
        self.open, model = False, self.model()
        if model is not None and self.side.masked:
            vars(model).pop(ENCODING, None)
        self._leave()

    # Around

    def note(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes the ids of the sequence that an encoder is about to read."""
        given = {**dict(zip(self.outer, args, strict=False)), **kwargs}
        prompt = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        self.local.rows, self.local.ids = None, self._ids(prompt)

    def note_encoded(self, model: Any, prompt: Tensor, model_kwargs: dict[str, Any], *args: Any, **more: Any) -> Any:
        """Takes the place of the step in which `generate` runs the encoder: its mask is cut to the rows it gave."""
        self.local.rows, self.local.ids = None, self._ids(prompt)
        found = getattr(type(model), ENCODING)(model, prompt, model_kwargs, *args, **more)
        rows, self.local.rows, self.local.ids = self.local.rows, None, None
        if rows is not None and isinstance(found.get("attention_mask"), Tensor):
            found["attention_mask"] = cut_mask(found["attention_mask"], rows)
        return found

    def _ids(self, prompt: Any) -> Integers | None:
        if not self.side.sequence or prompt is None or not self.open:
            return None
        ids: Integers = (prompt if prompt.ndim == 2 else ids_of(self.model(), prompt)).cpu().numpy()
        return ids

    # Where rows leave

    def reduce(self, states: Tensor, real: NDArray[np.bool_], images: list[Image]) -> tuple[Rows, Pool] | None:
        """The rows of images that are left of states [R, N, D], of which `real` are read; None if all are."""
        owner, stage = self.owner, self.owner._stages[0]
        none: Any = np.zeros(0, dtype=np.int64)
        tiles = [Tiles(image.tiles, int(image.token.max()) + 1, 0, {}) for image in images]
        ids, text = np.zeros(real.shape, dtype=np.int64), [none] * len(images)
        prompt = Prompt(ids, real, real, images, tiles, [{} for _ in images], text)
        units = units_of(images, owner._budgets(stage, prompt), stage.method)
        if not units:
            owner._tell(Report(unchanged(images)))
            return None
        inputs = Inputs(prompt, states, stage.method, frozenset())
        groups, drops = inputs.reduce(units), [False] * len(images)
        with inputs.watch.time("splice"):
            found = reduced_rows(states, real, images, groups, stage.method, drops)
        owner._tell(Report(reduced(unchanged(images), groups, drops), (), inputs.watch))
        return found

    def leave(self, source: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Behind an image encoder. A decoder step that asks it again with the same input gets the same rows."""
        whole = output
        if not isinstance(output, Tensor):
            whole = output[0] if isinstance(output, tuple) else output[self.side.field]
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        known = getattr(first, HELD, None)
        if known is None or known[0] != self.number:
            real, mask = np.ones(whole.shape[:2], dtype=bool), kwargs.get("attention_mask")
            if self.side.masked and mask is not None:
                real = mask.cpu().numpy().astype(bool)
            found = self.reduce(whole, real, [one_image(row, np.flatnonzero(own)) for row, own in enumerate(real)])
            known = self.number, found and found[0], whole if found is None else taken(whole, *found)
            if isinstance(output, Tensor):  # of a resampler, which Idefics asks in every step
                setattr(first, HELD, known)
        self.local.rows, states = known[1], known[2]
        if isinstance(output, Tensor):
            return states
        if isinstance(output, tuple):
            return (states, *output[1:])
        output[self.side.field] = states
        return output

    def join(self, encoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """At the entrance of a text encoder, whose rows are of words and images."""
        ids, embeds = getattr(self.local, "ids", None), kwargs.get("inputs_embeds")
        model: Any = self.model()
        if ids is None or embeds is None or ids.shape != embeds.shape[:2] or not self.open:
            return None
        here = ids == placeholder_of(model.config, "image")
        if not here.any():
            self.owner._tell_plain()
            return None
        spans = runs(Call(model, {}, ids, here, "image", embeds))
        images = [one_image(row, np.arange(start, start + length)) for row, start, length in spans]
        found = self.reduce(embeds, np.ones(ids.shape, dtype=bool), images)
        if found is None:
            return None
        rows, pool = found
        if rows.padded:
            raise OptionError("the prompts of a batch lose different numbers of rows: read them one at a time")
        self.local.rows = rows
        return args, {**drop_rows(kwargs, rows), "inputs_embeds": taken(embeds, rows, pool)}

    def fit(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Cuts a mask over all rows of an encoder to those that are left."""
        states, mask = kwargs.get("encoder_hidden_states"), kwargs.get("encoder_attention_mask")
        if states is None or not isinstance(mask, Tensor) or mask.shape[-1] == states.shape[1]:
            return None
        rows = getattr(self.local, "rows", None)
        if rows is None or rows.size != mask.shape[-1]:
            raise OptionError(
                f"attention_mask has {mask.shape[-1]} columns, and encoder_outputs {states.shape[1]} rows: images that "
                "were encoded apart are reduced already. Pass the mask of their rows"
            )
        return args, {**kwargs, "encoder_attention_mask": cut_mask(mask, rows)}

    def shorten(self, decoder: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """At a decoder that is given the tiles of all images, which it caches, and a mask over them in each step."""
        states, mask, cache = kwargs.get("cross_attention_states"), kwargs.get("cross_attention_mask"), cache_in(kwargs)
        self.local.rows = None
        if states is None:
            number, rows = getattr(cache, HELD, (0, None))
            if rows is None or number != self.number or mask is None:
                return None
            return args, {**kwargs, "cross_attention_mask": cut_mask(mask, rows)}
        if not self.open:
            return None
        if is_static(cache) or cached_rows(cache):
            raise OptionError(
                "past_key_values: rows of images leave before they are cached, from whole prompts, and a static cache "
                "has no other length. Pass the whole conversation, and leave cache_implementation out"
            )
        prompts = next(kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
        patches, whole = states.shape[-2], states.reshape(len(prompts), -1, states.shape[-1])
        real = np.ones(whole.shape[:2], dtype=bool)
        if mask is not None:  # text in front of an image sees all of it or none
            seen = (mask == 0) & (kwargs["full_text_row_masked_out_mask"] != 0)
            real = seen.any(2)[:, 0].cpu().numpy()
        each = patches * self.model().config.vision_config.max_num_tiles  # type: ignore[union-attr]
        images = [
            Image(row, places, tile, places % patches, int(tile.max()) + 1, False, 0)
            for row in range(len(real))
            for start in range(0, real.shape[1], each)
            for places in [start + np.flatnonzero(real[row, start : start + each])]
            if len(places)
            for tile in [(places - start) // patches]
        ]
        found = self.reduce(whole, real, images)
        if found is None:
            return None
        rows, pool = found
        if mask is None and rows.padded:
            mask = whole.new_zeros(len(prompts), 1, prompts.shape[1], rows.size)
        self.local.rows = rows
        new = {"cross_attention_states": taken(whole, rows, pool), "cross_attention_mask": mask}
        return args, {**kwargs, **new, **({} if mask is None else {"cross_attention_mask": cut_mask(mask, rows)})}

    def keep(self, decoder: nn.Module, args: Any, output: Any) -> None:
        """Behind that decoder: notes in the cache which rows of images it has."""
        rows, self.local.rows = self.local.rows, None
        cache = cache_in(output)
        if rows is not None and cache is not None:
            setattr(cache, HELD, (self.number, rows))
            cache.reduction_hold = Hold(self)


def one_image(row: int, places: Integers) -> Image:
    return Image(row, places, np.zeros_like(places), np.arange(len(places)), 1, False, 0)


def taken(states: Tensor, rows: Rows, pool: Pool) -> Tensor:
    """The rows [R, W, D] that are left of states [R, N, D]."""
    return pool.take(states, [group.reduction.tokens for group in pool.groups])


def cut_mask(mask: Tensor, rows: Rows) -> Tensor:
    """A mask [R, N], or one of numbers to add [R, 1, S, N], for the rows that are left."""
    times = len(mask) // len(rows.index)  # beams
    index, shown = (value.repeat_interleave(times, 0) for value in (rows.index, rows.shown))
    if mask.ndim == 2:
        return gather(mask, index, 1) * shown
    new = mask.gather(3, index[:, None, None].expand(-1, *mask.shape[1:3], -1))
    return new.masked_fill(~shown[:, None, None], torch.finfo(mask.dtype).min)
