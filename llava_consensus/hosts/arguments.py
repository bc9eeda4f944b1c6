"""Arguments of a model and of its decoder for the rows that are left: masks, positions, features of visual rows."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import pad

from llava_consensus.errors import OptionError
from llava_consensus.hosts.images import Image, Integers
from llava_consensus.hosts.inputs import Prompt
from llava_consensus.hosts.packing import SEGMENTS, Pack, pack_of
from llava_consensus.hosts.rows import (
    CACHE_NAMES,
    Book,
    Pool,
    Rows,
    drop_rows,
    is_static,
    joined_rows,
    makes_cache,
    row_axis,
    upload,
)
from llava_consensus.hosts.tower import Encoded, flat_features
from llava_consensus.hosts.units import ImageOutcome, Report, text_after, unchanged, visual_rows
from llava_consensus.reduction.method import Method

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


@dataclass(eq=False)
class Forward:
    """One forward pass, from the entrance of the model to that of the decoder."""

    base: nn.Module
    ids: Integers  # [R, S]
    real: NDArray[np.bool_]  # [R, S] False for padding
    pack: Pack | None  # whose prompts these are
    encoded: dict[str, list[Encoded]]  # by modality


class Pass:
    """Prompts with images at the entrance of the decoder, until it has run: each method takes rows from them.

    Args:
        decoder: that is called.
        base: the module that encodes images, or the vision tower of official LLaVA.
        prompt: as the first method sees it.
        kwargs: of the decoder.
        cache: that it was given.
        held: the book of that cache.
        short: why attention that a method reads is absent; "" if it is there.
    """

    def __init__(
        self, decoder: Any, base: Any, prompt: Prompt, kwargs: dict[str, Any], cache: Any = None,
        held: Book | None = None, short: str = "",
    ) -> None:  # fmt: skip
        self.decoder, self.base, self.cache, self.held, self.short = decoder, base, cache, held, short
        self.whole, self.size = prompt, prompt.real.shape[1]
        self.prompt, self.kwargs = prompt, kwargs  # as the next method sees them
        self.report = Report(unchanged(prompt.images, prompt.beams))
        self.rows: Rows | None = None  # that the decoder is given; None if all
        self.book: Book | None = None  # of the rows that left here
        self.prefill: Any = None  # hooks between layers
        self.reported: list[int] = []  # images of the first beam of each prompt


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


def leave(run: Pass, rows: Rows, pool: Pool, method: Method) -> None:
    """Gives the decoder these rows only, and notes what its cache then holds.

    Raises:
        OptionError: for the second method of a composition in a later turn.
    """
    decoder, kwargs, prompt, cache, book = run.decoder, run.kwargs, run.prompt, run.cache, run.held
    embeds = kwargs["inputs_embeds"]
    visual = sum(len(image.places) for image in prompt.images)
    new = {}
    for name, value in kwargs.items():
        if name not in (*CACHE_NAMES, "attention_mask", "position_ids", "inputs_embeds"):
            new[name] = argument_of(value, rows, pool, prompt, visual)
    new["inputs_embeds"] = pool.take(embeds, [group.reduction.tokens for group in pool.groups])
    new |= {name: kwargs[name] for name in CACHE_NAMES if name in kwargs}
    past, cached = (0, 0) if cache is None else (int(cache.get_seq_length()), int(cache.get_query_offset()))
    held, index, padded = rows.shown[:, :0], rows.index, rows.padded
    if cached and prompt.real.shape[1] < run.size:
        raise OptionError("images in a later turn on a cache are not supported: pass the whole conversation")
    if cached:  # the cache holds rows of prompts, followed by generated tokens
        held = rows.shown.new_ones(len(rows.real), cached)
        before = torch.arange(past - cached, past, device=embeds.device).expand(len(held), -1)
        if book is not None:
            prompts = book.real.shape[1]
            held = torch.cat((book.real, held[:, prompts:]), 1)
            before = torch.cat((book.index, before[:, prompts:]), 1)
            padded |= book.padded
        index = torch.cat((before, index + past), 1)
    renumbers = method.positions == "renumber"
    positions = kwargs.get("position_ids")
    # without a cache and a mask, transformers takes gaps in positions for the ends of packed sequences
    shown = padded or (cache is None and not makes_cache(kwargs, decoder.config))
    new["attention_mask"] = mask_of(kwargs.get("attention_mask"), rows, held, shown, prompt.real.shape[1], decoder)
    new["position_ids"], shifts = positions_of(positions, rows, pool, prompt.real, past, book, method)
    shift = rows.removed if shifts else torch.zeros_like(rows.removed)
    if book is not None:
        shift = shift + book.shift
    real = torch.cat((held, rows.shown), 1) if cached else rows.shown
    size, shifted = past + run.size, renumbers and shifts and rows.shrinks
    if run.rows is not None:  # behind another method
        rows = joined_rows(run.rows, rows)
        index, shift = rows.index, rows.removed if shifted else shift
    run.kwargs, run.rows = new, rows
    front = size - real.shape[1]
    plain = not padded and not cached and run.whole.real[:, -real.shape[1] :].all()
    run.book = Book(
        size, front, real, index, shift, padded, front if plain else None,
        shifted or (book is not None and book.shifted), False, {}, {},
    )  # fmt: skip


def held_masks(kwargs: dict[str, Any], cache: Any, book: Book) -> dict[str, Any]:
    """Masks and token types that are as long as a shortened cache."""
    new = next(kwargs[name].shape[1] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
    whole, mask = int(cache.get_seq_length()) + new, kwargs.get("attention_mask")
    if not (isinstance(mask, Tensor) and mask.ndim == 2):
        # none, or one that generate made for a static cache of another length
        mask = None
        if book.padded:
            mask = torch.cat((book.real, book.real.new_ones(len(book.real), whole - book.size)), 1).long()
    elif book.front is not None:
        mask = mask[:, book.front :].long()
    else:
        mask = torch.cat((book.real.to(mask), mask[:, book.size :]), 1).long()
    found: dict[str, Any] = {"attention_mask": mask}
    for name, value in kwargs.items():  # token types of the whole conversation
        if name.endswith("token_type_ids") and isinstance(value, Tensor) and value.shape[1] == whole:
            found[name] = torch.cat((value.gather(1, book.index), value[:, book.size :]), 1)
    return found


def positions_of(
    given: Tensor | None, rows: Rows, pool: Pool, real: NDArray[np.bool_], past: int, book: Book | None, method: Method
) -> tuple[Tensor | None, bool]:
    """Positions of the rows, and whether later ones are smaller. Those of several axes are always kept."""
    device = rows.index.device
    if method.positions == "renumber" and (given is None or given.ndim == 2):
        rank = np.maximum(rows.real.cumsum(1) - 1, 0)
        first = real.argmax(1)[:, None]
        if given is None:
            if not past and not rows.padded:
                return None, True  # the decoder counts the rows it gets
            (positions,) = upload([past + first + rank], device)
        else:
            rank, first = upload([rank, first], device)
            positions = given.expand(real.shape).gather(1, first) + rank
        return positions if book is None else positions - book.shift, True
    if given is None:
        (given,) = upload([np.arange(past, past + real.shape[1])[None]], device)
    if method.positions == "spread":  # models of several axes refuse it
        return pool.spread(given.expand(real.shape), rows), False
    if method.positions == "mean":
        every = given.expand(*given.shape[:-2], *real.shape)
        if every.ndim == 2:
            return pool.mean(every), False
        return torch.stack([pool.mean(axis) for axis in every]), False
    return drop_rows(given, rows), False


def argument_of(value: Any, rows: Rows, pool: Pool, prompt: Prompt, visual: int) -> Any:
    """An argument for the rows that are left; features of visual rows (DeepStack) become means for merged tokens."""
    if type(value) in (list, tuple):
        return type(value)(argument_of(item, rows, pool, prompt, visual) for item in value)
    if isinstance(value, dict):
        return {name: argument_of(item, rows, pool, prompt, visual) for name, item in value.items()}
    if not (isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 2 and len(value) == visual):
        return drop_rows(value, rows)
    here = np.zeros(prompt.real.shape, dtype=bool)
    for image in prompt.images:
        here[image.row, image.places] = True
    flat, mask = upload([np.flatnonzero(here), here], value.device)
    plane = value.new_zeros(here.size, value.shape[1]).index_copy(0, flat, value)
    new = pool.mean(plane.view(*here.shape, -1))
    return new[drop_rows(mask.bool(), rows)]


def mask_of(mask: Any, rows: Rows, held: Tensor, padded: bool, size: int, decoder: Any) -> Any:
    """The attention mask of the new rows, behind `held` [R, n] rows of the cache."""
    if isinstance(mask, dict):
        new = {name: mask_of(value, rows, held, padded, size, decoder) for name, value in mask.items()}
        for name in new.keys() & {"full_attention", "sliding_attention"}:
            if isinstance(new[name], Tensor) and new[name].ndim == 4:
                window = getattr(decoder.config, "sliding_window", None) if name == "sliding_attention" else None
                new[name] = _in_order(mask[name], new[name].shape[-1], rows, held, size, window)
        return new
    if not isinstance(mask, Tensor) or mask.ndim == 2:
        if not padded:
            return None
        real = torch.cat((held, rows.shown), 1)
        return real.long() if mask is None else real.to(mask.dtype)
    real = torch.cat((held, rows.shown), 1)
    first = mask.shape[-1] - size if mask.shape[-1] < held.shape[1] + size else held.shape[1]
    index = rows.index
    behind = torch.arange(held.shape[1], device=index.device).expand(len(index), -1)
    columns = torch.cat((behind, index + first), 1)
    mask = mask.expand(len(index), -1, -1, -1)
    new = mask.gather(2, index[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3]))
    new = new.gather(3, columns[:, None, None].expand(-1, mask.shape[1], index.shape[1], -1))
    itself = torch.eye(real.shape[1], dtype=torch.bool, device=index.device)[held.shape[1] :]
    none = False if new.dtype == torch.bool else torch.finfo(new.dtype).min
    new = new.masked_fill(~real[:, None, None] & ~itself, none)
    room = mask.shape[-1] - held.shape[1] - size  # of a static cache
    return pad(new, (0, room + size - index.shape[1]), value=none) if room > 0 else new


def _in_order(mask: Tensor, columns: int, rows: Rows, held: Tensor, size: int, window: int | None) -> Tensor:
    """A mask [R, 1, W, columns] of the rows that are left by their own order, which merged tokens may have changed, and
    with windows as wide in rows that are left.

    Args:
        mask: [R, 1, S, ...] of the prompt.
        columns: of the new mask, a static cache has more than there are rows.
        held: [R, n] real rows of the cache.
    """
    index, past = rows.index, held.shape[1]
    first = mask.shape[-1] - size if mask.shape[-1] < past + size else past
    ahead = _seen(mask)[:, :1, :, first : first + size].expand(len(index), -1, -1, -1).triu(1)  # images of Gemma 3
    ahead = ahead | ahead.transpose(2, 3)
    ahead = ahead | torch.diag_embed(ahead.any(3))  # a merged token and the one it replaces
    ahead = ahead.gather(2, index[:, None, :, None].expand(-1, 1, -1, size))
    ahead = ahead.gather(3, index[:, None, None].expand(-1, 1, index.shape[1], -1))
    at = torch.arange(past + index.shape[1], device=index.device)
    row = at[past:, None]
    seen = pad(ahead, (past, 0)) | (at <= row)
    seen = seen & (row - at < window) if window else seen
    seen = seen & torch.cat((held, rows.shown), 1)[:, None, None] | (at == row)
    seen = pad(seen, (0, columns - seen.shape[-1]))
    none = torch.zeros(seen.shape, dtype=mask.dtype, device=mask.device)
    return seen if mask.dtype == torch.bool else none.masked_fill(~seen, torch.finfo(mask.dtype).min)


def _seen(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask == 0


def compact(prompt: Prompt, rows: Rows, config: Any) -> Prompt:
    """The prompts as a method between layers sees them, after rows left at the entrance. Synchronises once."""
    index = rows.index.cpu().numpy()
    images = []
    for image in prompt.images:
        number = np.full(prompt.real.shape[1], -1)
        number[image.places] = np.arange(len(image.places))
        own = np.where(rows.real[image.row], number[index[image.row]], -1)
        places = np.flatnonzero(own >= 0)
        images.append(image._replace(places=places, tile=image.tile[own[places]], token=image.token[own[places]]))
    ids, asks = (np.take_along_axis(own, index, 1) for own in (prompt.ids, prompt.asks))
    asks &= rows.real
    text = text_after(ids, asks, images, config)
    return prompt._replace(ids=ids, real=rows.real, asks=asks, images=images, text=text)


def joined_outcomes(outcomes: list[ImageOutcome], later: dict[int, ImageOutcome], whole: bool) -> list[ImageOutcome]:
    """Outcomes with those of a method between layers; of a composition only the counts are kept."""
    found = []
    for number, outcome in enumerate(outcomes):
        new = later.get(number)
        if new is None:
            found.append(outcome._replace(reductions=()) if whole else outcome)
        elif whole:
            found.append(new._replace(before=outcome.before, origin=outcome.origin, reductions=()))
        else:
            found.append(new._replace(row=outcome.row))
    return found


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


def waiting_records(outputs: dict[str, Any], waiting: dict[str, list[Encoded]]) -> dict[str, list[Encoded]]:
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
    rows = next(kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
    check_arguments(kwargs, rows.shape)
    pack = pack_of(kwargs, 0 if cache is None else int(cache.get_seq_length()), config)
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
