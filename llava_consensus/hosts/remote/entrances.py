"""Base of the hosts of Qwen-VL and CogVLM: their views (`RemoteModel`, see `base.Model`), and the replacement of
`forward` of models with their own code. Their `generate` calls it for the prompt and then for every token.

The first forward gets the prompt with the pictures reduced, and their features at the place where the model itself puts
them in. `generate` still counts the full prompt; its mask is cut to the rows that the cache holds. A family's own
file says where its blocks are, where the tokens of a picture stand in its prompts, and where the model takes their
features.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property, partial, wraps
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import IGNORE, PLACE_OF_PICTURE, Tiles
from llava_consensus.hosts.call import Report, uncompiled
from llava_consensus.hosts.old_attachment import Attachment
from llava_consensus.hosts.sequence import Assembled, Channel, RowKinds, Rule, fingerprints, pad_left
from llava_consensus.reduction.method import Method, Place

PREPARED = "prepared"  # in the state of a call


class RemoteModel:
    """A view of a model that carries its own code.

    Args:
        module: the model.
        options: of the host, which has none.
    """

    most_tiles = 1
    inlet = ""  # path of the function of the model that is given features of pictures

    def __init__(self, module: Any, options: Mapping[str, str] = MappingProxyType({})) -> None:
        self.module: Any = module

    @cached_property
    def tower(self) -> Any:
        """The vision side."""
        raise NotImplementedError

    @cached_property
    def decoder(self) -> Any:
        """The language side."""
        raise NotImplementedError

    def of(self, module: Any) -> "RemoteModel":
        """A copy of this view for a replica."""
        return type(self)(module)

    def clip_text(self) -> Any:
        """None: none of these towers is one side of a CLIP model in transformers."""
        return None

    def check(self, method: Method) -> None:
        """Raises OptionError for what these models cannot do."""
        if method.place is Place.DECODER:
            raise OptionError(
                f"{type(method).__name__} cuts between decoder layers, and those of {type(self.module).__name__} are "
                "code of its own that is not adapted for it: take a method that acts after the tower"
            )

    def entrances(self, attachment: Attachment) -> dict[str, Callable[..., Any]]:
        """`generate`, which makes one call, `forward` with the pictures reduced, and where their features go in."""
        model_class, attributes = type(self.module), vars(self.module)
        owner, _, name = self.inlet.rpartition(".")
        plain = vars(self.module.get_submodule(owner)).get(name)
        return {
            "generate": wraps(model_class.generate)(partial(generate, attachment, attributes.get("generate"))),
            "forward": wraps(model_class.forward)(partial(forward, attachment, attributes.get("forward"))),
            self.inlet: partial(self.give, attachment, plain),
        }

    @staticmethod
    def give(attachment: Attachment, plain: Any, *args: Any, **kwargs: Any) -> Any:
        """Replaces the inlet: returns the features the call has prepared, once, else the result of the model's own
        function.
        """
        raise NotImplementedError

    def kinds(self, inputs: dict[str, Any]) -> RowKinds | None:
        """Kind of every row of prompts, given the arguments of `forward`; None if there are no pictures.

        Raises:
            OptionError: where a picture has another number of rows than tokens.
        """
        raise NotImplementedError

    def pixels(self, inputs: dict[str, Any]) -> Tensor:
        """The pictures of prompts: [P, 3, h, w]."""
        raise NotImplementedError

    def assembled(self, inputs: dict[str, Any], kinds: RowKinds, tiles: list[Tiles]) -> Assembled:
        """The full prompts as the language model would have read them, with ids and labels among the channels."""
        raise NotImplementedError

    def arguments(self, inputs: dict[str, Any], out: Assembled) -> dict[str, Any]:
        """Arguments of `forward` for the reduced prompts; the features go in by the inlet."""
        raise NotImplementedError

    def features(self, out: Assembled) -> Tensor:
        """Features that the inlet returns for the reduced prompts."""
        raise NotImplementedError


class Prepared(NamedTuple):
    """Data that one call has prepared for the functions further in."""

    features: Tensor | None  # for the inlet; None once they are taken
    real: Tensor  # [R, S'] which rows of the reduced prompts are no padding
    size: int  # S


def generate(attachment: Attachment, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `generate`: the same, as one call."""
    module = attachment.here.module
    run = plain or partial(type(module).generate, module)
    call = attachment.entered()
    if call is None or call.scoped:
        return run(*args, **kwargs)
    with attachment.call():
        return run(*args, **kwargs)


