"""Attention that a token gets: inside the vision tower (s_v, paper section 3.1), and from the words of the question
in the language model's first layer (s_c: SCAP, the static cross-attention probe, section 3.2).

A host takes queries and keys of one vision block with hooks, so that the tower keeps its fast attention kernel; for the
probe it projects the queries of the text rows and the keys of the whole sequence with layer 0's own modules, before the
language model runs. Float32 throughout.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from llava_consensus.reduction.method import Shape
from llava_consensus.reduction.options import choose
from llava_consensus.reduction.selection import counting
from llava_consensus.reduction.tokens import TextProbe, VisionAttention, ensure_finite

EPSILON = 1e-6
Aggregate = Literal["all", "last", "max"]
AGGREGATES = get_args(Aggregate)
TOWER_CHUNK = 1 << 23  # numbers of all heads held at once by `received_saliency`, 32 MiB
PROBE_CHUNK = 1 << 25  # numbers of all heads held at once by `_text_chunks`, 128 MiB


def class_saliency(attention: VisionAttention, own: bool = False) -> Tensor:
    """Attention the class token pays to each patch, mean over heads: [U, N]; the softmax runs over all N + 1 keys.

    A tower without a class token has no such row: there it is `received_saliency`.
    """
    if not attention.classes:
        return received_saliency(attention, own)
    weights = _attend(attention, slice(0, 1)).mean((1, 2))  # [U, 1 + N]
    return ensure_finite("vision saliency", weights[:, attention.classes :])


def received_saliency(attention: VisionAttention, own: bool = False) -> Tensor:
    """Attention each patch receives from the other patches, and with `own` from itself, mean over them and over heads:
    [U, N]. Works through the queries in chunks of at most TOWER_CHUNK numbers.
    """
    first, (units, heads, length) = attention.classes, attention.query.shape[:3]
    patches = length - first
    step = max(1, TOWER_CHUNK // (units * heads * length))
    parts: list[Tensor] = []  # [U, N] each
    for start in range(first, length, step):
        rows = slice(start, min(start + step, length))
        weights = _attend(attention, rows)[..., first:].mean(1)  # [U, chunk, N]
        parts.append(weights.sum(1))
        if not own:
            diagonal = weights.diagonal(offset=start - first, dim1=1, dim2=2)  # [U, chunk]
            parts[-1][:, start - first : rows.stop - first] -= diagonal
    received = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
    return ensure_finite("vision saliency", received.clamp_min(0) / max(patches - (not own), 1))


def class_flops(shape: Shape) -> float:
    """FLOPs of `class_saliency` for all tiles of an image."""
    queries = 1 if shape.classes else shape.patches
    return 2.0 * shape.tiles * queries * (shape.patches + shape.classes) * shape.vision_width


def pair_flops(shape: Shape, losing: Sequence[tuple[int, int]], width: int) -> float:
    """FLOPs of `class_saliency` and of the cosines of all pairs of vectors of this width, in units that lose tokens
    [(left, size)]; nothing where none does.
    """
    return sum(2.0 * size**2 * width for _, size in losing) + (class_flops(shape) if losing else 0.0)


def pool_tiles(saliency: Tensor, tile: Tensor, tiles: int) -> Tensor:
    """One scale for an image of several tiles (`tile_budget=global`): each tile's saliency sums to its share of the
    image's tokens.

    Args:
        saliency: [B, N].
        tile: [B, N] tile of each token; the tiles of a unit are numbered without gaps.
        tiles: how many tiles a unit has.
    """
    local = tile - tile.amin(1, keepdim=True)
    total = saliency.new_zeros(len(tile), tiles).scatter_add_(1, local, saliency)
    count = saliency.new_zeros(len(tile), tiles).scatter_add_(1, local, torch.ones_like(saliency))
    scale = count / tile.shape[1] / total.clamp_min(torch.finfo(total.dtype).tiny)
    return saliency * scale.gather(1, local)


def _attend(attention: VisionAttention, rows: slice) -> Tensor:
    """Softmax rows of the block's attention in float32: [U, H, rows, C + N]."""
    return torch.softmax(products(attention.query[:, :, rows].float(), attention.key.float(), attention.scale), dim=-1)


