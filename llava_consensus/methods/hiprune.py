"""HiPrune: tokens that a middle block of the vision tower looks at, those beside them, and those that the last block
looks at (Liu et al., 2025, arXiv 2508.00553; official code 6e83a12).

Of T tokens alpha T / 5 are anchors, the most looked at in the earlier block, by all rows of its attention. With the
tokens left, right, above and below they stay, and the most looked at in the block that feeds the projector fill up to
T. As in the authors' code a neighbour is found by its number: beside a row's end lies the next row's beginning, and
above the first row and below the last lie the image's first token and its last. Differences: where anchors and
neighbours are more than T, the lowest of them stay (the authors' code fails), and ties go to the lower index. The
earlier block is the ninth of CLIP's 24 and the sixteenth of Qwen2.5-VL's 32 in the authors' code; elsewhere it is the
one at 9/24 of the depth.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import ReadsBlocks, Selected, Selector, Shape
from llava_consensus.reduction.options import Ratio
from llava_consensus.reduction.saliency import class_saliency, received_saliency
from llava_consensus.reduction.selection import top
from llava_consensus.reduction.tokens import Need, VisionAttention, VisualTokens

BESIDE = 5  # an anchor and its neighbours


@dataclass(frozen=True, kw_only=True)
class HiPrune(Selector, ReadsBlocks):
    """Keep tokens that a middle vision block attends to with their neighbours, and those the last one attends to.

    Args:
        alpha: share of the tokens that are anchors and their neighbours, in [0, 1].
    """

    alpha: Ratio = 0.1

    title: ClassVar[str] = "HiPrune"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.ATTENTION, Need.EARLIER})
    early: ClassVar[float] = 9 / 24

    def anchors(self, count: int) -> int:
        return round(count * self.alpha / BESIDE)

    def flops(self, shape: Shape, budget: Budget) -> float:
        """The attention of two blocks."""
        rows = shape.patches + shape.classes
        return 2 * 2.0 * shape.tiles * rows**2 * shape.vision_width if self.losing(shape, budget) else 0.0

    def choose(self, tokens: VisualTokens, count: int) -> Selected:
        middle = tokens.by_token(looked_at(tokens.needed(Need.EARLIER)))  # [U, N_tile]
        last = tokens.of_tiles(looked_at(tokens.needed(Need.ATTENTION)))
        anchors = top(middle[tokens.tile, tokens.patch], self.anchors(count))
        near = beside(tokens, anchors, middle.shape[1])
        return Selected(top(last.masked_fill(near, torch.inf), count), vision=last)


def looked_at(attention: VisionAttention) -> Tensor:
    """Mean attention that each patch gets from all rows of a block, the class token and itself among them: [U, n]."""
    received = received_saliency(attention, own=True)
    if not attention.classes:
        return received
    rows = received.shape[1]
    return (received * rows + class_saliency(attention)) / (rows + 1)


def beside(tokens: VisualTokens, anchors: Tensor, size: int) -> Tensor:
    """Mask [B, N] of the anchors [B, k] and their neighbours, above and below only if tiles form a grid."""
    place, tile = tokens.patch.gather(1, anchors), tokens.tile.gather(1, anchors)
    steps = (0, -1, 1, *((-tokens.side, tokens.side) if tokens.side else ()))
    near = torch.cat([(place + step).clamp(0, size - 1) for step in steps], dim=1)  # [B, steps k]
    owner = tile.repeat(1, len(steps))
    return ((tokens.patch[..., None] == near[:, None]) & (tokens.tile[..., None] == owner[:, None])).any(2)
