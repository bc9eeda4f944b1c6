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

from torch import Tensor

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.merging import directions
from llava_consensus.reduction.method import ReadsTower, Selected, Selector, Shape
from llava_consensus.reduction.options import Ratio
from llava_consensus.reduction.saliency import class_saliency, pair_flops
from llava_consensus.reduction.selection import cosines, greedy
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
        saliency = tokens.of_tiles(class_saliency(tokens.needed(Need.ATTENTION)))
        direction = directions(ensure_finite("projected tokens", tokens.projected).float())
        return Selected(marginal(spread(saliency), direction, count, self.balance), vision=saliency)


def spread(saliency: Tensor) -> Tensor:
    """Scales the saliency of each unit to 0 for the least and 1 for the most salient token: [B, N] -> [B, N]."""
    low, high = saliency.amin(1, keepdim=True), saliency.amax(1, keepdim=True)
    return (saliency - low) / (high - low + EPSILON)


def marginal(saliency: Tensor, points: Tensor, count: int, balance: float) -> Tensor:
    """`count` tokens in the order they are chosen: saliencies [B, N], points [B, N, D] of length 1 -> [B, count]."""
    table = cosines(points)
    table[:, :-1].mul_(1 - balance).sub_((balance * saliency)[:, None])
    return greedy(table, count, first=saliency.argmax(1, keepdim=True))
