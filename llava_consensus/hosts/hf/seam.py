"""How a Hugging Face model is entered while a method is attached: its own `generate` and `forward`, and the function
`reduce`, which both use.

The full prompt is assembled from the model's own embeddings and encoders, reduced, and handed on as what the model
takes: shortened `input_ids`, `attention_mask`, `position_ids`, token types and labels, and the reduced features as
`mm_encoder_outputs` (transformers >= 5.19). Whatever is not a matter of pictures goes through as it is given.
"""

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.hf.rows import Placed, row_kinds
from llava_consensus.hosts.sequence.layout import fingerprints
from llava_consensus.hosts.sequence.splice import Channel, Rule, Sequence, pad_left
from llava_consensus.reduction.method import Place

if TYPE_CHECKING:
    from llava_consensus.hosts.attachment import Attachment
    from llava_consensus.hosts.call import Call
    from llava_consensus.hosts.hf.model import Features, HfModel

PLACE_OF_PICTURE = -200  # official LLaVA's id of a picture
IGNORE = -100  # label of rows without a target
TYPES = ("mm_token_type_ids", "token_type_ids")  # arguments that go with the rows
LENGTHS = ("max_length", "min_length")  # arguments of `generate` that count the prompt


def reduce(model: Any, **inputs: Any) -> dict[str, Any]:
    """The arguments of `model(...)` or `generate(...)` with the pictures reduced, for training loops and decoding loops
    of one's own. A method must be attached.

    Args:
        model: the attached model.
        inputs: what the processor gave, `labels` with it where there are some.
    Returns:
        The same arguments with shortened rows, and `mm_encoder_outputs` in place of pixels.
    Raises:
        OptionError: for a model without a method, or prompts and pictures that do not match.
    """
    entrance = vars(getattr(model, "_orig_mod", model)).get("generate")
    if not isinstance(entrance, functools.partial):
        raise OptionError("reduce(model, ...) needs a method on the model: attach(model, ...) first")
    attachment = entrance.args[0]
    attachment.current()
    return _reduced(attachment, inputs)


