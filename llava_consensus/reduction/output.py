"""The end of every reduction: kept and merged tokens in output order, and where each input token went."""

from typing import NamedTuple

import torch
from torch import Tensor

from llava_consensus.reduction.selection import indices, membership, pick
from llava_consensus.reduction.tokens import Reduction


class Folded(NamedTuple):
    """Merged tokens and what they were made of. Indices count the unit's own tokens."""

    tokens: Tensor  # [B, M, D]
    anchors: Tensor  # [B, M] ascending
    rest: Tensor  # [B, R] tokens that were not kept, ascending
    group: Tensor  # [B, R] which of the M each of them joined


def assemble(projected: Tensor, kept: Tensor, order: str, folded: Folded | None = None) -> Reduction:
    """The reduced tokens with their bookkeeping, kept tokens as they were.

    Args:
        projected: [B, N, D] all tokens of the unit.
        kept: [B, K] ascending.
        order: `top_then_merged` | `raster`.
        folded: None where nothing was merged.
    """
    return arrange(pick(projected, kept), kept, projected.shape[1], order, folded, ascending=True)


def arrange(
    kept_tokens: Tensor, kept: Tensor, size: int, order: str, folded: Folded | None = None, ascending: bool = False
) -> Reduction:
    """The reduced tokens with their bookkeeping, for methods that change what they keep.

    Args:
        kept_tokens: [B, K, D] the tokens that stand for the kept ones.
        kept: [B, K] in the order of `kept_tokens`.
        size: N.
        order: `raster` sorts by place; any other leaves kept tokens as given, and merged ones behind them.
        folded: None where nothing was merged.
        ascending: whether `kept` is known to ascend.
    """
    count, tokens, source = kept.shape[1], kept_tokens, kept
    if folded is not None:
        tokens, source = torch.cat((kept_tokens, folded.tokens), dim=1), torch.cat((kept, folded.anchors), dim=1)
    if order == "raster":
        source, place = source.sort(dim=1)
        tokens, slots = pick(tokens, place), place.argsort(dim=1)  # slots of the kept, then of the anchors
        own, joined = slots[:, :count], None if folded is None else slots[:, count:].gather(1, folded.group)
    else:
        own = torch.arange(count, device=kept.device).expand_as(kept)
        joined = None if folded is None else folded.group + count
    owner = kept.new_full((len(kept), size), -1).scatter_(1, kept, own)
    if folded is not None and joined is not None:
        owner.scatter_(1, folded.rest, joined)
    anchors = kept[:, :0] if folded is None else folded.anchors
    return Reduction(tokens, kept if ascending else kept.sort(dim=1).values, anchors, source, owner)


def regroup(projected: Tensor, slot: Tensor, count: int, order: str) -> Reduction:
    """One row for each token that a tower has merged already, where every patch carries a copy of its token.

    Args:
        projected: [B, N, D], equal rows where slots are equal.
        slot: [B, N] which token of the tower a patch is in.
        count: rows to give; no unit has more slots. Where a unit has fewer (a tile of which unpadding cut a part away),
            the first patches that repeat a token fill up, so that the number depends on the budget alone.
        order: as for `assemble`; in raster order a token stands at its first patch.
    """
    places = torch.arange(slot.shape[1], device=slot.device).expand_as(slot)
    lowest = torch.full_like(slot, slot.shape[1]).scatter_reduce(1, slot, places, "amin")
    first = lowest.gather(1, slot)  # [B, N] the first patch with the same token
    chosen = indices(first == places, count).sort(dim=1).values
    leader = torch.where(membership(chosen, slot.shape[1]), places, first)
    folded = Folded(pick(projected, chosen), chosen, places, torch.searchsorted(chosen, leader))
    return assemble(projected, chosen[:, :0], order, folded)
