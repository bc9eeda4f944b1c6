"""Tokens made of several: EGTM, the encoder-guided token merge of ConsensusDrop (paper section 3.4), and bipartite soft
matching (ToMe: Bolya et al., ICLR 2023, section 3).

EGTM folds the other tokens into M: anchors are spread by farthest point sampling on the tower's features, every
other token joins the anchor whose attention key is nearest, and a merged token is the plain mean of the projected
tokens of its group. Its only loop is over the M sampling steps, four operations each: an anchor depends on those before
it, and all distances at once would be N x N.

Soft matching merges tokens two by two, again and again, each a mean weighted by the patches it represents: the tokens
at even places are matched with those at odd places by the cosine of given points, and the closest pairs become one
token. Nothing is drawn at random and nothing waits for the device; which points, how many and where is the method's
business.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, normalize

from llava_consensus.reduction.selection import Folded, counting, distinct, pick, rank
from llava_consensus.reduction.tokens import ensure_finite

Start = Literal["first", "salient", "mean"]
EXACT = "donot_use_mm_for_euclid_dist"  # equal points have equal distances, 0 to each other, in every batch


def group(
    features: Tensor, keys: Tensor, count: int, start: Start = "first", saliency: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """EGTM's anchors, by farthest point sampling on l2-normalised features, and which of them each token joins.

    Args:
        features: [B, R, D_v] of the tokens not kept, in ascending index order.
        keys: [B, R, d_k] of the same tokens, mean over heads.
        count: M, from 1 to R.
        start: `first` | `salient` (highest saliency, which must then be given) | `mean` (farthest from the mean
            feature).
        saliency: [B, R] fused saliency of the same tokens.
    Returns:
        Anchors [B, M], places among the R, ascending, and the anchor 0..M-1 of each token [B, R], as `nearest` says.
        Ties go to the lower place.
    """
    points = directions(ensure_finite("features of the vision tower", features.float()))  # [B, R, D_v]
    keys = ensure_finite("keys of the vision tower", keys.float())
    rows, chosen = points.flatten(0, 1), [_first_anchor(points, start, saliency)]  # [B, 1] each
    offset = counting(len(points), points.device)[:, None] * points.shape[1] if len(points) > 1 else None
    distance: Tensor | None = None  # [B, R, 1] to the nearest anchor so far
    while len(chosen) < count:
        if distance is None and start == "first":
            anchor = points[:, :1]  # [B, 1, D_v]
        else:
            anchor = embedding(chosen[-1] if offset is None else chosen[-1] + offset, rows)
        to_anchor = torch.cdist(points, anchor, compute_mode=EXACT)
        distance = to_anchor if distance is None else torch.minimum(distance, to_anchor)
        chosen.append(distance.argmax(1))
    # An anchor is at distance 0 from itself, so it is chosen again only if all points left equal an anchor
    anchors = distinct(torch.cat(chosen, dim=1), points.shape[1]).sort(dim=1).values
    return anchors, nearest(keys, anchors)


def nearest(keys: Tensor, anchors: Tensor) -> Tensor:
    """The anchor each token joins, by cosine of its key: [B, R, d_k] float32, [B, M] -> [B, R] in 0..M-1. An anchor
    joins itself; ties go to the lower anchor. Zeros if there is no anchor.
    """
    if not anchors.shape[1]:
        return anchors.new_zeros(keys.shape[:2])
    direction = directions(keys)
    joined = (direction @ pick(direction, anchors).transpose(1, 2)).argmax(2)
    return joined.scatter_(1, anchors, counting(anchors.shape[1], keys.device).expand_as(anchors))


def group_means(projected: Tensor, group: Tensor, count: int) -> Tensor:
    """Mean of the tokens of each group: [B, R, D], [B, R] -> [B, M, D]. Summed in float32, cast back."""
    member = members(group, count)
    size = member.sum(-1, keepdim=True).clamp_min(torch.finfo(member.dtype).tiny)  # above 0 for groups without members
    return (member @ projected.float() / size).to(projected.dtype)


def members(group: Tensor, count: int) -> Tensor:
    """1 for a token in a group, else 0: [B, R] -> [B, M, R], float32."""
    member = torch.zeros(len(group), count, group.shape[1], device=group.device)
    return member.scatter_(1, group[:, None], 1.0)


def fold_at_medians(values: Tensor, rest: Tensor, group: Tensor, count: int) -> Folded:
    """The tokens that are not kept, folded into the means of their groups, each at the lower median of its members.

    Args:
        values: [B, R, D] the tokens that are not kept.
        rest: [B, R] their places, ascending.
        group: [B, R] which of `count` groups each is in; none is empty.
        count: M.
    """
    member = members(group, count)
    counted = member.cumsum(2)  # [B, M, R] members up to each token
    size = counted[..., -1:]
    middle = torch.searchsorted(counted, size / 2)[..., 0]  # [B, M] the first token by which half are counted
    places, order = middle.sort(dim=1)
    means = pick(member @ values.float() / size, order).to(values.dtype)
    return Folded(means, rest.gather(1, places), rest, order.argsort(1).gather(1, group))


def fold(projected: Tensor, rest: Tensor, places: Tensor, group: Tensor) -> Folded | None:
    """The tokens that are not kept, folded into their anchors: each merged token is the plain mean of its group.

    Args:
        projected: [B, N, D] all tokens of the unit.
        rest: [B, R] those that are not kept, ascending.
        places: [B, M] of the anchors among the rest, ascending.
        group: [B, R] which of the M each of the rest joins.
    Returns:
        Arguments of `assemble` and `arrange`; None if there is no anchor.
    """
    if not places.shape[1]:
        return None
    values = projected if rest.shape == projected.shape[:2] else pick(projected, rest)  # no copy if all are merged
    return Folded(group_means(values, group, places.shape[1]), rest.gather(1, places), rest, group)


def directions(values: Tensor) -> Tensor:
    """Vectors [B, R, D] of length 1; a zero stays zero."""
    return values / torch.linalg.vector_norm(values, dim=-1, keepdim=True).clamp_min(1e-12)


def _first_anchor(points: Tensor, start: Start, saliency: Tensor | None) -> Tensor:
    """First anchor of the sampling: [B, 1]."""
    if start == "first":
        return counting(1, points.device).expand(len(points), 1)
    if start == "mean":
        return (points - points.mean(1, keepdim=True)).square().sum(-1).argmax(1, keepdim=True)
    if saliency is None:
        raise ValueError("fps_start='salient' needs the saliency of the tokens")
    return saliency.argmax(1, keepdim=True)


class Bag(NamedTuple):
    """Tokens under way: t of them are left of the n there were."""

    values: Tensor  # [U, t, D]
    size: Tensor  # [U, t] float32, how many of the n are in each
    place: Tensor  # [U, n] which of the t each of the n is in


def fresh(values: Tensor) -> Bag:
    """The beginning: every token [U, n, D] represents itself."""
    units, length = values.shape[:2]
    places = torch.arange(length, device=values.device).expand(units, -1)
    return Bag(values, torch.ones(units, length, device=values.device), places)


def match(points: Tensor, count: int, protected: bool) -> Tensor:
    """The new place of every token when the `count` best pairs of even and odd places merge (section 3, steps 1-4).

    Args:
        points: [U, t, d] vectors for the similarity, by cosine in float32.
        count: r, at most the number of even places (one less with `protected`).
        protected: the token at place 0 is a class token: it never leaves, and those that stay keep their order. Without
            one they are sorted by falling similarity, as in the authors' code. Ties go to the lower place.
    Returns:
        [U, t] in 0..t-r-1: even places that stay come first, then all odd places.
    """
    points = normalize(points.float(), dim=-1)
    length = points.shape[1]
    odd, first = length // 2, length - length // 2 - count  # how many odd places there are, and where the first comes
    # every token is matched, an odd place with itself, so that no operation has to put even and odd places together
    own = own_places(-(-length // 1024) * 512, protected, points.device)[:length, :odd]
    best, place = torch.baddbmm(own, points, points[:, 1::2].transpose(1, 2)).max(dim=2)  # [U, t] each
    stay = rank(best)[:, odd + count :]  # [U, first] behind the odd places and those that leave
    stay = stay.sort(dim=1).values if protected else stay
    return place.add_(first).scatter_(1, stay, counting(first, points.device).expand_as(stay))


@lru_cache(maxsize=8)
def own_places(odd: int, protected: bool, device: torch.device) -> Tensor:
    """Added to similarities of tokens with those at odd places, [2 odd, odd]: inf for an odd place with itself, and
    -inf for a class token, which is like none. Never write to it.
    """
    with torch.inference_mode(False):
        added = torch.zeros(2 * odd, odd, device=device)
        added[1::2].fill_diagonal_(torch.inf)
        added[: int(protected)] = -torch.inf
        return added


def merge(bag: Bag, place: Tensor, count: int) -> Bag:
    """The bag with `count` tokens fewer, each the mean of those with the same new place [U, t], weighted by their sizes
    (section 3, step 5). Summed in float32 at least, cast back, by a product with a matrix: the order of summation is
    the same every time.
    """
    units, length = place.shape
    wide = bag.values if bag.values.dtype == torch.float64 else bag.values.float()
    share = torch.zeros(units, length - count, length, device=place.device)  # [U, t - r, t]
    share.scatter_(1, place[:, None], bag.size[:, None])
    size = share.sum(2)
    values = share.to(wide.dtype) / size[..., None] @ wide
    return Bag(values.to(bag.values.dtype), size, place.gather(1, bag.place))
