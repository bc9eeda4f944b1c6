"""MFPruner: three cues vote for the tokens that stay ("Rethinking Attention Cues: Multi-Factor Guided Token Pruning for
Efficient Vision-Language Understanding"; official code dluo112/MFPruner 023e74d).

Attention of the class token, unlikeness (1 less the mean cosine of a projected token with the others) and relevance to
the question in CLIP's space each vote for their best T tokens. Tokens of three votes stay, then those of two; seats
that are left are filled by the sum of the three cues. As in the authors' code relevance is the NEGATED cosine (take
`relevance=cosine` where a tower's patches do not point away from their content, see CDPruner), and only unlikeness is
not brought to 0..1. Differences: of two-vote tokens that are too many the best by the sum stay, where theirs are in
the order of a Python set; the sentence that asks for a single word is no part of the question; relevance is scaled
within an image. Without CLIP's text side relevance is as CDPruner's there. Nothing depends on the depth of a model.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from llava_consensus.methods.cdpruner import SHORT_ANSWER, relevance, relevance_products
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.merging import directions
from llava_consensus.reduction.method import ReadsTower, Selected, Selector, Shape
from llava_consensus.reduction.saliency import class_flops, class_saliency
from llava_consensus.reduction.selection import membership, rank
from llava_consensus.reduction.tokens import Need, VisualTokens, ensure_finite

EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class MFPruner(Selector, ReadsTower):
    """Keep the tokens that class attention, unlikeness and relevance agree on.

    Args:
        relevance: `negated` | `cosine`, of patch and question in CLIP's space.
    """

    relevance: Literal["negated", "cosine"] = "negated"

    title: ClassVar[str] = "MFPruner"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.ATTENTION, Need.FEATURES, Need.QUESTION, Need.WHOLE_IMAGES})

    def query(self, question: str) -> str:
        """The prompt's text without the sentence that asks for a single word."""
        return question.replace(SHORT_ANSWER, "")

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Class attention, the text tower, the patches' embeddings, and each token with the sum of the others."""
        sizes = [size for _, size in self.losing(shape, budget)]
        if not sizes:
            return 0.0
        return class_flops(shape) + shape.text_tower + 2.0 * sum(sizes) * (relevance_products(shape) + shape.width)

    def choose(self, tokens: VisualTokens, count: int) -> Selected:
        """The elected tokens; `cross` is the relevance, `fused` the sum of the cues."""
        saliency = tokens.of_tiles(class_saliency(tokens.needed(Need.ATTENTION)))
        sides = tokens.needed(Need.QUESTION)
        sides = sides._replace(patches=tokens.by_token(sides.patches))
        whole = tokens.needed(Need.WHOLE_IMAGES)
        cross = tokens.of_tiles(relevance(sides, whole, negated=self.relevance == "negated"))
        low, high = saliency.amin(1, keepdim=True), saliency.amax(1, keepdim=True)
        cues = torch.stack(((saliency - low + EPSILON) / (high - low + EPSILON), _unlike(tokens.projected), cross))
        fused = cues.sum(0)
        return Selected(elect(cues, fused, count), saliency, cross, fused)


def _unlike(projected: Tensor) -> Tensor:
    """1 less the mean over all N of a token's cosine with the others: [B, N, D] -> [B, N]."""
    direction = directions(ensure_finite("projected tokens", projected).float())
    together = (direction @ direction.sum(1)[..., None])[..., 0]
    return 1 - (together - direction.square().sum(2)) / direction.shape[1]


def elect(cues: Tensor, fused: Tensor, count: int) -> Tensor:
    """`count` tokens by their votes and then by the sum of the cues: [3, B, N], [B, N] -> [B, count]."""
    size = fused.shape[1]
    votes = sum(membership(rank(cue)[:, :count], size).long() for cue in cues)
    order = rank(fused)
    level = torch.as_tensor(votes).clamp_min(1).gather(1, order)  # one vote decides nothing
    return order.gather(1, rank(level)[:, :count])
