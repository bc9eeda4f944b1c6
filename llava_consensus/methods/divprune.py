"""DivPrune: keep the T most different tokens, whatever they show (Alvar et al., CVPR 2025). Greedy max-min selection on
the cosine distance of projected tokens: first the token whose nearest neighbour is farthest, then always the token
farthest from all that are chosen. As the authors' code does it, but with the distance to the nearest chosen token kept
up to date instead of worked out again at every step; in float32; exactly T, where they round a share; never a token
twice, where they repeat one once all distances left are zero; and newline tokens of anyres are no candidates.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Selected, Selector, Shape, Tiled
from llava_consensus.reduction.selection import cosines, greedy
from llava_consensus.reduction.tokens import VisualTokens, ensure_finite


@dataclass(frozen=True, kw_only=True)
class DivPrune(Selector, Tiled):
    """Keep the T tokens that are farthest apart, by cosine distance of the projected tokens."""

    title: ClassVar[str] = "DivPrune"

    def flops(self, shape: Shape, budget: Budget) -> float:
        """The cosines of all pairs; each of the T steps only compares."""
        return sum(2.0 * size**2 * shape.width for _, size in self.losing(shape, budget))

    def choose(self, tokens: VisualTokens, count: int) -> Selected:
        return Selected(spread_out(tokens.projected, count))


def spread_out(points: Tensor, count: int) -> Tensor:
    """Places of `count` tokens of [B, N, D] in the order they are chosen: [B, count]. Ties go to the lower place."""
    direction = normalize(ensure_finite("projected tokens", points).float(), dim=-1)
    table = cosines(direction)
    loss = table[:, :-1].sub_(1.0)  # [B, N, N], the negated distance
    loss.diagonal(dim1=1, dim2=2).fill_(-torch.inf)  # a token is not its own neighbour
    return greedy(table, count, first=loss.amax(2).argmin(1, keepdim=True))
