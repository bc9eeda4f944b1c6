"""Vision-side saliency s_v: how much attention a patch gets inside the vision tower (paper section 3.1).

Reads the query and key of one block, which a host takes with hooks, so that the tower keeps its fast attention kernel.
Float32 throughout.
"""

import torch
from torch import Tensor

from llava_consensus.reduction.checks import ensure_finite
from llava_consensus.reduction.tokens import VisionAttention

QUERY_CHUNK = 64  # rows of attention held at once by `received_saliency`


def class_saliency(attention: VisionAttention) -> Tensor:
    """Attention the class token pays to each patch, mean over heads: [U, N]; the softmax runs over all N + 1 keys.

    A tower without a class token has no such row: there it is `received_saliency`.
    """
    if not attention.classes:
        return received_saliency(attention)
    weights = _attend(attention, slice(0, 1)).mean((1, 2))  # [U, 1 + N]
    return ensure_finite("vision saliency", weights[:, attention.first :])


def received_saliency(attention: VisionAttention) -> Tensor:
    """Attention each patch receives from the other patches, mean over them and over heads: [U, N].

    Works through the queries in chunks: the largest tensor is [U, H, 64, C + N].
    """
    first, length = attention.first, attention.query.shape[2]
    patches = length - first
    received = attention.query.new_zeros(attention.query.shape[0], patches, dtype=torch.float32)
    for start in range(first, length, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, length)
        weights = _attend(attention, slice(start, stop))[..., first:].mean(1)  # [U, chunk, N]
        diagonal = weights.diagonal(offset=start - first, dim1=1, dim2=2)  # [U, chunk]
        received += weights.sum(1)
        received[:, start - first : stop - first] -= diagonal
    return ensure_finite("vision saliency", received.clamp_min(0) / max(patches - 1, 1))


def pool_tiles(saliency: Tensor, tile: Tensor, tiles: int) -> Tensor:
    """One scale for a picture of several tiles (`tile_budget=global`): each tile's saliency sums to its share of the
    picture's tokens.

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
    query, key = attention.query[:, :, rows].float(), attention.key.float()
    return torch.softmax(query @ key.transpose(-1, -2) * attention.scale, dim=-1)
