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
    member = projected.new_zeros(len(group), count, group.shape[1], dtype=torch.float32)  # [B, M, R]
    member.scatter_(1, group[:, None], 1.0)
    total = member.sum(-1, keepdim=True).clamp_min(torch.finfo(member.dtype).tiny)  # above 0 for groups without members
    return (member @ projected.float() / total).to(projected.dtype)


def medians(group: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The lower median of the members of each group, for merged tokens that are in the middle of their members.

    Args:
        group: [B, R] which of `count` groups each token is in; none is empty.
        count: M.
    Returns:
        Places [B, M] among the R, ascending, and the groups [B, R] numbered in that order.
    """
    by_group, order = group.sort(dim=1, stable=True)
    ends = torch.searchsorted(by_group, counting(count + 1, group.device).expand(len(group), -1).contiguous())
    middle = (ends[:, :-1] + ends[:, 1:] - 1) // 2  # [B, M]
    places, renamed = order.gather(1, middle).sort(dim=1)
    return places, renamed.argsort(1).gather(1, group)


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


class Pairing(NamedTuple):
    """Tokens of a list of t that are merged away, and into which. Even places are 0..a-1, odd places 0..b-1."""

    stay: Tensor  # [U, a - r] even places that stay
    leave: Tensor  # [U, r] even places that are merged away
    into: Tensor  # [U, r] the odd place each of those goes to


def fresh(values: Tensor) -> Bag:
    """The beginning: every token [U, n, D] represents itself."""
    units, length = values.shape[:2]
    places = torch.arange(length, device=values.device).expand(units, -1)
    return Bag(values, torch.ones(units, length, device=values.device), places)


def pair(points: Tensor, count: int, protected: bool) -> Pairing:
    """The `count` best pairs, each token at an even place with the odd place most like it (section 3, steps 1-4).

    Args:
        points: [U, t, d] vectors for the similarity, by cosine in float32.
        count: r, at most the number of even places (one less with `protected`).
        protected: the token at place 0 is a class token: it never leaves, and those that stay keep their order. Without
            one they are sorted by falling similarity, as in the authors' code. Ties go to the lower place.
    """
    points = normalize(ensure_finite("values tokens are matched by", points).float(), dim=-1)
    best, into = (points[:, ::2] @ points[:, 1::2].transpose(1, 2)).max(dim=-1)  # [U, a]
    if protected:
        best[:, 0] = -torch.inf
    order = rank(best)
    leave, stay = order[:, :count], order[:, count:]
    return Pairing(stay.sort(dim=1).values if protected else stay, leave, into.gather(1, leave))


def merge(bag: Bag, pairing: Pairing) -> Bag:
    """The bag after these pairs became one: the tokens that stay, then those at odd places (section 3, step 5)."""
    places = _destinations(pairing, bag.size.shape[1])
    return Bag(*average(bag.values, bag.size, pairing), places.gather(1, bag.place))


def average(values: Tensor, size: Tensor, pairing: Pairing) -> tuple[Tensor, Tensor]:
    """Means [U, t - r, D] of values [U, t, D] weighted by sizes [U, t], and the sizes of the new tokens. Summed in
    float32 at least, cast back, by a product with a 0/1 matrix: the order of summation is the same every time.
    """
    stay, leave, into = pairing
    wide = values if values.dtype == torch.float64 else values.float()
    weighted = torch.cat((wide * size[..., None], size[..., None].to(wide.dtype)), dim=2)  # [U, t, D + 1]
    even, odd = weighted[:, ::2], weighted[:, 1::2]
    member = weighted.new_zeros(len(into), odd.shape[1], into.shape[1]).scatter_(1, into[:, None], 1.0)  # [U, b, r]
    merged = torch.baddbmm(odd, member, even.gather(1, _wide(leave, even)))
    total = torch.cat((even.gather(1, _wide(stay, even)), merged), dim=1)
    return (total[..., :-1] / total[..., -1:]).to(values.dtype), total[..., -1].float()


def _destinations(pairing: Pairing, length: int) -> Tensor:
    """The new place of every old one: [U, t]."""
    stay, leave, into = pairing
    left = stay.shape[1]
    places = counting(length, stay.device)
    destination = stay.new_empty(len(stay), length)
    even = destination[:, ::2]
    even.scatter_(1, stay, places[:left].expand_as(stay)).scatter_(1, leave, left + into)
    destination[:, 1::2] = places[left : left + length // 2]
    return destination


def _wide(index: Tensor, values: Tensor) -> Tensor:
    return index[..., None].expand(-1, -1, values.shape[-1])
