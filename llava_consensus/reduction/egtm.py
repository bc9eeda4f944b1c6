"""EGTM, encoder-guided token merge: what was not kept is folded into M tokens (paper section 3.4).

Anchors are spread by farthest point sampling on the tower's features, every other token joins the anchor whose
attention key is nearest, and a merged token is the plain mean of the projected tokens of its group. The only loop is
over the M sampling steps, four operations each: an anchor depends on those before it, and all distances at once would
be N x N.
"""

import torch
from torch import Tensor
from torch.nn.functional import embedding, one_hot

from llava_consensus.reduction.checks import choose, ensure_finite
from llava_consensus.reduction.output import pick
from llava_consensus.reduction.ranking import indices, membership

STARTS = ("first", "salient", "mean")
EXACT = "donot_use_mm_for_euclid_dist"  # equal points have equal distances, 0 to each other, in every batch


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
    return _sample(ensure_finite("features of the vision tower", features.float()), count, start, saliency)


def assign(keys: Tensor, anchors: Tensor) -> Tensor:
    """The anchor each token joins, by cosine of head-mean keys: [B, R, d_k], [B, M] -> [B, R] in 0..M-1. An anchor
    joins itself.
    """
    return _assign(ensure_finite("keys of the vision tower", keys.float()), anchors)


def group(
    features: Tensor, keys: Tensor, count: int, start: str = "first", saliency: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`sample_anchors` and `assign` in one: anchors [B, M], and which each token joins [B, R]."""
    choose("fps_start", start, STARTS)
    features = ensure_finite("features of the vision tower", features.float())
    keys = ensure_finite("keys of the vision tower", keys.float())
    return _group(features, keys, saliency if start == "salient" else None, count, start)


def _group(features: Tensor, keys: Tensor, saliency: Tensor | None, count: int, start: str) -> tuple[Tensor, Tensor]:
    anchors = _sample(features, count, start, saliency)
    return anchors, _assign(keys, anchors)


def _sample(features: Tensor, count: int, start: str, saliency: Tensor | None) -> Tensor:
    """The loop. An anchor is at distance 0 from itself, so it is chosen again only where all points left equal an
    anchor. These tie, and the lowest places among them are put in behind the loop.
    """
    points = directions(features)  # [B, R, D_v]
    rows, chosen = points.flatten(0, 1), [_first_anchor(points, start, saliency)]  # [B, 1] each
    offset = torch.arange(0, len(rows), points.shape[1], device=points.device)[:, None] if len(points) > 1 else None
    nearest: Tensor | None = None  # [B, R, 1] distance to the nearest anchor so far
    while len(chosen) < count:
        anchor = embedding(chosen[-1] if offset is None else chosen[-1] + offset, rows)  # [B, 1, D_v]
        distance = torch.cdist(points, anchor, compute_mode=EXACT)
        nearest = distance if nearest is None else torch.minimum(nearest, distance)
        chosen.append(nearest.argmax(1))
    member = membership(torch.cat(chosen, dim=1), points.shape[1])
    missing = count - member.sum(1, keepdim=True)
    return indices(member | ((~member).cumsum(1) <= missing), count)


def _assign(keys: Tensor, anchors: Tensor) -> Tensor:
    direction = directions(keys)
    nearest = (direction @ pick(direction, anchors).transpose(1, 2)).argmax(2)  # ties to the lower anchor
    return nearest.scatter_(1, anchors, torch.arange(anchors.shape[1], device=keys.device).expand_as(anchors))


def merge(projected: Tensor, group: Tensor, count: int) -> Tensor:
    """Mean of the tokens of each group: [B, R, D], [B, R] -> [B, M, D]. Summed in float32, cast back."""
    member = one_hot(group, count).transpose(1, 2).float()  # [B, M, R]
    total = member.sum(-1, keepdim=True).clamp_min(torch.finfo(member.dtype).tiny)  # above 0 where nobody joined
    return (member @ projected.float() / total).to(projected.dtype)


def directions(values: Tensor) -> Tensor:
    """Vectors [B, R, D] of length 1; a zero stays zero."""
    return values / torch.linalg.vector_norm(values, dim=-1, keepdim=True).clamp_min(1e-12)


def _first_anchor(points: Tensor, start: str, saliency: Tensor | None) -> Tensor:
    """Where sampling starts: [B, 1]."""
    if start == "first":
        return torch.zeros(len(points), 1, dtype=torch.long, device=points.device)
    if start == "mean":
        return (points - points.mean(1, keepdim=True)).square().sum(-1).argmax(1, keepdim=True)
    if saliency is None:
        raise ValueError("fps_start='salient' needs the saliency of the tokens")
    return saliency.argmax(1, keepdim=True)
