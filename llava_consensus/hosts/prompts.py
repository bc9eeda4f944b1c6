"""From the arguments of a call to prompts with images: their ids and padding, the text that asks about each image, and
which arguments are known.

Packed sequences are several prompts in one row, whose positions begin again at 0 (padding-free training). Methods and
the decoder are given a row for each of them, so that every method reduces it as a single prompt.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts.images import Image, Integers, family_of
from llava_consensus.hosts.rows import CACHE_NAMES, given_rows, is_static, makes_cache, row_axis, upload
from llava_consensus.hosts.tower import Encoded, Tiles, flat_features
from llava_consensus.hosts.units import visual_rows, whole_images

SEGMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")  # of packed rows
MARKER = re.compile("(boi|eoi|(low_res_)?(image|vision|im)_(start|end))_(token_)?(id|index)")
IGNORE = -100  # label of rows without a target

ROWS, PASSED = "rewritten for the rows that are left", "passed on"
CHUNKS = "rows leave from whole prompts"
_OF_ROWS = """
input_ids inputs_embeds attention_mask position_ids token_type_ids mm_token_type_ids moe_mm_token_type_ids labels
router_labels past_key_values use_cache logits_to_keep visual_pos_masks deepstack_visual_embeds deepstack_features
vision_mask tile_fine_mask per_layer_inputs ple_input_ids audio_input_ids audio_input_ids_mask
"""
_OF_IMAGES = """
pixel_values pixel_values_images pixel_values_videos pixel_values_local high_res_pixel_values pixel_attention_mask
pixel_mask image_patches image_sizes image_sizes_videos image_grid_thw image_grid_hw video_grid_thw
second_per_grid_ts video_second_per_grid image_position_ids video_position_ids image_token_pooling video_token_pooling
image_grids video_grids image_num_crops num_frames_per_video num_local_patches patches_grid spatial_shapes target_sizes
target_sizes_videos image_merge_sizes video_merge_sizes video_compression_mask batch_num_images vision_aspect_ratio
vision_feature_layer vision_feature_select_strategy downsample_mode mm_encoder_outputs
input_features input_features_mask feature_attention_mask audio_feature_lengths use_audio_in_video chunk_sample_lengths
input_values input_values_mask
"""
_OF_OUTPUTS = "output_attentions output_hidden_states output_router_logits return_dict num_items_in_batch"
# `generate` asks `forward` for each step, so that its own arguments pass methods by
_OF_GENERATE = """
inputs generation_config logits_processor stopping_criteria prefix_allowed_tokens_fn synced_gpus assistant_model
streamer negative_prompt_ids negative_prompt_attention_mask custom_generate
assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind bad_words_ids
begin_suppress_tokens bos_token_id cache_config cache_implementation compile_config constraints
continuous_batching_config decoder_start_token_id disable_compile diversity_penalty do_sample dola_layers early_stopping
encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token_id epsilon_cutoff eta_cutoff
exponential_decay_length_penalty force_words_ids forced_bos_token_id forced_eos_token_id guidance_scale is_assistant
length_penalty low_memory max_cache_len max_length max_matching_ngram_size max_new_tokens max_time min_length
min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
num_return_sequences output_logits output_scores pad_token_id penalty_alpha prompt_lookup_num_tokens
remove_invalid_values renormalize_logits repetition_penalty return_dict_in_generate sequence_bias speculation_type
stop_strings suppress_tokens target_lookbehind temperature token_healing top_h top_k top_p transformers_version
typical_p use_mtp watermarking_config
"""
_OF_OTHERS = """
decoder_input_ids decoder_inputs_embeds decoder_attention_mask decoder_position_ids encoder_outputs
self_conditioning_logits self_conditioning_mask
"""
# every argument of `forward` and `generate` of the models of transformers: ROWS, PASSED, or why it is refused
ARGUMENTS = {
    **dict.fromkeys((*_OF_ROWS.split(), *CACHE_NAMES, *SEGMENTS), ROWS),
    **dict.fromkeys((_OF_IMAGES + _OF_OUTPUTS + _OF_GENERATE).split(), PASSED),
    **dict.fromkeys(_OF_OTHERS.split(), "is of a second sequence, which no method shortens"),
    "prefill_chunk_size": CHUNKS,
    "is_causal": "methods read what the text asks of the rows before it",
}


# Packed prompts


class Pack(NamedTuple):
    """B packed rows of length S, as R prompts padded on the left to length L."""

    shape: tuple[int, int]  # B, S
    real: NDArray[np.bool_]  # [R, L] False for padding
    source: Tensor  # [R, L] index into the B S rows; 0 for padding
    place: Tensor  # [B S] index into the R L rows
    shown: Tensor  # `real` on the device

    def split(self, value: Tensor) -> Tensor:
        """An argument [..., B or 1, S, ...] with a row for each prompt, zero for padding."""
        count, size = self.shape
        axis = row_axis(value, size, count)
        if axis is None:
            return value
        sizes = [-1] * value.ndim
        sizes[axis - 1] = count
        flat = value.expand(sizes).flatten(axis - 1, axis)
        rows = flat.index_select(axis - 1, self.source.flatten()).unflatten(axis - 1, self.source.shape)
        return rows * self.shown.view(*self.shown.shape, *(1,) * (rows.ndim - axis - 1)).to(rows.dtype)

    def join(self, states: Tensor) -> Tensor:
        """States [R, L, D] of the prompts in their packed rows [B, S, D]."""
        return states.flatten(0, 1)[self.place].view(*self.shape, -1)


def pack_of(rows: Tensor, kwargs: dict[str, Any], past: int, config: Any) -> Pack | None:
    """The prompts of a packed call, separated as transformers does; None for any other call.

    Args:
        rows: ids [B, S], or embeddings.
        past: rows that the cache holds.
        config: of the decoder.
    Raises:
        OptionError: if prompts are packed, and the plain model would let them attend to each other.
    """
    positions, mask, lengths = (kwargs.get(name) for name in ("position_ids", "attention_mask", "cu_seq_lens_q"))
    flash = "flash" in str(config._attn_implementation)
    if positions is not None and positions.ndim == 3:  # four axes: those of text, and three of rotation
        positions = positions[0] if len(positions) == 4 else None
    lengths = lengths if flash else None  # no other kernel reads it
    if past or isinstance(mask, dict) or getattr(mask, "ndim", 4) == 2:
        return None
    count, size = rows.shape[:2]
    if lengths is not None:
        starts, again = np.zeros((count, size), dtype=bool), True
        starts.reshape(-1)[lengths[:-1].cpu().numpy()] = True
    elif positions is None:
        return None
    else:
        step = np.diff(positions.expand(count, -1).cpu().numpy(), axis=1)
        starts, again = np.pad(step != 1, ((0, 0), (1, 0))), bool((step < 0).any())
    caches = makes_cache(kwargs, config)
    if again and mask is not None:
        raise OptionError("attention_mask: prompts that are packed into one row are separated by position_ids alone")
    if again and caches and not flash:
        raise OptionError("packed sequences attend to each other if a cache is made: pass use_cache=False")
    if mask is not None or not (again or (starts.any() and not caches)):
        return None
    return _pack(starts, rows.device)


def refuse_packed(positions: Tensor | None, mask: Tensor | None) -> None:
    """Raises OptionError for packed prompts of a model whose code does not separate them."""
    if positions is not None and mask is None and bool((positions.diff(dim=-1) < 0).any()):
        raise OptionError(
            "position_ids: this model's code does not separate prompts that are packed into one row. Give each a row"
        )


def _pack(starts: NDArray[np.bool_], device: torch.device) -> Pack:
    """Prompts that start at these rows [B, S]. A row by itself fills up its pack: it shows the state before it."""
    count, size = starts.shape
    starts[:, 0] = True
    first = np.flatnonzero(starts)
    lengths = np.diff(np.append(first, starts.size))
    prompts = (lengths > 1) | (first % size == 0)
    first, lengths = first[prompts, None], lengths[prompts, None]
    width = int(lengths.max())
    column = np.arange(width) - (width - lengths)  # [R, L] of each prompt, negative for padding
    real = column >= 0
    source = np.where(real, first + column, 0)
    place = np.zeros(starts.size, dtype=np.int64)
    place[source[real]] = np.flatnonzero(real)  # ascending, as prompts are
    moved, back, mask = upload([source, np.maximum.accumulate(place), real], device)
    return Pack((count, size), real, moved, back, mask.bool())


# Prompts


@dataclass(eq=False)
class Forward:
    """One forward pass, from the entrance of the model to that of the decoder."""

    base: nn.Module
    ids: Integers  # [R, S]
    real: NDArray[np.bool_]  # [R, S] False for padding
    pack: Pack | None  # whose prompts these are
    encoded: dict[str, list[Encoded]]  # by modality


class Prompt(NamedTuple):
    """A batch of prompts with images, on the CPU."""

    ids: Integers  # [R, S]
    real: NDArray[np.bool_]  # [R, S] False for padding
    asks: NDArray[np.bool_]  # [R, S] rows that may be part of a question: no padding, and no answer in training
    images: list[Image]
    tiles: list[Tiles]  # of each image, tensors recorded in the tower
    encoded: list[dict[str, Any]]  # of each image, the arguments of its encoder
    text: list[Integers]  # of each image, the columns of the text that asks about it
    beams: int = 1  # rows of each prompt, next to each other
    grouped: bool = True  # whether it is known how the family's processor lays out tiles
    left: Sequence[Any] = ()  # of each image, tokens left by a method before the projector, or None
    later: Sequence[Tiles] = ()  # of each image, the tiles that the next method reads


def ids_of(base: Any, embeds: Tensor) -> Tensor:
    """Ids of embedded prompts, 0 for all but placeholders, which are found by their embedding as the model does."""
    table, ids = base.get_input_embeddings(), torch.zeros(embeds.shape[:2], dtype=torch.long, device=embeds.device)
    for name in ("image_token_id", "video_token_id"):
        placeholder = getattr(base.config, name, None)
        if isinstance(placeholder, int) and placeholder < table.num_embeddings:
            here = embeds == table(torch.tensor(placeholder, device=table.weight.device))
            ids = ids + here.all(-1).long() * placeholder
    return ids


def with_images(decoder: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a decoder that encodes images itself (Chameleon), with the embeddings that it would begin with."""
    ids, pixels = arguments["input_ids"], arguments.get("pixel_values")
    encoded = (arguments.get("mm_encoder_outputs") or {}).get("image")
    if encoded is None:
        encoded = decoder.get_image_features(pixels, return_dict=True)
    embeds, features = decoder.get_input_embeddings()(ids), encoded.pooler_output
    mask = decoder.get_placeholder_mask(ids, inputs_embeds=embeds, image_features=features)
    gone = dict.fromkeys(("input_ids", "pixel_values", "mm_encoder_outputs") & arguments.keys())
    return {**arguments, **gone, "inputs_embeds": embeds.masked_scatter(mask, features.to(embeds.dtype))}


