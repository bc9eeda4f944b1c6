"""Models whose decoder reads encoded images by cross attention, so that no row of the decoder is of an image.

    leave     behind an image encoder (BLIP, TrOCR, Idefics, Pix2Struct)
    join      at the entrance of a text encoder, which reads images among words (Florence-2, T5Gemma 2)
    shorten   at the entrance of a decoder that is given all images of a prompt (Llama 3.2 Vision)

Rows leave there, and `generate` stays as it is: cross attention has no positions, and caches the rows it is given. Only
masks that were made for all rows are cut to those that are left.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts.entrance import ENCODING, Entrance
from llava_consensus.hosts.environment import SIDES
from llava_consensus.hosts.facts import Facts
from llava_consensus.hosts.images import Call, Image, one_image, placeholder_of, runs
from llava_consensus.hosts.inputs import Inputs
from llava_consensus.hosts.kernels import uncompiled
from llava_consensus.hosts.outcomes import Report, reduced, unchanged
from llava_consensus.hosts.prompts import Prompt, ids_of
from llava_consensus.hosts.rows import Rows, cache_in, cached_rows, drop_rows, gather, is_static, reduced_rows
from llava_consensus.hosts.tower import Tiles, argument_names
from llava_consensus.hosts.units import units_of
from llava_consensus.reduction.method import Place

HELD = "_reduction_rows"  # attribute of a cache: the number of the entrance, and the rows that its images have left


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
        self.side, self.outer = SIDES[model.config.model_type], argument_names(type(model).forward)[1:]
        method, name = owner.method, f"{type(owner.method).__name__} on {type(model).__name__}"
        if len(owner._stages) > 1 or method.needs or method.place is not Place.TOKENS or method.adaptive:
            raise OptionError(
                f"{name}: its decoder reads images by cross attention, and a method can read their rows only, and "
                "leave a fixed number of them. Take one like that (divprune, otprune)"
            )
        if method.by_grid or ("join" in self.side and method.positions != "renumber"):
            what = "the grid of an image" if method.by_grid else f"positions={method.positions}"
            raise OptionError(f"{name}: {what} is not known. Take divprune or otprune")

    def replaced(self, model: Any) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        if "fit" in self.side:
            yield model, ENCODING, partial(self.note_encoded, model)

    def register(self) -> list[Any]:
        model: Any = self.model()
        modules, hooks = dict(model.named_modules()), [model.register_forward_pre_hook(self.note, with_kwargs=True)]
        for act, names in self.side.items():
            module = next(modules[name] for name in names.split() if name in modules)
            before = module.register_forward_hook if act == "leave" else module.register_forward_pre_hook
            hooks.append(before(getattr(self, act), with_kwargs=True))
            if act == "shorten":
                hooks.append(module.register_forward_hook(self.keep))
        return hooks

    @uncompiled
    def note(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip(self.outer, args, strict=False)), **kwargs}
        prompt = given.get("input_ids")
        self._begin(given.get("inputs_embeds") if prompt is None else prompt)

    def _begin(self, prompt: Tensor | None) -> None:
        """Notes the ids of a sequence that a text encoder is about to read."""
        self.local.rows = self.local.ids = None
        if "join" in self.side and prompt is not None:
            self.local.ids = (prompt if prompt.ndim == 2 else ids_of(self.model(), prompt)).cpu().numpy()

    def note_encoded(self, model: Any, prompt: Tensor, *args: Any, **more: Any) -> Any:
        """Takes the place of the step in which `generate` runs the encoder: its mask is cut to the rows it gave."""
        self._begin(prompt)
        found = getattr(type(model), ENCODING)(model, prompt, *args, **more)
        if self.local.rows is not None and isinstance(found.get("attention_mask"), Tensor):
            found["attention_mask"] = cut_mask(found["attention_mask"], self.local.rows)
        return found

    def reduce(self, states: Tensor, real: NDArray[np.bool_], images: list[Image]) -> tuple[Rows | None, Tensor]:
        """The rows that are left of states [R, N, D], of which `real` are read, and their states; None if all are. With
        beams, an image that the model encodes for each of them is reduced, and reported, as often.
        """
        stage, none = self.owner._stages[0], np.zeros(0, dtype=np.int64)
        tiles = [Tiles(image.tiles, int(image.token.max()) + 1, 0, {}) for image in images]
        ids, every = np.zeros(real.shape, dtype=np.int64), len(images)
        prompt = Prompt(ids, real, real, images, tiles, [{}] * every, [none] * every)
        inputs = Inputs(prompt, states, stage.method, frozenset())
        groups = inputs.reduce(units_of(images, self.owner._budgets(stage, prompt), stage.method))
        self.owner._tell(Report(reduced(unchanged(images), groups, [False] * every), (), inputs.watch))
        if not groups:
            return None, states
        changed = [images[unit.image].row for group in groups for unit in group.units.units]
        # without a reduction, all rows of a prompt stay: words in front of its images attend to them
        real |= ~np.isin(np.arange(len(real)), changed)[:, None]
        rows, pool = reduced_rows(states, real, images, groups, stage.method, [False] * every)
        return rows, pool.take(states, [group.reduction.tokens for group in groups])

    @uncompiled
    def leave(self, source: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        name = "pooler_output" if hasattr(output, "keys") and output["last_hidden_state"].ndim > 3 else 0
        states = output if isinstance(output, Tensor) else output[name]
        real, mask = np.ones(states.shape[:2], dtype=bool), kwargs.get("attention_mask")
        if "fit" in self.side and mask is not None:
            real = mask.cpu().numpy().astype(bool)
        images = [one_image(row, np.flatnonzero(own)) for row, own in enumerate(real)]
        self.local.rows, states = self.reduce(states, real, images)
        if isinstance(output, (Tensor, tuple)):
            return states if isinstance(output, Tensor) else (states, *output[1:])
        output[name or "last_hidden_state"] = states
        return output

    @uncompiled
    def join(self, encoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        model: Any = self.model()
        ids, self.local.ids = self.local.ids, None
        if ids is None:  # the encoder was not called by the model
            return None
        embeds, here = kwargs["inputs_embeds"], ids == placeholder_of(model.config, "image")
        spans = runs(Call(model, {}, ids, here, "image", embeds))
        images = [one_image(row, np.arange(start, start + length)) for row, start, length in spans]
        rows, states = self.reduce(embeds, np.ones(ids.shape, dtype=bool), images)
        if rows is None:
            return None
        if rows.padded:
            raise OptionError("the prompts of a batch lose different numbers of rows: read them one at a time")
        self.local.rows = rows
        return args, {**drop_rows(kwargs, rows), "inputs_embeds": states}

    @uncompiled
    def fit(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Cuts the mask of a decoder that was made for all rows of its encoder."""
        states, mask = kwargs.get("encoder_hidden_states"), kwargs.get("encoder_attention_mask")
        if states is None or not isinstance(mask, Tensor) or mask.shape[-1] == states.shape[1]:
            return None
        rows = getattr(self.local, "rows", None)
        if rows is None or rows.size != mask.shape[-1]:
            raise OptionError("attention_mask: encoder_outputs are of reduced images. Pass the mask of their rows")
        return args, {**kwargs, "encoder_attention_mask": cut_mask(mask, rows)}

    @uncompiled
    def shorten(self, decoder: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Images leave before they are cached. Later steps get a mask over those that the cache has."""
        states, mask, cache = kwargs.get("cross_attention_states"), kwargs.get("cross_attention_mask"), cache_in(kwargs)
        self.local.rows, model = None, self.model()
        if states is None:
            held: Any = getattr(cache, HELD, (0, None))
            if held[0] != self.number or mask is None:
                return None
            return args, {**kwargs, "cross_attention_mask": cut_mask(mask, held[1])}
        if not self.open or model is None:
            return None
        if is_static(cache) or cached_rows(cache):
            raise OptionError(
                "past_key_values: images of a later turn, or in a static cache, are not reduced on this model. Pass "
                "the whole conversation, and leave cache_implementation out"
            )
        prompts = next(kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
        patches, states = states.shape[-2], states.reshape(len(prompts), -1, states.shape[-1])
        real, images = np.ones(states.shape[:2], dtype=bool), list[Image]()
        if mask is not None:  # a row in front of all images has zeros, as one that sees them
            seen = (mask == 0) & (kwargs["full_text_row_masked_out_mask"] != 0)
            real = seen.any(2)[:, 0].cpu().numpy()
        each = patches * model.config.vision_config.max_num_tiles
        for row, own in enumerate(real):
            for start in range(0, len(own), each):
                places = np.flatnonzero(own[start : start + each])
                if len(places):
                    tile, token = np.divmod(places, patches)
                    images.append(Image(row, start + places, tile, token, int(tile[-1]) + 1, False, 0))
        rows, states = self.reduce(states, real, images)
        if rows is None:
            return None
        self.local.rows, mask = rows, None if mask is None else cut_mask(mask, rows)
        return args, {**kwargs, "cross_attention_states": states, "cross_attention_mask": mask}

    @uncompiled
    def keep(self, decoder: nn.Module, args: Any, output: Any) -> None:
        cache = cache_in(output)
        if self.local.rows is not None and cache is not None:
            setattr(cache, HELD, (self.number, self.local.rows))
            cache.reduction_hold = self.held()


def cut_mask(mask: Tensor, rows: Rows) -> Tensor:
    """A mask [R, N], or one of numbers to add [R, 1, S, N], for the rows that are left."""
    times = len(mask) // len(rows.index)  # beams
    index, shown = (value.repeat_interleave(times, 0) for value in (rows.index, rows.shown))
    if mask.ndim == 2:
        return gather(mask, index, 1) * shown
    new = mask.gather(3, index[:, None, None].expand(-1, *mask.shape[1:3], -1))
    return new.masked_fill(~shown[:, None, None], torch.finfo(mask.dtype).min)
