"""Bipartite soft matching: merge tokens two by two, again and again, each a mean weighted by the patches it stands for
(ToMe: Bolya et al., ICLR 2023, section 3).

The tokens at even places are matched with those at odd places by the cosine of given points; the closest pairs become
one token. Nothing is drawn at random and nothing waits for the device. Pure maths: which points, how many and where is
the method's business.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from llava_consensus.reduction.checks import ensure_finite
from llava_consensus.reduction.ranking import rank


class Bag(NamedTuple):
    """Tokens under way: t of them are left of the n there were."""

    values: Tensor  # [U, t, D]
    size: Tensor  # [U, t] float32, how many of the n are in each
    place: Tensor  # [U, n] which of the t each of the n is in


class Pairing(NamedTuple):
    """Which tokens of a list of t leave it. Even places are 0..a-1, odd places 0..b-1."""

    stay: Tensor  # [U, a - r] even places that stay
    leave: Tensor  # [U, r] even places that are merged away
    into: Tensor  # [U, r] the odd place each of those goes to


def fresh(values: Tensor) -> Bag:
    """The beginning: every token [U, n, D] stands for itself."""
    units, length = values.shape[:2]
    places = torch.arange(length, device=values.device).expand(units, -1)
    return Bag(values, torch.ones(units, length, device=values.device), places)


def pair(points: Tensor, count: int, protected: bool = False) -> Pairing:
    """The `count` best pairs, each token at an even place with the odd place most like it (section 3, steps 1-4).

    Args:
        points: [U, t, d] what similarity is measured on, by cosine in float32.
        count: r, at most the number of even places (one less with `protected`).
        protected: the token at place 0 is a class token: it never leaves, and those that stay keep their order. Without
            one they stand by falling similarity, as in the authors' code. Ties go to the lower place.
    """
    points = normalize(ensure_finite("values tokens are matched by", points).float(), dim=-1)
    best, into = (points[:, ::2] @ points[:, 1::2].transpose(1, 2)).max(dim=-1)  # [U, a]
    if protected:
        best = torch.cat((torch.full_like(best[:, :1], -torch.inf), best[:, 1:]), dim=1)
    order = rank(best)
    leave, stay = order[:, :count], order[:, count:]
    return Pairing(stay.sort(dim=1).values if protected else stay, leave, into.gather(1, leave))


def merge(bag: Bag, pairing: Pairing) -> Bag:
    """The bag after these pairs became one: the tokens that stay, then those at odd places (section 3, step 5)."""
    places = _destinations(pairing, bag.size.shape[1])
    values = average(bag.values, bag.size, pairing)
    return Bag(values, _sum(bag.size[..., None], pairing)[..., 0], places.gather(1, bag.place))


def average(values: Tensor, size: Tensor, pairing: Pairing) -> Tensor:
    """Means [U, t - r, D] of values [U, t, D] weighted by sizes [U, t]. Summed in float32 at least, cast back."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    total = _sum(wide * size[..., None], pairing)
    return (total / _sum(size[..., None], pairing)).to(values.dtype)


def _sum(values: Tensor, pairing: Pairing) -> Tensor:
    """[U, t, D] -> [U, t - r, D], by a product with a 0/1 matrix: the order of summation is the same every time."""
    even, odd = values[:, ::2], values[:, 1::2]
    leaving = even.gather(1, _wide(pairing.leave, even))
    member = one_hot(pairing.into, odd.shape[1]).transpose(1, 2).to(values.dtype)  # [U, b, r]
    return torch.cat((even.gather(1, _wide(pairing.stay, even)), odd + member @ leaving), dim=1)


def _destinations(pairing: Pairing, length: int) -> Tensor:
    """The new place of every old one: [U, t]."""
    stay, leave, into = pairing
    left = stay.shape[1]
    places = torch.arange(length, device=stay.device)
    destination = torch.empty(len(stay), length, dtype=torch.long, device=stay.device)
    even = destination[:, ::2]
    even.scatter_(1, stay, places[:left].expand_as(stay)).scatter_(1, leave, left + into)
    destination[:, 1::2] = left + places[: length // 2]
    return destination


def _wide(index: Tensor, values: Tensor) -> Tensor:
    return index[..., None].expand(-1, -1, values.shape[-1])
