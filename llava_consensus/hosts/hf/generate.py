"""Replacements of `generate` and `forward` of transformers models while a method is attached; both use `reduce`.

The full prompt is assembled from the model's own embeddings and encoders, reduced, and handed on as what the model
takes: shortened `input_ids`, `attention_mask`, `position_ids`, token types and labels, and the reduced features as
`mm_encoder_outputs`. Whatever is not a matter of pictures goes through as it is given.
"""

import functools
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import IGNORE, PLACE_OF_PICTURE, Overlay
from llava_consensus.hosts.caches import (
    Shortened,
    begin_cache,
    cache_given,
    cache_of,
    cached_rows,
    check_counted,
    going_on,
    known,
    remember,
    shortened,
)
from llava_consensus.hosts.call import (
    MORE,
    UNDER_WAY,
    Call,
    Report,
    code_of,
    current_call,
    named,
    on_stack,
    running,
    uncompiled,
)
from llava_consensus.hosts.hf.rows import Features, ModalityRows, row_kinds, without_dropped
from llava_consensus.hosts.old_attachment import Attachment
from llava_consensus.hosts.sequence import Assembled, Channel, Layout, Rule, fingerprints, pad_left
from llava_consensus.reduction.method import Place
from llava_consensus.reduction.selection import indices
from llava_consensus.reduction.tokens import Need

WITHOUT_IDS = (
    "inputs_embeds: an attached model needs input_ids, which say where the pictures stand. Pass them, or detach"
)
FILLED = (
    "past_key_values: the cache of a reduced prompt has fewer rows than the prompt, so pictures can only go in at its "
    "beginning: pass the whole conversation without a cache, or later turns of text without pixels"
)
EMBEDS = "reduced embeddings"  # of the prompt of a call, in its state
PIXELS = ("pixel_values", "pixel_values_images", "pixel_values_videos")
FEATURES = ("vision_feature_layer", "vision_feature_select_strategy")  # arguments: what the tower hands over
BATCHING = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")
GATHERING = ("_get_logits_processor", "_get_stopping_criteria")  # functions that `generate` asks for them


class ReducedFeatures(dict[str, Any]):
    """Reduced features of pictures (`mm_encoder_outputs`), with the metadata of their reduced prompts."""

    prompt: Shortened
    report: Report
    embeds: Tensor | None = None


def reduce(model: Any, **inputs: Any) -> dict[str, Any]:
    """Reduces the pictures in the arguments of `model(...)` or `generate(...)`, for user-written training and decoding
    loops. A method must be attached.

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
    call = attachment.current()
    arguments, prompt = _reduced(attachment, attachment.here, call, inputs)
    if prompt is not None and "mm_encoder_outputs" in arguments:
        features = ReducedFeatures(arguments["mm_encoder_outputs"])
        features.prompt, features.report, features.embeds = prompt, call.report, call.state.get(EMBEDS)
        arguments["mm_encoder_outputs"] = features
    return arguments


@dataclass(eq=False)
class Generating:
    """State of one `generate` that its forwards, processors and criteria share."""

    prompt: Shortened | None  # where pictures were reduced before the model
    armed: Any  # what a method between decoder layers has to do with the prompt
    asked: Tensor  # [R, L] ids as they were given
    read: int  # ids of each prompt that `generate` of transformers was given
    started: bool = False

    def whole(self, ids: Tensor) -> Tensor:
        """Ids [rows, n] of `generate` with the full prompt in front."""
        front = self.asked.to(ids.device).repeat_interleave(len(ids) // len(self.asked), 0)
        return torch.cat((front, ids[:, self.read :]), dim=1)


class OnWhole(Overlay):
    """Wrapper of a logits processor or stopping criterion of the user, which sees the full prompt."""

    generating: Generating

    def __call__(self, input_ids: Tensor, scores: Any) -> Any:
        return self.own(self.generating.whole(input_ids), scores)


class Streamed:
    """Wrapper of a streamer, which sees the full prompt and then every step."""

    def __init__(self, inner: Any, generating: Generating) -> None:
        self._inner, self._whole = inner, [generating.whole]

    def put(self, value: Tensor) -> None:
        """Passes ids on; the first ones are those of the prompt."""
        self._inner.put(self._whole.pop()(value) if self._whole else value)

    def end(self) -> None:
        """Ends the stream after the last step."""
        self._inner.end()


def generate(attachment: Attachment, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `generate`: same arguments, same results, the original prompt in front of the answer."""
    view: Any = attachment.model  # no replica: those of `DataParallel` run `forward` alone
    kwargs = named(type(view.module).generate, args, kwargs)
    run = plain or functools.partial(type(view.module).generate, view.module)
    call = attachment.entered()
    if call is None or UNDER_WAY in call.state:  # or the model assists itself
        return run(**kwargs)
    _refuse_embeds(attachment, kwargs)
    if call.scoped:
        return _generate(attachment, view, call, run, kwargs)
    with attachment.call() as own:
        return _generate(attachment, view, own, run, kwargs)


