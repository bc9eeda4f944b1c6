"""SCAP, the static cross-attention probe: what the question's words look at in the language model's first layer (paper
section 3.2).

The probe runs before the language model: a host projects the queries of the text rows and the keys of the whole
sequence with layer 0's own modules, this file turns them into a saliency of the visual tokens. Never more than L x S
numbers per head are held. Float32 throughout.
"""

import torch
from torch import Tensor

from llava_consensus.reduction.checks import choose, ensure_finite
from llava_consensus.reduction.tokens import TextProbe

EPSILON = 1e-6
AGGREGATES = ("all", "last", "max")


def text_attention(probe: TextProbe, rope: bool = True) -> Tensor:
    """Head-mean causal attention of the text rows over all earlier keys: [I, L, S]. Rows that are padding are zero."""
    query, key = probe.query.float(), probe.key.float()
    if rope:
        cos, sin = probe.cos.float(), probe.sin.float()
        at_rows = probe.rows[..., None].expand(*probe.rows.shape, cos.shape[-1])
        query = rotate(query, cos.gather(1, at_rows), sin.gather(1, at_rows))
        key = rotate(key, cos, sin)
    groups = query.shape[1] // key.shape[1]
    query = query.unflatten(1, (key.shape[1], groups))  # [I, H_kv, groups, L, d]
    logits = query @ key.unsqueeze(2).transpose(-1, -2) * probe.scale  # [I, H_kv, groups, L, S]
    place = torch.arange(key.shape[2], device=key.device)
    visible = (place <= probe.rows[..., None]) & probe.key_mask[:, None]  # [I, L, S]
    # a padding row sees everything, so that its softmax is finite; it is zeroed below
    visible = visible | ~probe.row_mask[..., None]
    weights = torch.softmax(logits.masked_fill(~visible[:, None, None], float("-inf")), dim=-1).mean((1, 2))
    return weights * probe.row_mask[..., None]


def cross_saliency(attention: Tensor, row_mask: Tensor, columns: Tensor, aggregate: str = "all") -> Tensor:
    """Saliency of the visual tokens in the text rows' attention.

    Args:
        attention: [B, L, S] rows of `text_attention`, one prompt per unit.
        row_mask: [B, L] true where a row is real, the real ones first.
        columns: [B, N] places of the visual tokens in the sequence.
        aggregate: `all` (mean of the normalised rows) | `last` (the last row) | `max` (largest over the rows).
    Returns:
        [B, N]; all zero where a prompt has no text row.
    """
    choose("aggregate", aggregate, AGGREGATES)
    visual = attention.gather(2, columns[:, None].expand(-1, attention.shape[1], -1))  # [B, L, N]
    count = row_mask.sum(1, keepdim=True)
    if visual.shape[1] == 0:
        return visual.new_zeros(columns.shape)
    if aggregate == "last":
        row = (count - 1).clamp_min(0)[..., None].expand(-1, 1, visual.shape[2])
        saliency = _norm(visual.gather(1, row)[:, 0])
    elif aggregate == "max":
        saliency = _norm(visual.amax(1))
    else:
        saliency = _norm(visual).sum(1) / count.clamp_min(1)
    return ensure_finite("cross-modal saliency (SCAP)", saliency)


def position_prior(probe: TextProbe, columns: Tensor, aggregate: str = "all") -> Tensor:
    """The saliency each visual token would have if all of them were the same token, the mean key: what is left is the
    pull of positions alone. Beyond the paper: dividing by it removes SCAP's position bias.

    Args:
        probe: of the prompts, one for each unit.
        columns: [B, N] places of the visual tokens in the sequence.
    Returns:
        [B, N], sum 1 over each row that has text.
    """
    places = columns[:, None, :, None].expand(-1, probe.key.shape[1], -1, probe.key.shape[3])
    mean = probe.key.gather(2, places).float().mean(2, keepdim=True).expand(-1, -1, columns.shape[1], -1)
    flat = probe._replace(key=probe.key.float().scatter(2, places, mean))
    return cross_saliency(text_attention(flat), probe.row_mask, columns, aggregate)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, the two halves of a head being the pairs: states [I, H, T, d], angles [I, T, d]."""
    first, second = states.chunk(2, dim=-1)
    return states * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def _norm(rows: Tensor) -> Tensor:
    """Each row divided by its sum plus epsilon; a row without visual mass stays zero."""
    return rows / (rows.sum(-1, keepdim=True) + EPSILON)
