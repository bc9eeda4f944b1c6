"""Selection of tokens: rankings and sets as index tensors, the same on every device; the two fusers, which make one
choice of two saliencies (paper section 3.3); a choice of tokens that differ (beyond the paper); and the end of
every reduction, tokens in output order with where each input token went. Torch only.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, normalize, one_hot, pad

from llava_consensus.reduction.tokens import Reduction, ensure_finite

CHUNK = 8  # steps of `greedy` between two summaries of the chosen tokens


@lru_cache(maxsize=128)
def counting(count: int, device: torch.device) -> Tensor:
    """0..count-1, made once for each device. Never write to it."""
    with torch.inference_mode(False):  # a tensor made in inference mode could not be saved for a backward pass
        return torch.arange(count, device=device)


@lru_cache(maxsize=32)
def zones(*parts: tuple[int, int], device: torch.device) -> Tensor:
    """Zones of `Reduction` for parts of the output, each a zone and how many slots it has. Never write to it."""
    with torch.inference_mode(False):
        return torch.tensor([zone for zone, count in parts for _ in range(count)], dtype=torch.long, device=device)


def rank(saliency: Tensor) -> Tensor:
    """Indices by (saliency descending, index ascending): [..., N] -> [..., N]. Stable on every device."""
    return torch.sort(saliency, dim=-1, descending=True, stable=True).indices


def indices(mask: Tensor, count: int) -> Tensor:
    """Indices of the first `count` true places of each row, which has at least these: [B, N] -> [B, count]."""
    return torch.sort(mask.view(torch.uint8), dim=-1, descending=True, stable=True).indices[..., :count]


def split_best(saliency: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best tokens and the others, both in ascending index order: [B, N] -> [B, count], [B, N - count]."""
    best, others = rank(saliency).split((count, saliency.shape[1] - count), dim=1)
    return best.sort(dim=1).values, others.sort(dim=1).values


def membership(index: Tensor, size: int) -> Tensor:
    """Mask of the places among `size` that an index [B, K] names: bool [B, size]."""
    return index.new_zeros(len(index), size, dtype=torch.bool).scatter_(1, index, True)


