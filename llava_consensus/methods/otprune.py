"""OTPrune: keep tokens whose distribution is near that of all tokens (Chen et al., CVPR 2026, arXiv 2602.20205;
official code xiwenc1/OTPrune 3414730).

Every channel of the projected tokens is divided by its norm over the tokens, G being the products of all pairs that are
left. The tokens are chosen that make the determinant of I + gamma G G large, one by one: a bound of the optimal
transport between all and kept tokens, by the authors. As in their code channels are normalised and not tokens, gamma is
0.01, an image of several tiles is one unit, and the question, which their function is given, is not read. Differences:
float32, exactly T where they round a share, newline tokens of anyres are no candidates, and a channel that is
zero everywhere stays zero. Gamma was set for N = 576 tokens of 4,096 channels, whose products grow with channels / N;
nothing depends on the depth of a model.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from llava_consensus.methods.cdpruner import greedy_map
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Selected, Selector, Shape, Tiled
from llava_consensus.reduction.options import Positive
from llava_consensus.reduction.tokens import VisualTokens, ensure_finite


@dataclass(frozen=True, kw_only=True)
class OTPrune(Selector, Tiled):
    """Keep the T tokens that span the distribution of all tokens best, by the determinant of their products.

    Args:
        gamma: weight of the products beside the identity, above 0.
    """

    tile_budget: Literal["per_tile", "global"] = "global"
    gamma: Positive = 0.01

    answer_version: ClassVar[int] = 2
    title: ClassVar[str] = "OTPrune"

    def flops(self, shape: Shape, budget: Budget) -> float:
        """The products of all pairs and their square; each of the T steps only subtracts."""
        return sum(2.0 * size**2 * (shape.width + size) for _, size in self.losing(shape, budget))

    def choose(self, tokens: VisualTokens, count: int) -> Selected:
        points = ensure_finite("projected tokens", tokens.projected).float()
        points = points / torch.linalg.vector_norm(points, dim=1, keepdim=True).clamp_min(1e-12)
        products = points @ points.transpose(1, 2)  # [B, N, N]
        kernel = torch.eye(points.shape[1], device=points.device) + self.gamma * (products @ products)
        return Selected(greedy_map(kernel, count))