def products(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Scaled products of all pairs, in one operation: [U, H, L, d], [U, H, S, d] -> [U, H, L, S]."""
    query, key, shape = query.flatten(0, 1), key.flatten(0, 1), query.shape[:2]
    scaled = torch.baddbmm(query[:, :1, :1], query, key.transpose(1, 2), beta=0, alpha=scale)
    return scaled.unflatten(0, shape)


def text_attention(probe: TextProbe, rope: bool = True) -> Tensor:
    """Head-mean causal attention of the text rows over all earlier keys: [I, L, S]. Rows that are padding are zero.

    Args:
        probe: queries and keys.
        rope: whether both are rotated.
    """
    return torch.cat([attention for _, attention in _text_chunks(probe, rope)], dim=1)


def text_saliency(
    probe: TextProbe,
    prompt: Tensor,
    columns: Tensor,
    asking: Tensor | None = None,
    aggregate: str = "all",
    rope: bool = True,
) -> Tensor:
    """`cross_saliency` in the rows of `text_attention` (SCAP): [B, N].

    Works through the rows in chunks: the largest tensor has `PROBE_CHUNK` numbers, however many units a prompt has.

    Args:
        probe: queries and keys.
        prompt: [B] prompt of each unit.
        columns: [B, N] places of its visual tokens.
        asking: [B, L] true if a row asks about the unit; None if all do.
        aggregate: as in `cross_saliency`.
        rope: whether queries and keys are rotated.
    """
    weight, count = _row_weights(asking, probe.rows.shape[1], aggregate, columns.device)
    total: Tensor | None = None
    for chunk, attention in _text_chunks(probe, rope):  # [I, l, S]
        if len(columns) == 1 == len(attention):  # fewer operations
            visual = attention.index_select(2, columns[0])  # [1, l, N]
        else:
            place = counting(attention.shape[1], columns.device)[:, None]
            visual = attention[prompt[:, None, None], place, columns[:, None]]  # [B, l, N]
        part = _of_rows(visual, None if weight is None else weight[:, chunk], aggregate)
        total = part if total is None else torch.maximum(total, part) if aggregate == "max" else total + part
    assert total is not None  # there is a chunk, even of no rows
    return _finished(total, count, aggregate)


def _text_chunks(probe: TextProbe, rope: bool) -> Iterator[tuple[slice, Tensor]]:
    """Rows of `text_attention`, a chunk [I, l, S] at a time."""
    key = rotate(probe.key.float(), probe.cos.float(), probe.sin.float()) if rope else probe.key.float()
    prompts, heads, rows = probe.query.shape[:3]
    step = max(1, PROBE_CHUNK // (prompts * heads * key.shape[2]))
    for start in range(0, max(rows, 1), step):
        chunk = slice(start, start + step)
        weights = head_rows(probe, chunk, key, rope).mean(1)
        yield chunk, weights * probe.row_mask[:, chunk, None] if probe.padded else weights


def head_rows(probe: TextProbe, chunk: slice = slice(None), key: Tensor | None = None, rope: bool = True) -> Tensor:
    """Causal attention of the text rows of a chunk over the sequence, head by head, in float32: [I, H, l, S]. A row
    that is padding sees everything, so that its softmax is finite.

    Args:
        key: rotated keys, if they were made already.
    """
    query, places = probe.query[:, :, chunk].float(), probe.rows[:, chunk]
    if key is None:
        key = rotate(probe.key.float(), probe.cos.float(), probe.sin.float())
    if rope and probe.cos.shape[-1]:
        at = places[..., None].expand(-1, -1, probe.cos.shape[-1])
        query = rotate(query, probe.cos.float().gather(1, at), probe.sin.float().gather(1, at))
    # [I, H_kv, groups l, d] of all heads that share a key head, times [I, H_kv, d, S]
    logits = products(query.reshape(len(query), key.shape[1], -1, query.shape[3]), key, probe.scale)
    if probe.cap:
        logits = torch.tanh(logits / probe.cap) * probe.cap
    logits = logits.view(len(query), -1, query.shape[2], key.shape[2])
    if probe.bias is not None:
        logits = logits + probe.bias[:, :, chunk]
    hidden = counting(key.shape[2], key.device) > places[..., None]  # [I, l, S]
    if probe.key_mask is not None:
        hidden |= ~(probe.key_mask[:, chunk] if probe.key_mask.ndim > 2 else probe.key_mask[:, None])
    if probe.padded:
        hidden &= probe.row_mask[:, chunk, None]
    logits = logits.masked_fill_(hidden[:, None], -torch.inf)
    if probe.sink is not None:
        logits = torch.cat((logits, probe.sink[:, :, chunk]), -1)
    return torch.softmax(logits, dim=-1)[..., : key.shape[2]]


def cross_saliency(
    attention: Tensor, asking: Tensor | None, columns: Tensor | None = None, aggregate: str = "all"
) -> Tensor:
    """Saliency of the visual tokens in the text rows' attention.

    Args:
        attention: [B, L, S] rows of `text_attention`, one prompt per unit.
        asking: [B, L] true if a row asks about the unit; None if all do.
        columns: [B, N] places of the visual tokens in the sequence; None if the attention is over them only.
        aggregate: `all` (mean of the normalised rows) | `last` (the last row) | `max` (largest over the rows).
    Returns:
        [B, N]; all zero where no row asks.
    """
    choose("aggregate", aggregate, AGGREGATES)
    if columns is None:
        visual = attention
    elif len(columns) == 1:  # fewer operations
        visual = attention.index_select(2, columns[0])
    else:
        visual = attention.gather(2, columns[:, None].expand(-1, attention.shape[1], -1))  # [B, L, N]
    if not visual.shape[1]:
        return visual.new_zeros(visual.shape[::2])
    weight, count = _row_weights(asking, visual.shape[1], aggregate, visual.device)
    return _finished(_of_rows(visual, weight, aggregate), count, aggregate)


def _row_weights(
    asking: Tensor | None, rows: int, aggregate: str, device: torch.device
) -> tuple[Tensor | None, Tensor | int]:
    """Which rows count, [B or 1, L] or None for all, and how many they are, [B, 1]."""
    if aggregate != "last":
        return asking, rows if asking is None else asking.sum(1, keepdim=True).clamp_min(1)
    place = counting(rows, device)[None]
    if asking is None:
        return place == rows - 1, 1
    return asking & (place == (asking * place).amax(1, keepdim=True)), 1


def _of_rows(visual: Tensor, weight: Tensor | None, aggregate: str) -> Tensor:
    """Part of a saliency by these rows: [B, l, N] -> [B, N]."""
    if weight is not None:
        visual = visual * weight[..., None]
    return visual.amax(1) if aggregate == "max" else _norm(visual).sum(1)


def _finished(total: Tensor, count: Tensor | int, aggregate: str) -> Tensor:
    """The saliency of all parts, checked."""
    return ensure_finite("cross-modal saliency (SCAP)", _norm(total) if aggregate == "max" else total / count)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, the two halves of a head being the pairs: states [I, H, T, d], angles [I, T, d]; those
    of width 0 turn nothing, for states that are rotated already.
    """
    if not cos.shape[-1]:
        return states
    first, second = states.chunk(2, dim=-1)
    sin_first, sin_second = sin[:, None].chunk(2, dim=-1)
    rotated = states * cos[:, None]
    left, right = rotated.chunk(2, dim=-1)
    left.addcmul_(second, sin_first, value=-1)  # in place: half the time of a concatenation
    right.addcmul_(first, sin_second)
    return rotated


def _norm(rows: Tensor) -> Tensor:
    """Each row divided by its sum plus epsilon; a row without visual mass stays zero."""
    return rows / (rows.sum(-1, keepdim=True) + EPSILON)
