"""IDPruner: saliency against likeness, by maximal marginal relevance (Tan et al., arXiv 2602.13315; Tencent AngelSlim
67394ce, the selection of its `idpruner`, without the scorer that has to be trained).

The most salient token comes first, then always the one for which balance x saliency - (1 - balance) x the largest
cosine with a kept token is largest. The authors' saliency is a small network trained for each model; here it is the
attention of the class token, brought to 0..1 in the same way, so this is their selection and not their figures. Cosines
are of the projected tokens. Ties go to the lower index, and one token is taken at a time (their `parallel_k` of 1).
Nothing depends on the depth of a model.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.merging import directions
from llava_consensus.reduction.method import ReadsTower, Selected, Selector, Shape
from llava_consensus.reduction.options import Ratio
from llava_consensus.reduction.saliency import class_saliency, pair_flops
from llava_consensus.reduction.selection import pick
from llava_consensus.reduction.tokens import Need, VisualTokens, ensure_finite

EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class IDPruner(Selector, ReadsTower):
    """Keep T tokens by class attention less the likeness to those that are kept (maximal marginal relevance).

    Args:
        balance: weight of the saliency, in [0, 1]; the rest is the weight of the likeness.
    """

    balance: Ratio = 0.5

    title: ClassVar[str] = "IDPruner, untrained"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.ATTENTION, Need.FEATURES})

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Class attention and the cosines of all pairs; each of the T steps only compares."""
        return pair_flops(shape, self.losing(shape, budget), shape.width)

    def choose(self, tokens: VisualTokens, count: int) -> Selected:
        """The tokens of maximal marginal relevance."""
        saliency = tokens.of_tiles(class_saliency(tokens.needed(Need.ATTENTION)))
        direction = directions(ensure_finite("projected tokens", tokens.projected).float())
        similarity = direction @ direction.transpose(1, 2)
        return Selected(marginal(spread(saliency), similarity, count, self.balance), vision=saliency)


def spread(saliency: Tensor) -> Tensor:
    """Scales the saliency of each unit to 0 for the least and 1 for the most salient token: [B, N] -> [B, N]."""
    low, high = saliency.amin(1, keepdim=True), saliency.amax(1, keepdim=True)
    return (saliency - low) / (high - low + EPSILON)


def marginal(saliency: Tensor, similarity: Tensor, count: int, balance: float) -> Tensor:
    """`count` tokens in the order they are chosen: [B, N], [B, N, N] -> [B, count]."""
    left, nearest = torch.ones_like(saliency, dtype=torch.bool), torch.full_like(saliency, -2.0)
    chosen: list[Tensor] = []  # [B, 1] each
    for step in range(count):
        score = balance * saliency - (1 - balance) * nearest if step else saliency
        chosen.append(score.masked_fill(~left, -torch.inf).argmax(1, keepdim=True))
        left = left.scatter(1, chosen[-1], False)
        nearest = torch.maximum(nearest, pick(similarity, chosen[-1])[:, 0])
    return torch.cat(chosen, dim=1)
