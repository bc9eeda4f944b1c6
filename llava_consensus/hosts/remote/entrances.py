"""Qwen-VL and CogVLM, whose checkpoints carry their own code: their views (`RemoteModel`), and the hooks by which rows
leave (`RemoteEntrance`).

    model    pre-hook    reduces the images of a prompt, and shortens its arguments
    inlet    hook        hands out the features of the rows that are left, at the place where the model puts them in

`generate` counts the full prompt, and calls the model for the prompt and then for every token, with a cache of tuples.
Its mask is cut to the rows that the cache holds.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts.arguments import Pass, State
from llava_consensus.hosts.entrance import Entrance
from llava_consensus.hosts.facts import TowerFacts
from llava_consensus.hosts.images import Image, Integers
from llava_consensus.hosts.inputs import ALWAYS, Inputs, needs_among
from llava_consensus.hosts.kernels import KernelCall, uncompiled
from llava_consensus.hosts.outcomes import Report, unchanged
from llava_consensus.hosts.prompts import prompt_of, refuse_packed
from llava_consensus.hosts.rows import Rows, cached_rows, upload
from llava_consensus.hosts.taps import EncodedImage, Reader, Tap, encoded_images
from llava_consensus.hosts.tower import READ
from llava_consensus.hosts.units import prompt_hash, units_of, visual_rows
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.tokens import Need

PLACE_OF_IMAGE = -200  # replaces the ids of image rows when prompts are compared


class RemoteModel:
    """A model that carries its own code.

    Args:
        module: the model.
        options: none.
    """

    offers: frozenset[Need] = frozenset()  # parts of the tower that methods can read
    classes, cache_axis = 0, 2  # class tokens of the tower, and the axis of rows in keys of the cache
    most_tiles = 1

    def __init__(self, module: Any, options: Mapping[str, str] = MappingProxyType({})) -> None:
        self.module, self.options = module, options

    @property
    def entrance(self) -> Any:
        return partial(RemoteEntrance, type(self))

    @classmethod
    def check(cls, method: Method, model: str) -> None:
        name = type(method).__name__
        if method.newlines == "drop":
            raise OptionError("newlines=drop: images of this model have no newlines. Leave it out")
        if method.acts_inside:
            raise OptionError(
                f"{name} acts before the projector and is adapted to CLIP towers, whose patches are the tokens of the "
                "language model. Take a method that acts after the tower"
            )
        if method.place is Place.DECODER:
            raise OptionError(
                f"{name} cuts between decoder layers, and those of {model} are code of its own that is not adapted "
                "for it: take a method that acts after the tower"
            )
        needs_among(cls.offers | ALWAYS | {Need.EARLIER}, method, model)
        if method.blocks_ahead and method.vision_layer is None and Need.CLASS_FEATURE in cls.offers:
            raise OptionError(
                f"{name} reads the attention of the block after the features' own, and that is the last one: give "
                f"vision_layer={-1 - method.blocks_ahead}"
            )

    @property
    def vision(self) -> Any:
        """The module that encodes images: [P, 3, h, w] -> [P, ..., D]."""
        raise NotImplementedError

    @property
    def blocks(self) -> Any:
        """The blocks of the tower, the last of which feeds the projector."""
        raise NotImplementedError

    @property
    def tokens(self) -> int:
        raise NotImplementedError

    @property
    def side(self) -> int:
        return round(self.tokens**0.5)

    @property
    def tower(self) -> TowerFacts:
        count = len(self.blocks)
        return TowerFacts(self.tokens, self.side, range(count), count - 1, self.classes, 1, False, self.offers)

    def encode(self, pixels: Tensor) -> Tensor:
        """Images through tower and projector: [P, 3, h, w] -> [P, N, D]."""
        raise NotImplementedError

    def project(self, features: Tensor) -> Tensor:
        """The projector [..., D_v] -> [..., D], if it takes patches one by one."""
        raise NotImplementedError

    def states(self, output: Any) -> dict[str, Tensor]:
        raise NotImplementedError

    def attention(self, block: int) -> tuple[list[Tap], float]:
        """Taps of queries and keys [P, H, C + n, d] of a block, and the scale of their products."""
        raise NotImplementedError

    def pooling(self) -> list[Tap]:
        return []

    def first_attention(self, embeds: Tensor, inputs: dict[str, Any], rotated: bool) -> KernelCall:
        """Queries and keys of the first layer of the language model (SCAP).

        Args:
            embeds: [R, S, D].
        """
        raise NotImplementedError

    def images(self, inputs: dict[str, Any]) -> list[Image]:
        """The images of prompts, given the arguments of the model.

        Raises:
            OptionError: for an image with another number of rows than tokens.
        """
        raise NotImplementedError

    def pixels(self, inputs: dict[str, Any]) -> Tensor:
        """The images of prompts: [P, 3, h, w]."""
        raise NotImplementedError

    def assembled(self, inputs: dict[str, Any], images: list[Image], encoded: list[EncodedImage]) -> Tensor:
        """The prompts as the language model would have read them: [R, S, D]."""
        raise NotImplementedError

    def arguments(self, inputs: dict[str, Any], rows: Rows | None) -> dict[str, Any]:
        """Further arguments of the model for the rows that are left."""
        raise NotImplementedError

    def features(self, embeds: Tensor, arguments: dict[str, Any], real: Tensor) -> Tensor:
        """Output of the inlet, given the rows that are left [R, W, D]."""
        raise NotImplementedError

    def install(self, give: Callable[..., Any]) -> list[Any]:
        """Puts `give(result)` behind the inlet; the returned handles have `remove`."""
        raise NotImplementedError


class RemoteInputs(Inputs):
    """Prompts are compared by all their rows."""

    def _hashes(self) -> Integers:
        prompt = self.prompt
        ids = np.where(visual_rows(prompt.images, prompt.real.shape), PLACE_OF_IMAGE, prompt.ids)
        return prompt_hash(ids, prompt.real, [])


class RemoteState(State):
    encoded: list[EncodedImage] | None = None  # images that the prompts show in place of those that they name
    features: Tensor | None = None  # for the inlet; None once they are taken
    real: Tensor | None = None  # [R, W] False for padding, of the last prompts that were reduced
    size = 0  # S of these
    inputs: Mapping[str, Any] = MappingProxyType({})  # of the model


class RemoteEntrance(Entrance):
    """The hooks of one attachment.

    Args:
        view: class of the model's view.
    """

    inputs, state = RemoteInputs, RemoteState

    def __init__(self, view: type[RemoteModel], owner: Any, model: Any, options: Mapping[str, str]) -> None:
        self.start(owner, model)
        self.view, self.cache_axis = view, view.cache_axis
        for stage in owner._stages:
            view.check(stage.method, type(model).__name__)
        count, method = len(view(model).blocks), owner.method
        self.reader = Reader(method, count, count - 1) if method.needs & READ else None
        if self.reader is not None and self.reader.short and Need.CLASS_FEATURE in view.offers:
            raise OptionError(self.reader.short)

    def replaced(self, model: Any) -> Iterator[Any]:
        return iter(())

    def register(self) -> list[Any]:
        model: Any = self.model()
        shortened = model.register_forward_pre_hook(self.shorten, with_kwargs=True)
        return [shortened, *self.view(model).install(self.give)]

    @uncompiled
    def give(self, result: Tensor) -> Tensor:
        """Output of the inlet: the features that a forward has prepared, once, or the result of the model's own."""
        features, self.local.features = self.local.features, None
        return result if features is None else features

    def shown(self, encoded: list[EncodedImage]) -> AbstractContextManager[None]:
        """Prompts of the body show these images, in order, in place of those that they name."""
        return self.noting(encoded=encoded)

    @uncompiled
    def shorten(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hook of the model: the arguments of a prompt with its images reduced."""
        inputs = dict(inspect.signature(type(model).forward).bind_partial(model, *args, **kwargs).arguments)
        del inputs["self"]
        held = cached_rows(inputs.get("past_key_values"), self.view.cache_axis)
        return (), self._step(inputs, held) if held else self._prompt(self.view(model), inputs)

    def _step(self, inputs: dict[str, Any], held: int) -> dict[str, Any]:  # type: ignore[override]
        """The arguments of a forward after the prompt's, the mask [R, S + new] cut to the rows that the cache holds."""
        real, mask = self.local.real, inputs.get("attention_mask")
        if real is None or mask is None or mask.shape[1] <= held + inputs["input_ids"].shape[1]:
            return inputs
        return {**inputs, "attention_mask": torch.cat((real.to(mask), mask[:, self.local.size :]), dim=1)}

    def _prompt(self, view: RemoteModel, inputs: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        owner, self.local.features, self.local.real = self.owner, None, None
        if inputs.get("input_ids") is None:
            raise OptionError("inputs_embeds: an attached model needs input_ids, which say where the images are")
        images = view.images(inputs)
        if not images:
            owner._tell_plain()
            return inputs
        refuse_packed(inputs.get("position_ids"), inputs.get("attention_mask"))
        ids, real = inputs["input_ids"].cpu().numpy(), real_rows(inputs)
        if inputs.get("labels") is not None or not real[:, -1].all():
            raise OptionError("labels, or padding on the right: this model only answers. Pad on the left, or detach")
        prompt = prompt_of(ids, real, real.copy(), images, [], [], view.module.config)
        stage, given = owner._stages[0], self.local.encoded
        units = units_of(images, owner._budgets(stage, prompt), stage.method)
        if not units and given is None:
            owner._tell(Report(unchanged(images)))
            return inputs
        encoded = self.encode(view.pixels(inputs)) if given is None else given
        embeds = view.assembled(inputs, images, encoded)
        tiles, pixels = [one.tiles for one in encoded], [{"pixel_values": one.pixels} for one in encoded]
        short, self.local.inputs = "" if self.reader is None else self.reader.short, inputs
        prompt = prompt._replace(tiles=tiles, encoded=pixels)
        run = Pass(view.module, None, prompt, {"inputs_embeds": embeds}, short=short)
        self._enter(run)
        owner._tell(run.report)
        embeds, rows = run.kwargs["inputs_embeds"], run.rows
        arguments = view.arguments(inputs, rows)
        left = upload([prompt.real], embeds.device)[0].bool() if rows is None else rows.shown
        self.local.features = view.features(embeds, arguments, left)
        self.local.real, self.local.size = left, prompt.real.shape[1]
        arguments["attention_mask"] = left.long()
        return {**inputs, **arguments}

    def projector(self, base: Any) -> Any:
        return self.view(self.model()).project if Need.PROJECTOR in self.view.offers else None

    def first_attention(self, decoder: Any, kwargs: dict[str, Any], rotated: bool, asking: Any) -> KernelCall:
        return self.view(decoder).first_attention(kwargs["inputs_embeds"], self.local.inputs, rotated)

    def encode(self, pixels: Tensor, tiles: list[int] | None = None) -> list[EncodedImage]:
        """Images [P, 3, h, w] of one tile each through tower and projector, and the tensors that the method reads."""
        view = self.view(self.model())
        return encoded_images(self.reader, view, view.encode, pixels, [1] * len(pixels))


def rows_with(rows: NDArray[np.bool_], values: Tensor, embeds: Tensor) -> Tensor:
    """Embeddings [R, S, D] with `values` [n, D] at the n true places of `rows` [R, S]."""
    (here,) = upload([rows], embeds.device)
    return embeds.masked_scatter(here.bool()[..., None].expand_as(embeds), values.to(embeds.device, embeds.dtype))


def real_rows(inputs: dict[str, Any]) -> NDArray[np.bool_]:
    """Rows of prompts [R, S] that are no padding."""
    mask, ids = inputs.get("attention_mask"), inputs["input_ids"]
    return np.ones(ids.shape, dtype=bool) if mask is None else mask.cpu().numpy().astype(bool)
