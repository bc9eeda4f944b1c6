"""The end of every reduction: kept and merged tokens in output order, and where each input token went (method.md 6)."""

from typing import NamedTuple

import torch
from torch import Tensor

from llava_consensus.tokens import Reduction, indices, membership


class Folded(NamedTuple):
    """Merged tokens and what they were made of. Indices count the unit's own tokens."""

    tokens: Tensor  # [B, M, D]
    anchors: Tensor  # [B, M] ascending
    rest: Tensor  # [B, R] tokens that were not kept, ascending
    group: Tensor  # [B, R] which of the M each of them joined


def assemble(projected: Tensor, kept: Tensor, order: str, folded: Folded | None = None) -> Reduction:
    """The reduced tokens with their bookkeeping.

    Args:
        projected: [B, N, D] all tokens of the unit.
        kept: [B, K] ascending.
        order: `top_then_merged` | `raster`.
        folded: None where nothing was merged.
    """
    count, size = kept.shape[1], projected.shape[1]
    tokens, source = pick(projected, kept), kept
    anchors = kept[:, :0]
    if folded is not None:
        anchors = folded.anchors
        tokens, source = torch.cat((tokens, folded.tokens), dim=1), torch.cat((kept, anchors), dim=1)
    slots = torch.arange(source.shape[1], device=kept.device).expand(len(kept), -1)
    if order == "raster":
        source, place = source.sort(dim=1)
        tokens, slots = pick(tokens, place), place.argsort(dim=1)  # slots of the kept, then of the anchors
    owner = torch.full((len(kept), size), -1, dtype=torch.long, device=kept.device).scatter(1, kept, slots[:, :count])
    if folded is not None:
        owner = owner.scatter(1, folded.rest, slots[:, count:].gather(1, folded.group))
    return Reduction(tokens, kept, anchors, source, owner)


def left_over(kept: Tensor, size: int) -> Tensor:
    """The tokens of 0..size-1 that are not kept, ascending: [B, K] -> [B, size - K]."""
    return indices(~membership(kept, size), size - kept.shape[1])


def pick(values: Tensor, index: Tensor) -> Tensor:
    """Rows of [B, N, D] named by an index [B, K]: [B, K, D]."""
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[-1]))
