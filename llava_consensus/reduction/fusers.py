"""Fusers: two saliencies in, one choice of K tokens out (paper section 3.3), and how far two saliencies agree."""

import math

import torch
from torch import Tensor

from llava_consensus.reduction.ranking import indices, membership, rank


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