def generate(attachment: "Attachment", plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of `generate`: same arguments, same results, the original prompt in front of the answer."""
    module = attachment.here.module
    kwargs = _named(type(module).generate, args, kwargs)
    run = plain or functools.partial(type(module).generate, module)
    if attachment.current(fresh=False).scoped:
        return _generate(attachment, run, kwargs)
    with attachment.call():
        return _generate(attachment, run, kwargs)


def forward(attachment: "Attachment", plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of `forward`: same arguments, same results, of the shortened prompt."""
    view: Any = attachment.here
    kwargs = _named(type(view.module).forward, args, kwargs)
    run = plain or functools.partial(type(view.module).forward, view.module)
    if _filled(kwargs.get("past_key_values")) == 0 and kwargs.get("mm_encoder_outputs") is None:
        attachment.current(fresh=True)
        kwargs = _reduced(attachment, kwargs)
    return run(**_contained(view, kwargs))


def _generate(attachment: "Attachment", run: Any, kwargs: dict[str, Any]) -> Any:
    if kwargs.get("inputs") is not None:
        kwargs["input_ids"] = kwargs.pop("inputs")
    if attachment.method.place is Place.DECODER and _setting(attachment, kwargs, "prefill_chunk_size"):
        raise OptionError("prefill_chunk_size: a method between decoder layers must see the whole prompt at once")
    with torch.no_grad():
        changed = _reduced(attachment, kwargs)
    prompt = kwargs.get("input_ids")
    if changed is kwargs or prompt is None:
        return run(**kwargs)
    cut = changed["input_ids"].shape[1]
    for name in LENGTHS:
        if changed.get(name) is not None:
            changed[name] = max(changed[name] - prompt.shape[1] + cut, 1)
    result = run(**changed)
    answers = result if isinstance(result, Tensor) else result.sequences
    front = prompt.to(answers.device).repeat_interleave(len(answers) // len(prompt), 0)
    sequences = torch.cat((front, answers[:, cut:]), dim=1)
    if isinstance(result, Tensor):
        return sequences
    result.sequences = sequences
    return result


@torch.compiler.disable
def _reduced(attachment: "Attachment", inputs: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the pictures reduced: the same object where there is nothing to reduce."""
    view: Any = attachment.here
    call, encoder_inputs = attachment.current(fresh=False), view.encoder_inputs(inputs)
    call.outcomes, call.notes, call.watch = [], (), None
    if not encoder_inputs and call.encoded is None:
        return inputs
    ids, real = _prompts(view, inputs)
    placed = _placed(view, call, encoder_inputs, ids.cpu())
    labels = inputs.get("labels")
    answer = None if labels is None else (labels != IGNORE).cpu()
    kinds = row_kinds(ids.cpu(), real.cpu(), placed, answer)
    layout = attachment.layout(kinds)
    unreduced = attachment.method.place is Place.DECODER or not layout.reduced()
    if unreduced:
        attachment.arm(call, layout, inputs["input_ids"])
        if call.encoded is None:
            return inputs
    features = _encoded(attachment, call, encoder_inputs, placed)
    full = _assembled(view, inputs, ids, real, features)
    if unreduced:
        return _arguments(attachment, inputs, full, list(features), set())
    tiles = [picture for modality_features in features.values() for picture in modality_features.tiles]
    out = attachment.reduce(call, full, layout, tiles, fingerprints(*_once(ids, real, kinds.picture.to(ids.device))))
    if real[:, -1].all():  # else the prompts are padded on the right, as in training
        out = pad_left(out)
    return _arguments(
        attachment, inputs, out, list(features), {name for arguments in encoder_inputs.values() for name in arguments}
    )


def _placed(view: "HfModel", call: "Call", encoder_inputs: dict[str, dict[str, Any]], ids: Tensor) -> list[Placed]:
    """The pictures of every modality: those of this call's pixels, or those the harness has encoded before."""
    if call.encoded is not None:
        return [Placed("image", view.placeholder("image"), [picture.rows for picture in call.encoded])]
    return [
        Placed(name, view.placeholder(name), view.pictures(name, inputs, ids))
        for name, inputs in encoder_inputs.items()
    ]


def _encoded(
    attachment: "Attachment", call: "Call", encoder_inputs: dict[str, dict[str, Any]], placed: list[Placed]
) -> dict[str, "Features"]:
    """Features of every modality, encoded now or before."""
    view: Any = attachment.here
    if call.encoded is not None:
        return {"image": view.together([picture.features for picture in call.encoded])}
    return {
        group.modality: view.encode(attachment, group.modality, encoder_inputs[group.modality], group.pictures)
        for group in placed
    }


def _once(ids: Tensor, real: Tensor, picture: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and mask in which every picture is one row, as official LLaVA has it before it puts the tokens in: a prompt
    has the same fingerprint on every host with its words.
    """
    first = picture != torch.nn.functional.pad(picture, (1, 0), value=-1)[:, :-1]
    return ids.where(picture < 0, PLACE_OF_PICTURE), real & ((picture < 0) | first)


def _prompts(view: "HfModel", inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Ids and mask [R, S] of prompts with pictures."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if ids is None or inputs.get("inputs_embeds") is not None:
        raise OptionError("inputs_embeds: an attached model needs input_ids, which say where the pictures stand")
    if inputs.get("mm_encoder_outputs"):
        raise OptionError("mm_encoder_outputs: pass either pixels or what an encoder made of them")
    if _filled(inputs.get("past_key_values")):
        raise OptionError(
            "past_key_values: the cache of a reduced prompt has fewer rows than the prompt: pass the whole "
            "conversation without a cache"
        )
    if mask is not None and mask.ndim != 2:
        raise OptionError(f"attention_mask of {mask.ndim} dimensions: reduced prompts need one row for each prompt")
    if mask is None:
        return ids, _unpadded(view, ids)
    return ids, mask.bool()


def _unpadded(view: "HfModel", ids: Tensor) -> Tensor:
    """The mask `generate` takes where none is given: all but padding, where padding ends nothing."""
    config = getattr(view.module, "generation_config", None)
    pad, ends = getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None)
    ending = pad in (ends if isinstance(ends, list) else [ends])
    return torch.ones_like(ids, dtype=torch.bool) if pad is None or ending else ids != pad


def _assembled(
    view: "HfModel", inputs: dict[str, Any], ids: Tensor, real: Tensor, features: dict[str, "Features"]
) -> Sequence:
    """The full prompts as the language model would have read them, with everything that goes with their rows."""
    embeds = view.module.get_input_embeddings()(ids)
    planes: list[Tensor] = []
    for modality, modality_features in features.items():
        at_placeholder = (ids == view.placeholder(modality))[..., None]
        embeds = embeds.masked_scatter(at_placeholder, modality_features.tokens.to(embeds.device, embeds.dtype))
        planes = planes or [torch.zeros_like(embeds) for _ in modality_features.planes]
        planes = [
            plane.masked_scatter(at_placeholder, more.to(plane.device, plane.dtype))
            for plane, more in zip(planes, modality_features.planes, strict=True)
        ]
    channels = {"ids": Channel(ids, _padding(view), Rule.SOURCE)}
    channels |= {name: Channel(inputs[name], 0, Rule.SOURCE) for name in TYPES if inputs.get(name) is not None}
    if inputs.get("labels") is not None:
        channels["labels"] = Channel(inputs["labels"], IGNORE, Rule.BLANK)
    channels |= {f"plane {i}": Channel(plane, 0, Rule.MEAN) for i, plane in enumerate(planes)}
    return Sequence(embeds, real, view.positions(inputs, ids, real), channels)


def _arguments(
    attachment: "Attachment", inputs: dict[str, Any], out: Sequence, modalities: list[str], used_names: set[str]
) -> dict[str, Any]:
    """The arguments for the reduced prompts, without those the encoders have used."""
    view: Any = attachment.here
    values = {name: channel.values for name, channel in out.channels.items()}
    planes = [value for name, value in values.items() if name.startswith("plane ")]
    ids, arguments = values["ids"], {name: value for name, value in inputs.items() if name not in used_names}
    arguments.pop("position_ids", None)
    arguments |= {name: value for name, value in values.items() if name in (*TYPES, "labels")}
    arguments |= {"input_ids": ids, "attention_mask": out.real.long()}
    if view.keeps_positions or attachment.method.positions == "keep":
        arguments |= view.placing(inputs, out.positions, out.real)
    elif inputs.get("position_ids") is not None:
        arguments["position_ids"] = (out.real.cumsum(1) - 1).clamp_min(0)
    encoded = {}
    for modality in modalities:
        at_placeholder = (ids == view.placeholder(modality)) & out.real
        filled = at_placeholder.any(1).tolist()
        parts = [
            [part[row][at_placeholder[row]] for row, has_rows in enumerate(filled) if has_rows]
            for part in (out.embeds, *planes)
        ]
        encoded[modality] = view.output(parts[0], parts[1:])
    return {**arguments, "mm_encoder_outputs": encoded}


def _contained(view: "HfModel", kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments with features in the container this model takes."""
    encoded = kwargs.get("mm_encoder_outputs") or {}
    lists = [name for name in view.tensors if encoded.get(name) is not None]
    lists = [name for name in lists if isinstance(encoded[name].pooler_output, list)]
    if not lists:
        return kwargs
    tensors = {name: view.output(torch.cat(encoded[name].pooler_output)[None], []) for name in lists}
    return {**kwargs, "mm_encoder_outputs": {**encoded, **tensors}}


def _filled(cache: Any) -> int:
    """Rows a cache holds."""
    return 0 if cache is None else int(cache.get_seq_length())


def _padding(view: "HfModel") -> int:
    token_id = view.module.config.get_text_config().pad_token_id
    return 0 if token_id is None else int(token_id)


def _setting(attachment: "Attachment", kwargs: dict[str, Any], name: str) -> Any:
    """A setting of `generate`, from its arguments or from the configuration."""
    config = kwargs.get("generation_config") or getattr(attachment.here.module, "generation_config", None)
    return kwargs.get(name, getattr(config, name, None))


@functools.cache
def _names(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[1:]


def _named(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, positional ones among them."""
    return {**dict(zip(_names(function), args, strict=False)), **kwargs}
