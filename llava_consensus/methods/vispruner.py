"""VisPruner: half of the budget for the patches the class token attends to, half for patches that differ from each
other (Zhang et al., VisPruner, ICCV 2025; official code aefa01a; FasterVLM is `ratio=1`).

The most attended patches are kept; the others, in order of attention, are thinned out round by round: the list is
split into its even and odd places, and up to eight of the even ones that are most similar to an odd one leave. Nothing
is merged. What differs: the rounds that crashed are repaired (the even half of an odd list is the longer one, and a
round never drops more than it has), which changes no published budget; similarities are worked out once, in float32,
and ties go to the patch that comes first. The order of survivors decides the next split, so the loop is numerically
chaotic: another precision picks another diverse half (docs/faithfulness.md).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, normalize

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import ReadsTower, Selected, Selector, Shape
from llava_consensus.reduction.options import Ratio
from llava_consensus.reduction.saliency import class_saliency
from llava_consensus.reduction.selection import pick, rank
from llava_consensus.reduction.tokens import Need, VisualTokens, ensure_finite

ROUND = 8  # tokens that leave in one round
LONG, NEAREST = 1024, 32  # tokens of a list whose nearest ones are looked up, and how many of these


@dataclass(frozen=True, kw_only=True)
class VisPruner(Selector, ReadsTower):
    """The most attended patches and, of the others, those that are least alike.

    Args:
        ratio: share of the budget for the attended patches, in [0, 1]; the official scripts take 0.5.
    """

    ratio: Ratio = 0.5

    title: ClassVar[str] = "VisPruner"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.ATTENTION, Need.FEATURES})

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Class row and the similarities of the patches that are thinned out."""
        if budget.tokens >= shape.patches:
            return 0.0
        rest = shape.patches - int(budget.tokens * self.ratio)
        return 2.0 * (shape.patches + 1 + rest**2) * shape.vision_width

    def choose(self, tokens: VisualTokens, count: int) -> Selected:
        """The attended tokens and the diverse ones."""
        saliency = tokens.of_tiles(class_saliency(tokens.needed(Need.ATTENTION)))
        order = rank(saliency)  # [B, N]
        attended = int(count * self.ratio)
        kept, rest = order[:, :attended], order[:, attended:]
        features = ensure_finite("features of the vision tower", tokens.needed(Need.FEATURES))
        direction = normalize(pick(tokens.of_tiles(features.float()), rest), dim=-1)
        left = thin(direction @ direction.transpose(1, 2), count - attended)
        return Selected(torch.cat((kept, rest.gather(1, left)), dim=1), vision=saliency)


def thin(similarity: Tensor, count: int) -> Tensor:
    """The `count` tokens left of a list of R, in the order of the last round: [B, R, R] -> [B, count]. Once half of the
    tokens have left, they are looked at no more.
    """
    device = similarity.device
    tokens = torch.arange(similarity.shape[1], device=device).expand(len(similarity), -1)  # that are looked at
    while tokens.shape[1] > count > 0:
        if device.type == "cpu" and tokens.shape[1] > LONG:
            left = torch.stack([_halve_long(one, count) for one in similarity])
        else:
            left = _halve(similarity, count)
        tokens = tokens.gather(1, left)
        similarity = pick(pick(similarity, left).transpose(1, 2), left).transpose(1, 2)
    return tokens[:, :count]


def _halve(similarity: Tensor, count: int) -> Tensor:
    """Rounds until half of the tokens have left, or all that are too many: [B, R, R] -> [B, L]. Each round compares all
    even places with all odd ones; nothing waits for the device.
    """
    batch, size = similarity.shape[:2]
    to_each = similarity.transpose(1, 2).contiguous().flatten(0, 1)  # [B R, R]
    first = torch.arange(batch, device=similarity.device)[:, None] * size  # row of each list's first token
    left, enough = torch.arange(size, device=similarity.device).expand(batch, -1), max(count, size // 2)
    while left.shape[1] > enough:
        left = thin_once(to_each, first, left, left.shape[1] - count)
    return left


def _halve_long(similarity: Tensor, count: int) -> Tensor:
    """`_halve` for a long list on the CPU, [R, R] -> [L], where comparing everything in every round would take most of
    the time: the odd token most like an even one is nearly always among its nearest, which are looked up once; where
    none of them is at an odd place, the token is compared with all odd ones. Which do depends on the numbers, so that a
    device would be waited for.
    """
    size = len(similarity)
    values, places = similarity.topk(NEAREST, dim=1)
    left, enough = torch.arange(size), max(count, size // 2)
    is_odd = torch.zeros(size, dtype=torch.bool)
    while len(left) > enough:
        even, odd = left[::2], left[1::2]
        is_odd.zero_().index_fill_(0, odd, True)
        elsewhere = ~is_odd.take(places.index_select(0, even))
        nearest = values.index_select(0, even).masked_fill_(elsewhere, -torch.inf).amax(1)
        missing = (nearest == -torch.inf).nonzero()[:, 0]
        nearest[missing] = similarity.index_select(0, even[missing]).index_select(1, odd).amax(1)
        stays = rank(nearest)[min(ROUND, len(left) - count) :]
        left = torch.cat((even[stays], odd))
    return left


def thin_once(to_each: Tensor, first: Tensor, left: Tensor, surplus: int) -> Tensor:
    """One round: [B, L] -> [B, L - r], r = min(8, surplus, places of the even half). The even places that stay come
    first, most similar ones ahead; the odd places follow as they were.

    Args:
        to_each: [B R, R] similarity of all tokens to one of them, list by list.
        first: [B, 1] row of the first token of each list.
        left: [B, L] the tokens of each list.
        surplus: how many are too many.
    """
    even, odd = left[:, ::2], left[:, 1::2]
    nearest = embedding_bag(odd + first, to_each, mode="max").gather(1, even)  # [B, even places]
    stays = rank(nearest)[:, min(ROUND, surplus) :]
    return torch.cat((even.gather(1, stays), odd), dim=1)