def forward(attachment: Attachment, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `forward`: same arguments, same results, of the shortened prompt."""
    view: Any = attachment.here
    inputs, prompt = _entering(attachment, view, named(type(view.module).forward, args, kwargs))
    with view.entering(attachment, inputs):
        output = (plain or functools.partial(type(view.module).forward, view.module))(**contained(view, inputs))
    if prompt is not None:
        remember(cache_of(output), prompt)
    return output


def refused(name: str, *args: Any, **kwargs: Any) -> Any:
    """Refuses continuous batching while a method cuts between layers: its prompts share one sequence."""
    raise OptionError(
        f"{name}: continuous batching puts prompts into one sequence, which a method between layers cannot cut. "
        "Use generate, or take a method that acts before the language model"
    )


def check_outer(attachment: Attachment, inner: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of the model without its head: called by itself it would see all tokens of a picture."""
    if torch.compiler.is_compiling() or running() is not None or not attachment.method.reduces:
        return
    outer = attachment.model.module
    if on_stack(sys._getframe(), {code_of(type(outer).forward): "self"}, outer):
        return  # a forward that began before the method was attached
    if any(kwargs.get(name) is not None for name in PIXELS):
        raise OptionError(
            f"{type(inner).__name__}: pictures are reduced on their way into {type(attachment.model.module).__name__}, "
            "and this is the model inside it. Call model(...) or model.generate(...), or detach"
        )


def gathered(attachment: Attachment, name: str, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces a function by which `generate` gathers processors or criteria: those of the user see the full prompt,
    those that `generate` makes itself see the ids that it counts.
    """
    module = attachment.model.module
    function = getattr(type(module), name)
    kwargs = named(function, args, kwargs)
    found = (plain or functools.partial(function, module))(**kwargs)
    call = current_call(attachment)
    generating = None if call is None else call.state.get(UNDER_WAY)
    if generating is None or generating.read == generating.asked.shape[1]:
        return found
    own = kwargs.get(name.removeprefix("_get_")) or ()

    def is_own(one: Any) -> bool:
        return isinstance(one, transformers.PrefixConstrainedLogitsProcessor) or any(one is mine for mine in own)

    shown = [not isinstance(one, OnWhole) and is_own(one) for one in found]
    return type(found)(
        OnWhole(one, generating=generating) if whole else one for one, whole in zip(found, shown, strict=True)
    )


@uncompiled
def _entering(attachment: Attachment, view: Any, inputs: dict[str, Any]) -> tuple[dict[str, Any], Shortened | None]:
    """Arguments of a forward for the reduced prompts, and, of a prefill, the metadata for the cache it leaves."""
    call = attachment.entered()
    if call is None:
        return inputs, None
    generating, cache = call.state.get(UNDER_WAY), cache_given(inputs)
    cached = cached_rows(cache)
    if generating is None and not cached:
        call = attachment.current(fresh=True)
    if attachment.cuts is not None:
        attachment.cuts.given(call, inputs)
    if cached:
        if generating is None and attachment.method.reduces and view.encoder_inputs(inputs):
            raise OptionError(FILLED)
        return going_on(inputs, cached, counted=generating is not None), None
    if generating is not None:
        return _generated(attachment, view, call, generating, inputs), None
    _refuse_embeds(attachment, inputs)
    inputs, prompt = _reduced(attachment, view, call, inputs)
    begin_cache(cache, prompt)
    return inputs, prompt


def _generated(
    attachment: Attachment, view: Any, call: Call, generating: Generating, inputs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a forward of `generate` without rows in a cache: it reads the prompt, alone or with ids after it
    where there is no cache or where they are only guessed; or it is one of a processor, such as that of guidance.
    """
    first, generating.started = not generating.started, True
    if not (first or inputs.get("mm_encoder_outputs") or view.encoder_inputs(inputs)):
        return inputs
    ids: Any = inputs.get("input_ids")  # none where `full` leaves a prompt of embeddings alone
    if generating.armed is not None and attachment.cuts is not None:
        attachment.cuts.again(call, generating.armed, ids)
    prompt, cache, positions = generating.prompt, cache_given(inputs), inputs.get("position_ids")
    begin_cache(cache, prompt)
    if prompt is None or not prompt.keeps or positions is None:
        return inputs
    if cache is None and inputs.get("attention_mask") is None:  # gaps would be taken for the ends of packed sequences
        inputs = {**inputs, "attention_mask": torch.ones_like(ids, dtype=torch.long)}
    return {**inputs, "position_ids": prompt.counted(positions, 0)}


def _generate(attachment: Attachment, view: Any, call: Call, run: Any, kwargs: dict[str, Any]) -> Any:
    if kwargs.get("inputs") is not None:
        kwargs["input_ids"] = kwargs.pop("inputs")
    config = kwargs.get("generation_config") or getattr(view.module, "generation_config", None)
    chunked = bool(kwargs.get("prefill_chunk_size", getattr(config, "prefill_chunk_size", None)))
    if chunked and attachment.cuts is not None:
        raise OptionError("prefill_chunk_size: a method between decoder layers must see the whole prompt at once")
    asked, cache = kwargs.get("input_ids"), cache_given(kwargs)
    with torch.no_grad():
        changed, prompt = _reduced(attachment, view, call, kwargs)
    if chunked and not view.chunks:  # which derived hosts know by now
        name = type(view.module).__name__
        raise OptionError(f"prefill_chunk_size: {name} reads chunks otherwise than the whole prompt. Leave it out")
    if asked is None:
        return run(**kwargs)
    if changed is kwargs and cached_rows(cache) and isinstance(known(cache), Shortened):
        changed = _later_turn(view, kwargs, known(cache))
    check_counted(cache)
    read = changed["input_ids"].shape[1]
    armed = None if attachment.cuts is None else attachment.cuts.armed(call)
    generating = Generating(prompt, armed, asked, read)
    if kwargs.get("streamer") is not None and read != asked.shape[1]:
        changed["streamer"] = Streamed(kwargs["streamer"], generating)
    call.state |= {UNDER_WAY: generating, MORE: read - asked.shape[1]}
    try:
        result = run(**changed)
    finally:
        del call.state[UNDER_WAY], call.state[MORE]
    if read == asked.shape[1]:
        return result
    if isinstance(result, Tensor):
        return generating.whole(result)
    result.sequences = generating.whole(result.sequences)
    return result


def _later_turn(view: Any, kwargs: dict[str, Any], prompt: Shortened) -> dict[str, Any]:
    """Arguments of a `generate` on the cache of a reduced prompt, given all ids so far or, with a mask of all, the new
    ones alone: the new ids, and the mask of the rows that are left.
    """
    ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")
    cached = cached_rows(cache_given(kwargs))
    mask = unpadded(view, ids).long() if mask is None else mask
    new = ids.shape[1]
    if mask.shape[1] == new:
        new -= prompt.size - prompt.left + cached
    if new < 1:
        raise OptionError(
            f"input_ids of {ids.shape[1]} rows, and the cache is of {ids.shape[1] - new}: pass the conversation "
            "so far, with new words after it"
        )
    changed = {name: value for name, value in kwargs.items() if name != "position_ids"}
    changed |= {name: kwargs[name][:, -new:] for name in row_types(kwargs, ids)}
    return {**changed, "input_ids": ids[:, -new:], "attention_mask": prompt.mask(mask, cached, new)}


@uncompiled
def _reduced(
    attachment: Attachment, view: Any, call: Call, inputs: dict[str, Any]
) -> tuple[dict[str, Any], Shortened | None]:
    """Arguments with the pictures reduced, and the metadata of the reduced prompts.

    Returns the object it was given, and None, if there is nothing to reduce.
    """
    encoder_inputs = view.encoder_inputs(inputs)
    features = inputs.get("mm_encoder_outputs")
    if isinstance(features, ReducedFeatures):  # of the public `reduce`: a second reduction would cut them twice
        call.tell(features.report)
        call.state[EMBEDS] = features.embeds
        return inputs, features.prompt
    if features and attachment.method.reduces:
        raise OptionError(
            "mm_encoder_outputs: a method needs the pixels that these features were made of. Pass pixels, or detach"
        )
    call.tell(Report())  # a call without pictures must not show the outcomes of the one before
    if not encoder_inputs and call.given.encoded is None:
        return inputs, None
    ids, real = _prompts(view, inputs)
    view.settle(attachment, inputs, encoder_inputs)
    known_ids, known_real = torch.stack((ids, real.to(ids.dtype))).cpu()  # the only wait for the device
    placed = _placed(view, call, encoder_inputs, known_ids)
    labels = inputs.get("labels")
    answer = None if labels is None else (labels != IGNORE).cpu()
    kinds = row_kinds(known_ids, known_real.bool(), placed, answer, view.around, view.markers)
    layout = attachment.layout(kinds)
    # Rows stay where a method prunes between layers or every unit fits its budget. The model then encodes by itself,
    # unless features were made before, the host lays tiles out otherwise, or the cut reads the tower.
    unreduced = attachment.method.place is Place.DECODER or not attachment.reduces(layout)
    if unreduced and not (call.given.encoded is not None or view.lays_out or attachment.cuts_by_tower):
        attachment.arm(call, layout, inputs["input_ids"])
        return inputs, None
    if call.given.encoded is None:
        _check_call(view, inputs, reduces=not unreduced)
    features = _encoded(attachment, view, call, encoder_inputs, placed)
    tiles = [picture for modality_features in features.values() for picture in modality_features.tiles]
    if unreduced:
        attachment.arm(call, layout, inputs["input_ids"], tiles)
    full = view.assembled(attachment, inputs, ids, real, features, known_ids, kinds.real)
    used_names = {name for arguments in encoder_inputs.values() for name in arguments}
    if unreduced:
        held = _held(call, layout, placed)
        return reduced_arguments(attachment, view, inputs, full, held, used_names, features), None
    # Structural rows that the host drops go only with a reduced picture: then the layout is read again without them.
    whole, kinds = kinds, without_dropped(kinds)
    layout = layout if kinds is whole else attachment.layout(kinds)
    full = replace(full, real=kinds.real.to(real.device))
    marked = Need.FINGERPRINT in attachment.needs
    prompts = fingerprints(*once(known_ids, kinds.real, kinds.picture)) if marked else None
    out = attachment.reduce(call, full, layout, tiles, prompts)
    if kinds.real[:, -1].all():  # else the prompts are padded on the right, as in training
        out = pad_left(out)
    # With gaps in the positions, decoding continues after the full prompt and not after the rows in the cache.
    keeps = view.keeps_positions or attachment.positions != "renumber"
    # Some models change features after the seam where this host hands them in: the reduced rows take the place of the
    # embeddings before the first layer.
    if not view.embedded:
        call.state[EMBEDS] = out.embeds
    held = _held(call, layout, placed)
    arguments = reduced_arguments(attachment, view, inputs, out, held, used_names, features)
    attachment.follow(call, out, arguments["input_ids"])
    return arguments, shortened(full, out, keeps)


def _check_call(view: Any, inputs: dict[str, Any], reduces: bool) -> None:
    """Raise OptionError for arguments of a call by which a method would read or place something else than the model."""
    for name in FEATURES:
        given, own = inputs.get(name), getattr(view.module.config, name, None)
        if given is not None and given != own:
            raise OptionError(
                f"{name}={given!r}: the method reads the features that the configuration names, {name}={own!r}. Leave "
                f"it out, or set model.config.{name} before attaching"
            )
    if not reduces:
        return
    if isinstance(inputs.get("logits_to_keep"), Tensor):
        raise OptionError(
            "logits_to_keep: a tensor names rows of the full prompt, of which some are gone. Give a number of last rows"
        )
    positions = inputs.get("position_ids")
    if view.typed and inputs.get("mm_token_type_ids") is None and (positions is None or positions.ndim != 3):
        raise OptionError(
            "mm_token_type_ids: without it the model gives pictures the positions of words, a method those of their "
            "rows and columns. Pass all that the processor returns"
        )


def _refuse_embeds(attachment: Attachment, inputs: dict[str, Any]) -> None:
    """Raises OptionError for prompts that come as embeddings: which rows are pictures cannot be seen in them."""
    if inputs.get("inputs_embeds") is not None and attachment.method.reduces:
        raise OptionError(WITHOUT_IDS)


def _placed(view: Any, call: Call, encoder_inputs: dict[str, dict[str, Any]], ids: Tensor) -> list[ModalityRows]:
    """The pictures of every modality: those of this call's pixels, or those the harness has encoded before."""
    if call.given.encoded is not None:
        return [
            ModalityRows(name, view.placeholder(name), [picture.rows for picture in pictures])
            for name, pictures in _by_modality(call.given.encoded).items()
        ]
    return [
        ModalityRows(name, view.placeholder(name), view.pictures(name, inputs, ids))
        for name, inputs in encoder_inputs.items()
    ]


def _held(call: Call, layout: Layout, placed: list[ModalityRows]) -> dict[str, list[int]]:
    """Rows of pictures of each modality that are left in each prompt: known without a look at the device."""
    modality = [group.modality for group in placed for _ in group.pictures]
    held = {group.modality: [0] * len(layout.real) for group in placed}
    for picture, outcome in zip(layout.pictures, call.report.outcomes, strict=True):
        held[modality[picture.source]][picture.row] += outcome.after + outcome.structural
    return held


def _encoded(
    attachment: Attachment,
    view: Any,
    call: Call,
    encoder_inputs: dict[str, dict[str, Any]],
    placed: list[ModalityRows],
) -> dict[str, Features]:
    """Features of every modality, encoded now or before."""
    if call.given.encoded is not None:
        return {
            name: view.together([picture.features for picture in pictures])
            for name, pictures in _by_modality(call.given.encoded).items()
        }
    return {
        group.modality: view.encode(attachment, group.modality, encoder_inputs[group.modality], group.pictures)
        for group in placed
    }


def _by_modality(encoded: list[Any]) -> dict[str, list[Any]]:
    """Pictures that were encoded before, each modality's together."""
    names = dict.fromkeys(picture.modality for picture in encoded)
    return {name: [picture for picture in encoded if picture.modality == name] for name in names}


def once(ids: Tensor, real: Tensor, picture: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and mask in which every picture is one row, as official LLaVA has it before it puts the tokens in: a prompt
    has the same fingerprint on every host with its words.
    """
    first = picture != torch.nn.functional.pad(picture, (1, 0), value=-1)[:, :-1]
    return ids.where(picture < 0, PLACE_OF_PICTURE), real & ((picture < 0) | first)


def _prompts(view: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Ids and mask [R, S] of prompts with pictures."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if ids is None or inputs.get("inputs_embeds") is not None:
        raise OptionError(WITHOUT_IDS)
    if inputs.get("mm_encoder_outputs"):
        raise OptionError("mm_encoder_outputs: pass either pixels or what an encoder made of them")
    if cached_rows(cache_given(inputs)):
        raise OptionError(FILLED)
    if mask is not None and mask.ndim != 2:
        raise OptionError(f"attention_mask of {mask.ndim} dimensions: reduced prompts need one row for each prompt")
    if mask is None:
        return ids, unpadded(view, ids)
    return ids, mask.bool()


def unpadded(view: Any, ids: Tensor) -> Tensor:
    """The mask `generate` takes where none is given: all but padding, where padding ends nothing."""
    config = getattr(view.module, "generation_config", None)
    pad, ends = getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None)
    ending = pad in (ends if isinstance(ends, list) else [ends])
    return torch.ones_like(ids, dtype=torch.bool) if pad is None or ending else ids != pad


def channels_of(view: Any, inputs: dict[str, Any], ids: Tensor, planes: list[Tensor]) -> dict[str, Channel]:
    """What goes with the rows of prompts [R, S]: ids, token types, labels, and the planes [R, S, D]."""
    padding = view.module.config.get_text_config().pad_token_id
    channels = {"ids": Channel(ids, 0 if padding is None else int(padding), Rule.SOURCE)}
    channels |= {name: Channel(inputs[name], 0, Rule.SOURCE) for name in row_types(inputs, ids)}
    if inputs.get("labels") is not None:
        channels["labels"] = Channel(inputs["labels"], IGNORE, Rule.BLANK)
    return channels | {f"plane {i}": Channel(plane, 0, Rule.MEAN) for i, plane in enumerate(planes)}


def row_types(inputs: dict[str, Any], ids: Tensor) -> list[str]:
    """Arguments with a whole number for each row of prompts [R, S], such as token types."""
    others = ("input_ids", "attention_mask", "position_ids", "labels", "decoder_input_ids")
    return [
        name
        for name, value in inputs.items()
        if name not in others
        and isinstance(value, Tensor)
        and value.shape == ids.shape
        and not value.is_floating_point()
    ]


def reduced_arguments(
    attachment: Attachment,
    view: Any,
    inputs: dict[str, Any],
    out: Assembled,
    held: dict[str, list[int]],
    used_names: set[str],
    features: dict[str, Features],
) -> dict[str, Any]:
    """The arguments for the reduced prompts, without those the encoders have used; `held` says how many rows of each
    modality a prompt has.
    """
    values = {name: channel.values for name, channel in out.channels.items()}
    planes = [value for name, value in values.items() if name.startswith("plane ")]
    ids, arguments = values["ids"], {name: value for name, value in inputs.items() if name not in used_names}
    arguments.pop("position_ids", None)
    arguments |= {name: value for name, value in values.items() if name in inputs and name != "input_ids"}
    arguments |= {"input_ids": ids, "attention_mask": out.real.long()}
    whole = attachment.method.place is Place.DECODER and inputs.get("position_ids") is None  # the model's own are right
    if view.keeps_positions or (attachment.positions != "renumber" and not whole):
        arguments |= view.placing(inputs, out.positions, out.real)
    elif inputs.get("position_ids") is not None:
        arguments["position_ids"] = (out.real.cumsum(1) - 1).clamp_min(0)
    encoded = {}
    for modality, counts in held.items():
        at_placeholder = (ids == view.placeholder(modality)) & out.real
        places = indices(at_placeholder, max(counts))
        parts = [
            [part[row, places[row, :count]] for row, count in enumerate(counts) if count]
            for part in (out.embeds, *planes)
        ]
        encoded[view.handed.get(modality, modality)] = view.output(parts[0], parts[1:], features[modality].output)
    return {**arguments, "mm_encoder_outputs": encoded}


def contained(view: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments with features in the container this model takes."""
    encoded = kwargs.get("mm_encoder_outputs") or {}
    lists = [name for name in view.tensors if encoded.get(name) is not None]
    lists = [name for name in lists if isinstance(getattr(encoded[name], "pooler_output", None), list)]
    if not lists:
        return kwargs
    tensors = {name: view.in_one(encoded[name]) for name in lists}
    return {**kwargs, "mm_encoder_outputs": {**encoded, **tensors}}
