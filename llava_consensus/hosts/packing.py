"""Packed sequences: several prompts in one row, whose positions begin again at 0 (padding-free training). Methods and
the decoder are given a row for each prompt, so that every method reduces it as a single prompt.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.rows import makes_cache, row_axis, upload

SEGMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")  # of packed rows


class Pack(NamedTuple):
    """B packed rows of length S, as R prompts padded on the left to length L."""

    shape: tuple[int, int]  # B, S
    real: NDArray[np.bool_]  # [R, L] False for padding
    source: Tensor  # [R, L] index into the B S rows; 0 for padding
    place: Tensor  # [B S] index into the R L rows
    shown: Tensor  # `real` on the device

    def split(self, value: Tensor) -> Tensor:
        """An argument [..., B or 1, S, ...] with a row for each prompt, zero where it is padding."""
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


def pack_of(kwargs: dict[str, Any], past: int, config: Any) -> Pack | None:
    """The prompts of a packed call, separated as transformers does; None for any other call.

    Args:
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
    rows = next(kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
    count, size = rows.shape[:2]
    if lengths is not None:
        starts = np.zeros(count * size, dtype=bool)
        starts[lengths[:-1].cpu().numpy()] = True
        starts, again = starts.reshape(count, size), True
    elif positions is None:
        return None
    else:
        step = np.diff(positions.expand(count, -1).cpu().numpy(), axis=1)
        starts, again = np.pad(step != 1, ((0, 0), (1, 0))), bool((step < 0).any())
    caches = makes_cache(kwargs, config)
    if again and mask is not None:
        raise OptionError("attention_mask: prompts that are packed into one row are told apart by position_ids alone")
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
    moved, back, shown = upload([source, np.maximum.accumulate(place), real], device)
    return Pack((count, size), real, moved, back, shown.bool())
