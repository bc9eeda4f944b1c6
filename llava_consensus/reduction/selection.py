"""Which tokens stay: rankings and sets of tokens as index tensors, the same on every device; the two fusers, which make
one choice of two saliencies (paper section 3.3); and a choice of tokens that differ (beyond the paper). Torch only.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import embedding, normalize


def rank(saliency: Tensor) -> Tensor:
    """Indices by (saliency descending, index ascending): [..., N] -> [..., N]. Stable, so ties never depend on the
    device.
    """
    return torch.sort(saliency, dim=-1, descending=True, stable=True).indices


def indices(mask: Tensor, count: int) -> Tensor:
    """The first `count` true places of each row, ascending, where each row has so many: [B, N] -> [B, count]."""
    return torch.sort(mask.to(torch.uint8), dim=-1, descending=True, stable=True).indices[..., :count]


def split_best(saliency: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best tokens and the others, both in ascending index order: [B, N] -> [B, count], [B, N - count]."""
    best, others = rank(saliency).split((count, saliency.shape[1] - count), dim=1)
    return best.sort(dim=1).values, others.sort(dim=1).values


def membership(index: Tensor, size: int) -> Tensor:
    """Which of `size` places an index [B, K] names: bool [B, size]."""
    return torch.zeros(index.shape[0], size, dtype=torch.bool, device=index.device).scatter_(1, index, True)


def left_over(kept: Tensor, size: int) -> Tensor:
    """The tokens of 0..size-1 that are not kept, ascending: [B, K] -> [B, size - K]."""
    return indices(~membership(kept, size), size - kept.shape[1])


def pick(values: Tensor, index: Tensor) -> Tensor:
    """Rows of [B, N, D] named by an index [B, K]: [B, K, D]."""
    if len(values) == 1:  # fewer operations
        return embedding(index, values[0])
    return values[torch.arange(len(values), device=index.device)[:, None], index]  # whole rows, unlike `gather`


def temperature(saliency: Tensor, tau: float = 1.0) -> Tensor:
    """s^(1/tau), normalised to sum 1: [B, N] -> [B, N]. A zero stays zero; an all-zero row becomes uniform."""
    if tau != 1.0:  # divided by the largest first, so that a small tau does not underflow
        peak = saliency.amax(-1, keepdim=True)
        saliency = torch.where(peak > 0, saliency / peak, saliency).pow(1.0 / tau)
    return (saliency / saliency.sum(-1, keepdim=True)).nan_to_num(nan=1.0 / saliency.shape[-1])  # 0 / 0 where all are 0


def convex(vision: Tensor, cross: Tensor, alpha: float) -> Tensor:
    """alpha s_v + (1 - alpha) s_c: [B, N], [B, N] -> [B, N]."""
    return alpha * vision + (1.0 - alpha) * cross


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
    points = normalize(features.float(), dim=-1)
    weight = saliency.clamp_min(torch.finfo(torch.float32).tiny).log() * quality  # [B, N]
    distance = points.new_full(saliency.shape, 2.0)
    chosen = torch.empty(len(points), count, dtype=torch.long, device=points.device)
    for step in range(count):
        gain = weight + distance.clamp_min(1e-6).log() if step else saliency
        index = gain.masked_fill(distance < 0, -torch.inf).argmax(1)  # [B]
        chosen[:, step] = index
        kept = points.gather(1, index[:, None, None].expand(-1, 1, points.shape[2]))
        distance = torch.minimum(distance, 1 - (points * kept).sum(-1).clamp_max(1.0))
        distance = distance.scatter(1, index[:, None], -1.0)  # a kept token is never kept again
    return chosen.sort(dim=1).values