@uncompiled
def forward(attachment: Attachment, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `forward`: same arguments, same results, of the shortened prompt."""
    view: Any = attachment.here
    model_forward = type(view.module).forward
    if attachment.entered() is None:
        return (plain or partial(model_forward, view.module))(*args, **kwargs)
    inputs = dict(inspect.signature(model_forward).bind_partial(view.module, *args, **kwargs).arguments)
    del inputs["self"]
    cached = cached_rows(inputs.get("past_key_values"), view.decoder.cache_axis)
    inputs = following(attachment, inputs, cached) if cached else reduced(attachment, inputs)
    return (plain or partial(model_forward, view.module))(**inputs)


def reduced(attachment: Attachment, inputs: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the pictures reduced: the same object where there is nothing to reduce."""
    view: Any = attachment.here
    call = attachment.current(fresh=True)
    call.tell(Report())
    call.state.pop(PREPARED, None)
    if inputs.get("input_ids") is None:
        raise OptionError("inputs_embeds: an attached model needs input_ids, which say where the pictures stand")
    kinds = view.kinds(inputs)
    if kinds is None:
        return inputs
    layout = attachment.layout(kinds)
    attachment.pass_by(call, layout)
    if not layout.reduced() and call.given.encoded is None:
        return inputs
    pixels = view.pixels(inputs) if call.given.encoded is None else torch.empty(0)
    tiles = attachment.encode(pixels, [1] * len(pixels))
    out = view.assembled(inputs, kinds, tiles)
    size, ids = out.real.shape[1], inputs["input_ids"]
    if layout.reduced():
        words = ids.masked_fill((kinds.picture >= 0).to(ids.device), PLACE_OF_PICTURE)
        out = attachment.reduce(call, out, layout, tiles, fingerprints(words, out.real))
        out = pad_left(out) if kinds.real[:, -1].all() else out  # else padded on the right, as in training
    call.state[PREPARED] = Prepared(view.features(out), out.real, size)
    return {**inputs, **view.arguments(inputs, out)}


def following(attachment: Attachment, inputs: dict[str, Any], cached: int) -> dict[str, Any]:
    """The arguments of a forward after the prompt's, the mask [R, S + new] cut to the reduced prompt and what came."""
    # `generate` extends the mask of the full prompt, but the cache holds the reduced one: a longer mask would not fit.
    prepared, mask = attachment.current(fresh=False).state.get(PREPARED), inputs.get("attention_mask")
    if prepared is None or mask is None or mask.shape[1] <= cached + inputs["input_ids"].shape[1]:
        return inputs
    return {**inputs, "attention_mask": torch.cat((prepared.real.to(mask), mask[:, prepared.size :]), dim=1)}


def taken(attachment: Attachment) -> Tensor | None:
    """The features that the call has prepared, once."""
    call = attachment.current(fresh=False)
    prepared: Prepared | None = call.state.get(PREPARED)
    if prepared is None or prepared.features is None:
        return None
    call.state[PREPARED] = prepared._replace(features=None)
    return prepared.features


def word_channels(inputs: dict[str, Any], pad: int) -> dict[str, Channel]:
    """Ids and labels as channels of a sequence."""
    channels = {"ids": Channel(inputs["input_ids"], pad, Rule.SOURCE)}
    if inputs.get("labels") is not None:
        channels["labels"] = Channel(inputs["labels"], IGNORE, Rule.BLANK)
    return channels


def answer_rows(inputs: dict[str, Any]) -> Tensor | None:
    """Mask of the rows with a label, on the CPU."""
    labels = inputs.get("labels")
    return None if labels is None else (labels != IGNORE).cpu()


def word_arguments(out: Assembled) -> dict[str, Any]:
    """Ids, mask and labels of the reduced prompts as arguments."""
    labels = out.channels.get("labels")
    arguments = {"input_ids": out.channels["ids"].values, "attention_mask": out.real.long()}
    return arguments if labels is None else {**arguments, "labels": labels.values}


def cached_rows(cache: Any, axis: int) -> int:
    """Rows that a cache of tuples holds, of keys with their rows along `axis`."""
    if not cache or cache[0] is None or cache[0][0] is None:
        return 0
    return cache[0][0].shape[axis]


def rows_with(rows: Tensor, values: Tensor, embeds: Tensor) -> Tensor:
    """Embeddings [R, S, D] with `values` [n, D] at the n true places of `rows` [R, S]."""
    at_rows = rows.to(embeds.device)[..., None].expand_as(embeds)
    return embeds.masked_scatter(at_rows, values.to(embeds.device, embeds.dtype))


def real_rows(inputs: dict[str, Any]) -> Tensor:
    """Mask of the rows of prompts [R, S] that are no padding."""
    mask = inputs.get("attention_mask")
    return torch.ones_like(inputs["input_ids"], dtype=torch.bool) if mask is None else mask.bool()
