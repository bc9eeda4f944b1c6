"""SCOPE: keep the salient tokens that cover the others (Deng et al., NeurIPS 2025, arXiv 2510.24214, section 3;
official code 6bf7306).

A token is covered by the kept token that its feature is most like. Each step keeps the token by which most coverage is
gained, times its class attention to the power alpha. As in the authors' code coverage starts at 0, so that a token
unlike everything kept counts as not covered. Differences: float32 throughout, ties go to the lower index, and
attention is the mean over heads, where theirs is the sum, which changes no product's rank. Nothing depends on the depth
of a model.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.merging import directions
from llava_consensus.reduction.method import ReadsTower, Selected, Selector, Shape
from llava_consensus.reduction.options import NotNegative
from llava_consensus.reduction.saliency import class_saliency, pair_flops
from llava_consensus.reduction.selection import distinct, pick
from llava_consensus.reduction.tokens import Need, VisualTokens, ensure_finite


@dataclass(frozen=True, kw_only=True)
class Scope(Selector, ReadsTower):
    """Keep T tokens, each the one that gains most coverage of all tokens, weighted with its class attention.

    Args:
        alpha: exponent of the attention, at least 0; the official scripts take 1, and 0 is coverage only.
    """

    alpha: NotNegative = 1.0

    title: ClassVar[str] = "SCOPE"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.ATTENTION, Need.FEATURES})

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Class attention and the cosines of all pairs; each of the T steps only compares and adds."""
        return pair_flops(shape, self.losing(shape, budget), shape.vision_width)

    def choose(self, tokens: VisualTokens, count: int) -> Selected:
        saliency = tokens.of_tiles(class_saliency(tokens.needed(Need.ATTENTION)))
        features = ensure_finite("features of the vision tower", tokens.needed(Need.FEATURES))
        direction = directions(tokens.of_tiles(features.float()))
        return Selected(cover(direction @ direction.transpose(1, 2), saliency**self.alpha, count), vision=saliency)


def cover(similarity: Tensor, weight: Tensor | None, count: int) -> Tensor:
    """`count` tokens from how much each covers of each of R things, [B, N, R], which is overwritten: [B, count].

    The matrix holds the larger of a token's coverage and the current coverage. So the row of the last choice
    is the current coverage, and the 1-distance from it is a token's gain, exactly 0 for one that adds nothing.

    Args:
        weight: [B, N] that gains are multiplied with; None if all are 1.
    Returns:
        [B, count] in the order of the choices, none twice.
    """
    chosen: list[Tensor] = []  # [B, 1] each
    covered = torch.zeros_like(similarity[:, :1])  # [B, 1, R]
    for step in range(count):
        if step:
            covered = pick(similarity, chosen[-1])
        similarity = torch.clamp_min(similarity, covered, out=similarity)
        gain = torch.cdist(similarity, covered, p=1.0)[..., 0]  # [B, N]
        chosen.append((gain if weight is None else gain * weight).argmax(1, keepdim=True))
    return distinct(torch.cat(chosen, dim=1), similarity.shape[1])
