"""Arguments of a model and of its decoder for the rows that are left: masks, positions, features of visual rows."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from llava_consensus.errors import OptionError
from llava_consensus.hosts.images import Integers
from llava_consensus.hosts.layers import Hooks
from llava_consensus.hosts.outcomes import ImageOutcome, Report, unchanged
from llava_consensus.hosts.prompts import Forward, Pack, Prompt, text_after
from llava_consensus.hosts.rows import Book, Hold, Pool, Rows, drop_rows, given_rows, joined_rows, makes_cache, upload
from llava_consensus.hosts.tower import Encoded
from llava_consensus.hosts.units import visual_rows
from llava_consensus.reduction.method import Method

LATER_TURN = "images in a later turn on a cache are not supported: pass the whole conversation"


@dataclass(eq=False)
class Pass:
    """Prompts with images at the entrance of the decoder, until it has run: each method takes rows from them."""

    decoder: Any  # that is called
    base: Any  # the module that encodes images, or the vision tower of official LLaVA
    prompt: Prompt  # as the next method sees it
    kwargs: dict[str, Any]  # of the decoder, likewise
    cache: Any = None  # that it was given
    held: Book | None = None  # the book of that cache
    short: str = ""  # why attention that a method reads is absent; "" if it is there
    mask: Tensor | None = None  # 2D mask that the model was given, as long as the cache and the prompt
    rows: Rows | None = None  # that the decoder is given; None if all
    book: Book | None = None  # of the rows that left here
    prefill: Any = None  # hooks between layers
    reported: Sequence[int] = ()  # images of the first beam of each prompt

    def __post_init__(self) -> None:
        self.whole, self.size = self.prompt, self.prompt.real.shape[1]
        self.report = Report(unchanged(self.prompt.images, self.prompt.beams))


class State(threading.local):
    """Notes of the hooks of one thread for later hooks of the same forward pass."""

    labels: Tensor | None = None
    guesses = 0  # rows at the end that assisted decoding guessed
    ids: Integers | None = None  # prompts of the images that are encoded ahead of the model
    generates = False  # whether `generate` encodes images
    skips = False  # whether blocks of the tower that are not read are passed over
    waiting: Mapping[str, list[Encoded]] = MappingProxyType({})  # images that were encoded so, by modality
    forward: Forward | None = None
    mask: Tensor | None = None  # 2D mask that the model was given
    pack: Pack | None = None
    run: Pass | None = None
    armed: Hooks | None = None  # between layers
    hold: Hold | None = None  # keeps all hooks while this forward runs


def leave(run: Pass, rows: Rows, pool: Pool, method: Method) -> None:
    """Gives the decoder these rows only, and notes which rows its cache then holds.

    Raises:
        OptionError: for the second method of a composition in a later turn.
    """
    decoder, kwargs, prompt, cache, book = run.decoder, run.kwargs, run.prompt, run.cache, run.held
    embeds = kwargs["inputs_embeds"]
    visual = sum(len(image.places) for image in prompt.images)
    apart = ("attention_mask", "position_ids", "inputs_embeds")
    new = {name: argument_of(kwargs[name], rows, pool, prompt, visual) for name in kwargs if name not in apart}
    new["inputs_embeds"] = pool.take(embeds, [group.reduction.tokens for group in pool.groups])
    held, index, padded = rows.shown[:, :0], rows.index, rows.padded
    past, cached = (0, 0) if cache is None else (int(cache.get_seq_length()), int(cache.get_query_offset()))
    if cached:  # the cache holds rows of prompts, followed by generated tokens
        if prompt.real.shape[1] < run.size:
            raise OptionError(LATER_TURN)
        held = rows.shown.new_ones(len(rows.real), cached)
        before = torch.arange(past - cached, past, device=embeds.device).expand(len(held), -1)
        if book is not None:
            prompts = book.real.shape[1]
            held = torch.cat((book.real, held[:, prompts:]), 1)
            before = torch.cat((book.index, before[:, prompts:]), 1)
            padded |= book.padded
        if run.mask is not None:  # an earlier turn may have had padding
            held, padded = run.mask[:, :cached].bool(), True
        index = torch.cat((before, index + past), 1)
    positions = kwargs.get("position_ids")
    mask = kwargs.get("attention_mask")
    # without a cache and a mask, transformers takes gaps in positions for the ends of packed sequences
    needed = padded or not (isinstance(mask, dict) or cache is not None or makes_cache(kwargs, decoder.config))
    new["attention_mask"] = mask_of(mask, run, rows, held, needed)
    new["position_ids"], shifts = positions_of(positions, rows, pool, prompt.real, past, book, method)
    real = torch.cat((held, rows.shown), 1) if cached else rows.shown
    closes = method.positions == "renumber" and shifts and rows.shrinks
    if run.rows is not None:  # behind another method
        rows = joined_rows(run.rows, rows)
        index = rows.index
    shift = rows.removed if closes else None
    if book is not None and book.shift is not None:
        shift = book.shift if shift is None else book.shift + shift
    run.kwargs, run.rows = new, rows
    plain = not padded and not cached and bool(run.whole.real[:, -real.shape[1] :].all())
    run.book = Book(past + run.size, real, index, shift, padded, plain, {}, {})


def held_masks(kwargs: dict[str, Any], cache: Any, book: Book) -> dict[str, Any]:
    """Masks and token types that are as long as a shortened cache."""
    whole, mask = int(cache.get_seq_length()) + given_rows(kwargs).shape[1], kwargs.get("attention_mask")
    if not (isinstance(mask, Tensor) and mask.ndim == 2):
        # none, or one that generate made for a static cache of another length
        mask = None
        if book.padded:
            mask = torch.cat((book.real, book.real.new_ones(len(book.real), whole - book.size)), 1).long()
    elif book.plain:
        mask = mask[:, book.size - book.real.shape[1] :].long()
    else:
        mask = torch.cat((book.real.to(mask), mask[:, book.size :]), 1).long()
    found: dict[str, Any] = {"attention_mask": mask}
    for name, value in kwargs.items():
        if not name.endswith("token_type_ids") or not isinstance(value, Tensor):
            continue
        if name == "token_type_ids":  # masks are made of types by their place, also of those of a later turn only
            value = pad(value, (0, whole - value.shape[1]))
        if value.shape[1] == whole:
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
        return positions if book is None or book.shift is None else positions - book.shift, True
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
    if not isinstance(value, Tensor):
        return value
    if not (value.is_floating_point() and value.ndim == 2 and len(value) == visual):
        return drop_rows(value, rows)
    here = visual_rows(prompt.images, prompt.real.shape)
    flat, mask = upload([np.flatnonzero(here), here], value.device)
    plane = value.new_zeros(here.size, value.shape[1]).index_copy(0, flat, value)
    new = pool.mean(plane.view(*here.shape, -1))
    return new[drop_rows(mask.bool(), rows)]


def mask_of(mask: Any, run: Pass, rows: Rows, held: Tensor, padded: bool, kind: str = "") -> Any:
    """The attention mask of the new rows, behind `held` [R, n] rows of the cache. One of a type of layers is made by
    the order of the rows that are left, which merged tokens may have changed, and with windows as wide in these.

    Args:
        kind: type of the layers; "" if the mask is for all.
    """
    if isinstance(mask, dict):
        return {name: mask_of(value, run, rows, held, padded, name) for name, value in mask.items()}
    if (not isinstance(mask, Tensor) or mask.ndim == 2) and not padded:
        return None
    index, size, config = rows.index, run.prompt.real.shape[1], run.decoder.config
    if mask is None and kind and config._attn_implementation == "sdpa":  # which is causal by itself
        mask = torch.ones(1, 1, size, held.shape[1] + size, dtype=torch.bool, device=index.device).tril(held.shape[1])
    if not isinstance(mask, Tensor) or mask.ndim == 2:
        real = torch.cat((held, rows.shown), 1)
        return real.long() if mask is None else real.to(mask.dtype)
    held = held[:, max(held.shape[1] + size - mask.shape[-1], 0) :]  # a cache of windows has forgotten the others
    past, width = held.shape[1], index.shape[1]
    none = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    at = torch.arange(past + width, device=index.device)
    row = at[past:, None]
    mask = mask.expand(len(index), -1, -1, -1)
    if kind in ("full_attention", "sliding_attention"):
        ahead = mask[:, :1, :, past : past + size]
        ahead = (ahead if mask.dtype == torch.bool else ahead == 0).triu(1)  # images of Gemma 3
        ahead = ahead | ahead.transpose(2, 3)
        ahead = ahead | torch.diag_embed(ahead.any(3))  # a merged token and the one it replaces
        seen = pad(_pairs(ahead, index, index), (past, 0)) | (at <= row)
        if kind == "sliding_attention" and getattr(config, "sliding_window", None):
            seen = seen & (row - at < config.sliding_window)
        new = seen if mask.dtype == torch.bool else torch.zeros_like(seen, dtype=mask.dtype).masked_fill(~seen, none)
    else:
        new = _pairs(mask, index, torch.cat((at[:past].expand(len(index), -1), index + past), 1))
    new = new.masked_fill(~torch.cat((held, rows.shown), 1)[:, None, None] & (at != row), none)
    kinds = getattr(config, "layer_types", None) or [kind]
    room = 0 if run.cache is None else run.cache.get_mask_sizes(width, kinds.index(kind) if kind in kinds else 0)[0]
    return pad(new, (0, room - len(at)), value=none) if room > len(at) else new  # of a static cache


def _pairs(values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Entries [R, H, W, C] of values [R, H, S, ...] at rows [R, W] and columns [R, C]."""
    found = values.gather(2, rows[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[3]))
    return found.gather(3, columns[:, None, None].expand(-1, values.shape[1], rows.shape[1], -1))


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
    ids, asks = np.take_along_axis(prompt.ids, index, 1), np.take_along_axis(prompt.asks, index, 1) & rows.real
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
