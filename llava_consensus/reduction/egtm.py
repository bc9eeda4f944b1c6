"""EGTM, encoder-guided token merge: what was not kept is folded into M tokens (paper section 3.4).

Anchors are spread by farthest point sampling on the tower's features, every other token joins the anchor whose
attention key is nearest, and a merged token is the plain mean of the projected tokens of its group. The only loop is
over the M sampling steps.
"""

import torch
from torch import Tensor
from torch.nn.functional import embedding, normalize, one_hot

from llava_consensus.reduction.checks import choose, ensure_finite

STARTS = ("first", "salient", "mean")


def sample_anchors(features: Tensor, count: int, start: str = "first", saliency: Tensor | None = None) -> Tensor:
    """Farthest point sampling of `count` anchors on l2-normalised features.

    Args:
        features: [B, R, D_v] of the tokens not kept, in ascending index order.
        count: M, from 1 to R.
        start: `first` | `salient` (highest saliency, which must then be given) | `mean` (farthest from the mean
            feature).
        saliency: [B, R] fused saliency of the same tokens.
    Returns:
        [B, M] places among the R, ascending. Ties go to the lower place.
    """
    choose("fps_start", start, STARTS)
    points = normalize(ensure_finite("features of the vision tower", features).float(), dim=-1)  # [B, R, D_v]
    rows, offset = points.flatten(0, 1), torch.arange(len(points), device=points.device)[:, None] * points.shape[1]
    nearest = points.new_full(points.shape[:2], -torch.inf)  # cosine to the nearest anchor so far
    chosen = [_first_anchor(points, start, saliency)]  # [B, 1] each
    while len(chosen) < count:
        anchor = embedding(chosen[-1] + offset, rows)  # [B, 1, D_v]
        nearest = torch.maximum(nearest, (points * anchor).sum(-1))
        nearest = nearest.scatter_(1, chosen[-1], torch.inf)  # an anchor is never chosen again
        chosen.append(nearest.argmin(1, keepdim=True))
    return torch.cat(chosen, dim=1).sort(dim=1).values


def assign(keys: Tensor, anchors: Tensor) -> Tensor:
    """The anchor each token joins, by cosine of head-mean keys: [B, R, d_k], [B, M] -> [B, R] in 0..M-1. An anchor
    joins itself.
    """
    direction = normalize(ensure_finite("keys of the vision tower", keys).float(), dim=-1)
    at_anchors = direction.gather(1, anchors[..., None].expand(-1, -1, direction.shape[2]))  # [B, M, d_k]
    group = (direction @ at_anchors.transpose(1, 2)).argmax(2)  # ties to the lower anchor
    return group.scatter(1, anchors, torch.arange(anchors.shape[1], device=keys.device).expand_as(anchors))


def merge(projected: Tensor, group: Tensor, count: int, weight: Tensor | None = None) -> Tensor:
    """Mean of the tokens of each group: [B, R, D], [B, R] -> [B, M, D]. Summed in float32, cast back.

    Args:
        weight: [B, R] above 0, the weight of each token in its group; None is the plain mean of the paper.
    """
    member = one_hot(group, count).transpose(1, 2).float()  # [B, M, R]
    member = member if weight is None else member * weight[:, None]
    total = member.sum(-1, keepdim=True)
    mean = member @ projected.float() / torch.where(total > 0, total, torch.ones_like(total))
    return mean.to(projected.dtype)


def _first_anchor(points: Tensor, start: str, saliency: Tensor | None) -> Tensor:
    """Where sampling starts: [B, 1]."""
    if start == "first":
        return torch.zeros(len(points), 1, dtype=torch.long, device=points.device)
    if start == "mean":
        return (points - points.mean(1, keepdim=True)).square().sum(-1).argmax(1, keepdim=True)
    if saliency is None:
        raise ValueError("fps_start='salient' needs the saliency of the tokens")
    return saliency.argmax(1, keepdim=True)
