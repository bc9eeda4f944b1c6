"""How models that carry their own code are entered while a method is attached: by their own `forward`, which `generate`
calls for the prompt and then for every token.

The first forward gets the prompt with the pictures reduced, and their features at the place where the model itself puts
them in. `generate` goes on counting the full prompt; its mask is cut to the rows that the cache holds.
"""

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.call import Report
from llava_consensus.hosts.layout import fingerprints
from llava_consensus.hosts.sequence import Channel, Rule, Sequence, pad_left
from llava_consensus.hosts.shadow import uncompiled

if TYPE_CHECKING:
    from llava_consensus.hosts.attachment import Attachment

IGNORE = -100  # label of rows without a target
PLACE_OF_PICTURE = -200  # in place of the ids of its rows, in the number of a prompt


PREPARED = "prepared"  # in the state of a call


class Prepared(NamedTuple):
    """What one call has prepared for the functions further in."""

    features: Tensor | None  # for the inlet; None once they are taken
    real: Tensor  # [R, S'] which rows of the reduced prompts are no padding
    size: int  # S


def generate(attachment: "Attachment", plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of `generate`: the same, as one call."""
    module = attachment.here.module
    run = plain or partial(type(module).generate, module)
    if attachment.current(fresh=False).scoped:
        return run(*args, **kwargs)
    with attachment.call():
        return run(*args, **kwargs)


@uncompiled
def forward(attachment: "Attachment", plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of `forward`: same arguments, same results, of the shortened prompt."""
    view: Any = attachment.here
    model_forward = type(view.module).forward
    inputs = dict(inspect.signature(model_forward).bind_partial(view.module, *args, **kwargs).arguments)
    del inputs["self"]
    cached = cached_rows(inputs.get("past_key_values"), view.decoder.cache_axis)
    inputs = following(attachment, inputs, cached) if cached else reduced(attachment, inputs)
    return (plain or partial(model_forward, view.module))(**inputs)


def reduced(attachment: "Attachment", inputs: dict[str, Any]) -> dict[str, Any]:
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


def following(attachment: "Attachment", inputs: dict[str, Any], cached: int) -> dict[str, Any]:
    """The arguments of a forward behind the prompt's, the mask [R, S + new] cut to the reduced prompt and what came."""
    prepared, mask = attachment.current(fresh=False).state.get(PREPARED), inputs.get("attention_mask")
    if prepared is None or mask is None or mask.shape[1] <= cached + inputs["input_ids"].shape[1]:
        return inputs
    return {**inputs, "attention_mask": torch.cat((prepared.real.to(mask), mask[:, prepared.size :]), dim=1)}


def taken(attachment: "Attachment") -> Tensor | None:
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
    """Which rows have a label, on the CPU."""
    labels = inputs.get("labels")
    return None if labels is None else (labels != IGNORE).cpu()


def word_arguments(out: Sequence) -> dict[str, Any]:
    """Ids, mask and labels of the reduced prompts as arguments."""
    labels = out.channels.get("labels")
    arguments = {"input_ids": out.channels["ids"].values, "attention_mask": out.real.long()}
    return arguments if labels is None else {**arguments, "labels": labels.values}


def cached_rows(cache: Any, axis: int) -> int:
    """Rows that a cache of tuples holds, of keys with their rows along `axis`."""
    if not cache or cache[0] is None or cache[0][0] is None:
        return 0
    rows: int = cache[0][0].shape[axis]
    return rows