def waiting_records(outputs: dict[str, Any], waiting: Mapping[str, list[Encoded]]) -> Mapping[str, list[Encoded]]:
    """Records of outputs that `generate` encoded before, if they were copied on their way (offloaded weights)."""
    for modality, records in waiting.items():
        rows, count = flat_features(outputs.get(modality, {})), sum(record.count or 0 for record in records)
        if rows is None or not count or len(rows) % count:
            raise OptionError(f"prefill_chunk_size: {CHUNKS}. Leave it out, or detach the method")
    return waiting


def check_arguments(kwargs: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Raises OptionError for arguments of prompts [R, S] that are refused, and for unknown ones with an entry a row."""
    for name, value in kwargs.items():
        treatment = ARGUMENTS.get(name)
        if treatment is None and isinstance(value, Tensor) and row_axis(value, shape[1], shape[0]) is not None:
            treatment = "how it changes with the rows that are left is not known"
        if value is not None and treatment not in (ROWS, PASSED, None):
            raise OptionError(f"{name}: {treatment}. Leave it out, or detach the method")


def split_packed(kwargs: dict[str, Any], cache: Any, config: Any, whole: bool) -> Pack | None:
    """Gives each packed prompt a separate row in `kwargs`; None if none are packed. Checks arguments.

    Args:
        config: of the decoder.
        whole: whether these are arguments of the whole model, and not of an inner one.
    """
    rows = given_rows(kwargs)
    check_arguments(kwargs, rows.shape)
    pack = pack_of(rows, kwargs, 0 if cache is None else int(cache.get_seq_length()), config)
    if pack is None:
        return None
    if whole and kwargs.get("labels") is not None:
        raise OptionError("labels of packed sequences: this model computes its loss of prompts apart. Leave them out")
    for name, value in kwargs.items():
        if ARGUMENTS.get(name) == ROWS and isinstance(value, Tensor):
            kwargs[name] = pack.split(value)
    kwargs |= {name: None for name in SEGMENTS if name in kwargs}
    kwargs |= {"attention_mask": pack.shown.long(), "use_cache": False}
    return pack


def read_prompt(base: nn.Module, kwargs: dict[str, Any], cache: Any) -> tuple[Integers, NDArray[np.bool_]]:
    """Ids and real rows of a prompt [R, S]. Masks that `generate` made for a static cache are replaced in `kwargs`."""
    ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
    past = 0 if cache is None else int(cache.get_seq_length())
    if ids is None:
        ids = ids_of(base, kwargs["inputs_embeds"])
    if isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.ndim == 4 and is_static(cache)):
        # masks that generate makes for a static cache; the decoder makes them again. A real row sees itself.
        mask = next((value for value in mask.values() if value is not None), None) if isinstance(mask, dict) else mask
        if mask is not None:
            seen = mask[:, 0, :, past:].diagonal(dim1=1, dim2=2)
            seen = seen if seen.dtype == torch.bool else seen == 0
            mask = seen.expand(ids.shape)
        kwargs["attention_mask"] = None if mask is None else mask.long()
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        ids = ids.cpu().numpy()
        return ids, np.ones(ids.shape, dtype=bool)
    both = torch.stack((ids, mask[:, -ids.shape[1] :].to(ids.device).long())).cpu().numpy()
    return both[0], both[1].astype(bool)


def asking_rows(
    owner: Any, real: NDArray[np.bool_], unlabelled: NDArray[np.bool_] | None, images: list[Image]
) -> NDArray[np.bool_]:
    """Rows [R, S] that may ask about images: the real ones, in training without those of answers. A row of an image is
    no answer, though it may have a label. Labels on the whole text of a prompt do not separate answers from questions.
    """
    if unlabelled is None or any(stage.method.answer_rows for stage in owner._stages):
        return real.copy()
    visual = visual_rows(images, real.shape)
    asks = unlabelled | ~(unlabelled & real & ~visual).any(1, keepdims=True)
    return real & (asks | visual)


def question_rows(
    owner: Any, forward: Forward, labels: Tensor | None, guesses: int, images: list[Image]
) -> NDArray[np.bool_]:
    """Rows [R, S] of a forward that may ask about images, without `guesses` at the end."""
    if forward.pack is not None and labels is not None:
        labels = forward.pack.split(labels)
    asks = asking_rows(owner, forward.real, None if labels is None else labels.cpu().numpy() == IGNORE, images)
    size = asks.shape[1] - (guesses if forward.pack is None else 0)
    for record in (item for records in forward.encoded.values() for item in records):
        # without a cache each step reads the prompt again, with the generated tokens
        asks[:, record.prompt.setdefault("size", size) :] = False
    return asks


def prompt_of(
    ids: Integers,
    real: NDArray[np.bool_],
    asks: NDArray[np.bool_],
    images: list[Image],
    tiles: list[Tiles],
    encoded: list[dict[str, Any]],
    config: Any,
) -> Prompt:
    """A batch of prompts with the text that asks about each image."""
    text = text_after(ids, asks, images, config)
    return Prompt(ids, real, asks, images, tiles, encoded, text, 1, not family_of(config).mapped)


def text_after(ids: Integers, asks: NDArray[np.bool_], images: Sequence[Image], config: Any) -> list[Integers]:
    """Columns of the text that asks about each image: all behind it, without the markers around later images.

    Args:
        ids: [R, S].
        asks: [R, S] rows that may be part of a question.
    """
    front, behind = family_of(config).around
    marker = None
    if (front, behind) == (0, 0):  # a family without an entry: its configuration names the markers
        names = [value for name, value in vars(config).items() if MARKER.fullmatch(name) and isinstance(value, int)]
        marker = np.isin(ids, names)
    words, columns = asks & ~visual_rows(images, asks.shape), np.arange(asks.shape[1])
    found, every = [], whole_images(images)
    spans = [(images[own[0]].row, int(images[own[0]].places[0]), int(images[own[-1]].places[-1])) for own in every]
    for (row, _, end), own in zip(spans, every, strict=True):
        asking = words[row] & (columns > end)
        for other, first, last in spans:
            if other != row or first <= end:
                continue
            if marker is not None:
                front = _run(marker[row, :first][::-1])
                behind = _run(marker[row, last + 1 :])
            asking[max(first - front, end + 1) : last + behind + 1] = False
        found += [np.flatnonzero(asking)] * len(own)
    return found


def _run(values: NDArray[np.bool_]) -> int:
    return int(values.argmin()) if not values.all() else len(values)