def apart(chosen: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The chosen tokens of 0..size-1 and the others, both ascending: [B, K] -> [B, K], [B, size - K]."""
    chosen_last = torch.sort(membership(chosen, size).view(torch.uint8), dim=-1, stable=True).indices
    others, kept = chosen_last.split((size - chosen.shape[1], chosen.shape[1]), dim=1)
    return kept, others


def left_over(kept: Tensor, size: int) -> Tensor:
    """The tokens of 0..size-1 that are not kept, ascending: [B, K] -> [B, size - K]."""
    return apart(kept, size)[1]


def distinct(chosen: Tensor, size: int, by: Tensor | None = None) -> Tensor:
    """Choices [B, K] among `size` places in their order, none twice: steps that find nothing left to gain repeat a
    place, or take place `size`, and their seats go to the free places that are first by [B, size], or lowest.
    """
    count = chosen.shape[1]
    steps = counting(count + size + 1, chosen.device)
    # the step that chose a place; places that no step chose come after all steps
    after = steps[count:].expand(len(chosen), -1) if by is None else pad(rank(by).argsort(1) + count, (0, 1))
    step = after.scatter_reduce(1, chosen, steps[:count].expand_as(chosen), "amin")[:, :size]
    return step.argsort(dim=1)[:, :count]


def pick(values: Tensor, index: Tensor) -> Tensor:
    """Rows of [B, N, D] named by an index [B, K]: [B, K, D]."""
    if len(values) == 1:  # fewer operations
        return embedding(index, values[0])
    return values[counting(len(values), index.device)[:, None], index]  # whole rows, unlike `gather`


def temperature(saliency: Tensor, tau: float = 1.0) -> Tensor:
    """s^(1/tau), normalised to sum 1: [B, N] -> [B, N]. A zero stays zero; an all-zero row becomes uniform."""
    if tau != 1.0:  # divided by the largest first, so that a small tau does not underflow
        peak = saliency.amax(-1, keepdim=True)
        saliency = torch.where(peak > 0, saliency / peak, saliency).pow(1.0 / tau)
    return (saliency / saliency.sum(-1, keepdim=True)).nan_to_num(nan=1.0 / saliency.shape[-1])  # 0 / 0 if all are 0


def convex(vision: Tensor, cross: Tensor, alpha: float) -> Tensor:
    """alpha s_v + (1 - alpha) s_c: [B, N], [B, N] -> [B, N]."""
    return torch.lerp(cross, vision, alpha)


def top(saliency: Tensor, count: int) -> Tensor:
    """The `count` best tokens in ascending index order: [B, N] -> [B, count]."""
    return rank(saliency)[:, :count].sort(dim=-1).values


def recover(student: Tensor, teacher: Tensor, count: int, rate: float) -> Tensor:
    """The student's best K - m tokens, then the teacher's best not yet kept until m = floor(rate K) are added.

    Args:
        student, teacher: [B, N] saliencies.
        count: K, at most N.
        rate: r in [0, 1].
    Returns:
        [B, K] ascending indices.
    """
    added = recovered(count, rate)
    student_best = rank(student)[:, : count - added]  # [B, K - m]
    kept = membership(student_best, student.shape[1])
    order = rank(teacher)  # [B, N]
    is_new = ~kept.gather(1, order)
    chosen = is_new & (is_new.cumsum(1) <= added)
    kept = kept.scatter(1, order, kept.gather(1, order) | chosen)
    return indices(kept, count)


def recovered(count: int, rate: float) -> int:
    """m = floor(r K); a product that is whole but for rounding (0.3 x 10) counts as whole."""
    return math.floor(rate * count + 1e-9)


def agreement(vision: Tensor, cross: Tensor, count: int) -> Tensor:
    """|top_v intersect top_c| / K for each row: [B, N], [B, N] -> [B]."""
    size = vision.shape[1]
    shared = membership(top(vision, count), size) & membership(top(cross, count), size)
    return shared.sum(1) / count


def correction_factor(student: Tensor, teacher: Tensor, count: int, rate: float) -> Tensor:
    """(K - c) / (K - m), c the shortest prefix of the teacher's ranking with m tokens that the student does not keep: 1
    where the teacher's best m are all new to it, less the further down it must look. [B].
    """
    added = recovered(count, rate)
    if count == added:
        return torch.ones(len(student), device=student.device)
    kept = membership(rank(student)[:, : count - added], student.shape[1])
    new_tokens = (~kept.gather(1, rank(teacher))).cumsum(1)  # [B, N] in each prefix of the teacher's ranking
    prefix = (new_tokens < added).sum(1) + (1 if added else 0)
    return (count - prefix) / (count - added)


def diverse(saliency: Tensor, features: Tensor, count: int, quality: float) -> Tensor:
    """K tokens, each the best of saliency^quality x distance to the nearest kept token, the most salient one first.

    Args:
        saliency: [B, N], not negative.
        features: [B, N, D_v] by which tokens are alike; the distance is 1 - cosine.
        count: K, at most N.
        quality: exponent of the saliency; 0 is farthest point sampling, large is plain top-K.
    Returns:
        [B, K] ascending. Ties go to the lower index.
    """
    points = normalize(ensure_finite("features of the vision tower", features.float()), dim=-1)
    weight = saliency.clamp_min(torch.finfo(torch.float32).tiny).log() * quality  # [B, N]
    table = cosines(points)
    table[:, :-1].neg_().add_(1).clamp_min_(1e-6).log_().add_(weight[:, None]).neg_()
    return greedy(table, count, first=saliency.argmax(1, keepdim=True)).sort(dim=1).values


def cosines(points: Tensor) -> Tensor:
    """Products of all pairs of points [B, N, D], and one row more that `greedy` writes to: [B, N + 1, N]."""
    size = points.shape[1]
    table = points.new_empty(len(points), size + 1, size)
    torch.bmm(points, points.transpose(1, 2), out=table[:, :size])
    return table


def greedy(table: Tensor, count: int, first: Tensor | None = None, start: Tensor | None = None) -> Tensor:
    """Farthest point sampling: each step chooses the token that loses least by the tokens chosen before it, the loss of
    a token being the largest by any of them.

    A step is two operations: `argmin` writes the choice into a bag of indices, and `embedding_bag` takes the maximum of
    the bag's rows. Bags have CHUNK choices, so that a step reads few rows however many tokens are chosen.

    Args:
        table: [B, N + 1, N], row j being the loss of each token when j is chosen. Its diagonal and its last row, which
            sums up the choices in full bags, are overwritten.
        count: tokens to choose.
        first: [B, 1] the first choice; None: by `start`.
        start: [B, N] losses before the first step, infinite for tokens that are not to be chosen.
    Returns:
        [B, count] in the order of the choices, none twice while a loss is finite. Ties go to the lower index.
    """
    batch, size = len(table), table.shape[2]
    table.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    current = summary = table[:, size]  # [B, N]
    if start is None:
        summary.fill_(-torch.inf)
    else:
        summary.copy_(start)
    rows = table.flatten(0, 1)
    offset = counting(batch, rows.device)[:, None] * (size + 1) if batch > 1 else None  # of each unit in the rows
    # [chunks, B, 1 + CHUNK]: bags begin full of the summary's row, which may be named more than once
    bags = torch.full((-(-count // CHUNK), batch, 1 + CHUNK), size, device=rows.device)
    if offset is not None:
        bags += offset
    begins = counting(batch * (1 + CHUNK), rows.device)[:: 1 + CHUNK]
    for step in range(count):
        bag, place = bags[step // CHUNK], step % CHUNK + 1
        slot = bag[:, place : place + 1]
        if step == 0 and first is not None:
            slot.copy_(first) if offset is None else torch.add(first, offset, out=slot)
        elif offset is None:
            torch.argmin(current, dim=1, keepdim=True, out=slot)
        else:
            torch.add(current.argmin(1, keepdim=True), offset, out=slot)
        if step + 1 < count:
            current = torch.embedding_bag(rows, bag.view(-1), begins, mode=2)[0]  # 2: the maximum
            if place == CHUNK:
                summary.copy_(current)
    chosen = bags[:, :, 1:].transpose(0, 1).flatten(1)[:, :count]
    return chosen if offset is None else chosen - offset


def topped_up(seats: Tensor, by: Tensor, total: int) -> Tensor:
    """Seats [B, G], `total` of them: one more for each of the groups that are first by [B, G]."""
    return seats + (rank(by).argsort(1) < total - seats.sum(1, keepdim=True))


def seated(order: Tensor, group: Tensor, seats: Tensor, count: int) -> Tensor:
    """The first `count` tokens of a ranking in which no group takes more than its seats. Free seats go to the next of
    the ranking, whatever their group.

    Args:
        order: [B, N] tokens, the best first.
        group: [B, N] of each token, in 0..G-1.
        seats: [B, G].
        count: at most N.
    Returns:
        [B, count] in the order of the ranking, those without a seat of their group behind the others.
    """
    in_order = group.gather(1, order)
    place = one_hot(in_order, seats.shape[1]).cumsum(1).gather(2, in_order[..., None])[..., 0]  # in its group, from 1
    return order.gather(1, indices(place <= seats.gather(1, in_order), count))


class Folded(NamedTuple):
    """Merged tokens and their members. Indices count the unit's own tokens."""

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
        folded: None if nothing was merged.
    """
    return arrange(pick(projected, kept), kept, projected.shape[1], order, folded, ascending=True)


def arrange(
    kept_tokens: Tensor,
    kept: Tensor,
    size: int,
    order: str,
    folded: Folded | None = None,
    ascending: bool = False,
    ahead: Tensor | None = None,
) -> Reduction:
    """The reduced tokens with their bookkeeping, for methods that change the tokens they keep.

    Args:
        kept_tokens: [B, K, D] the tokens that represent the kept ones.
        kept: [B, K] in the order of `kept_tokens`.
        size: N.
        order: `raster` sorts by place; any other leaves kept tokens as given, and merged ones after them.
        folded: None if nothing was merged.
        ascending: whether `kept` is known to ascend.
        ahead: [B, A, D] tokens in front that represent no patch.
    Raises:
        NonFiniteError: for tokens that are NaN or infinite, as where float16 overflows.
    """
    source, parts, anchors = kept, [kept_tokens], kept[:, :0]
    if folded is not None:
        anchors, parts = folded.anchors, [kept_tokens, folded.tokens]
        source = torch.cat((kept, anchors), dim=1)
    if order == "raster":
        source, place = source.sort(dim=1)
        parts = [pick(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), place)]
    first = 0 if ahead is None else ahead.shape[1]
    if folded is not None and order == "raster":  # tokens that are not kept are in the group of an anchor
        leader = counting(size, kept.device).expand(len(kept), -1)
        leader = leader.scatter(1, folded.rest, anchors.gather(1, folded.group))
        owner = torch.searchsorted(source, leader) + first if first else torch.searchsorted(source, leader)
    else:
        slots = counting(first + source.shape[1], kept.device)[first:]
        owner = kept.new_full((len(kept), size), -1).scatter_(1, source, slots.expand_as(source))
        if folded is not None:
            owner.scatter_(1, folded.rest, folded.group + (first + kept.shape[1]))
    if ahead is not None:
        parts, source = [ahead, *parts], pad(source, (first, 0), value=-1)
    tokens = ensure_finite("reduced tokens", parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
    return Reduction(tokens, kept if ascending else kept.sort(dim=1).values, anchors, source, owner)


def regroup(projected: Tensor, slot: Tensor, count: int) -> Reduction:
    """One row for each token that a tower has merged already, where every patch carries a copy of its token. A token is
    at its first patch.

    Args:
        projected: [B, N, D], equal rows where slots are equal.
        slot: [B, N] which token of the tower a patch is in.
        count: rows to give; no unit has more slots. Where a unit has fewer (a tile of which unpadding cut a part away),
            the first patches that repeat a token fill up, so that the number depends only on the budget.
    """
    places = counting(slot.shape[1], slot.device).expand_as(slot)
    lowest = torch.full_like(slot, slot.shape[1]).scatter_reduce(1, slot, places, "amin")
    first = lowest.gather(1, slot)  # [B, N] the first patch with the same token
    chosen = indices(first == places, count).sort(dim=1).values
    leader = torch.where(membership(chosen, slot.shape[1]), places, first)
    tokens = ensure_finite("reduced tokens", pick(projected, chosen))
    return Reduction(tokens, chosen[:, :0], chosen, chosen, torch.searchsorted(chosen, leader))
