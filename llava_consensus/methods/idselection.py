"""ID-Selection: a kept token suppresses the saliency of those that are like it (Huang et al., arXiv 2604.05601, eq. 7
to 9). No code is published; this is written from its description.

The token with the largest score is kept, and every other score loses exp(-gamma d^2) times the score of the kept one, d
being the cosine distance of the projected tokens and gamma 20. Saliency is the attention of the class token, which the
paper takes where a tower has one, brought to 0..1. Open in the description, decided here: its other saliencies
(attention of the question in a layer of the language model, and a union of both) are not offered, because their layer
and weights are not all given; scores may fall below 0, and a token kept with such a score suppresses nothing, so that
what was suppressed most still comes last. Ties go to the lower index. Nothing depends on the depth of a model.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from llava_consensus.methods.idpruner import spread
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.merging import directions
from llava_consensus.reduction.method import ReadsTower, Selected, Selector, Shape
from llava_consensus.reduction.options import NotNegative
from llava_consensus.reduction.saliency import class_saliency, pair_flops
from llava_consensus.reduction.selection import pick
from llava_consensus.reduction.tokens import Need, VisualTokens, ensure_finite


@dataclass(frozen=True, kw_only=True)
class IDSelection(Selector, ReadsTower):
    """Keep T tokens by class attention, each of which suppresses the tokens that are like it.

    Args:
        gamma: how fast suppression falls with the distance, at least 0; 0 suppresses all tokens alike.
    """

    gamma: NotNegative = 20.0

    title: ClassVar[str] = "ID-Selection"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.ATTENTION, Need.FEATURES})

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Class attention and the cosines of all pairs; each of the T steps only compares."""
        return pair_flops(shape, self.units(shape, budget), shape.width)

    def choose(self, tokens: VisualTokens, count: int) -> Selected:
        """The tokens of the largest score, which suppress those like them."""
        saliency = tokens.of_tiles(class_saliency(tokens.needed(Need.ATTENTION)))
        direction = directions(ensure_finite("projected tokens", tokens.projected).float())
        distance = 1 - direction @ direction.transpose(1, 2)  # [B, N, N]
        likeness = torch.exp(-self.gamma * distance.square())
        return Selected(suppress(spread(saliency), likeness, count), vision=saliency)


def suppress(saliency: Tensor, likeness: Tensor, count: int) -> Tensor:
    """`count` tokens in the order they are chosen: [B, N], [B, N, N] -> [B, count]."""
    score, left, chosen = saliency, torch.ones_like(saliency, dtype=torch.bool), list[Tensor]()  # [B, 1] each
    for _ in range(count):
        best, index = score.masked_fill(~left, -torch.inf).max(1, keepdim=True)
        chosen.append(index)
        left = left.scatter(1, index, False)
        score = score - pick(likeness, index)[:, 0] * best.clamp_min(0)
    return torch.cat(chosen, dim=1)
