"""ToMe after the tower: merge the projected tokens two by two in one go, without touching the vision blocks. A second
reading of Token Merging (Bolya et al., ICLR 2023) for vision-language models, which the authors do not publish: their
bipartite matching without a class token, repeated, half of the tokens at most each time, until T are left. It saves
nothing in the tower, reaches any T, and shows what merging alone is worth. What similarity is measured on is averaged
with the tokens.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.merging import Bag, average, fresh, merge, pair
from llava_consensus.reduction.method import Order, ReadsTower, Shape
from llava_consensus.reduction.selection import regroup
from llava_consensus.reduction.tokens import Need, Reduction, VisualTokens


@dataclass(frozen=True, kw_only=True)
class ToMePost(ReadsTower):
    """Merge the most similar projected tokens two by two until T are left.

    Args:
        similarity: `key` (attention keys of the vision tower, mean over heads, as inside the tower) | `feature` (the
            tower's output) | `projected` (the tokens themselves).
    """

    order: Order = "raster"
    similarity: Literal["key", "feature", "projected"] = "key"

    needs: ClassVar[frozenset[Need]] = frozenset({Need.ATTENTION, Need.FEATURES})

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Similarities of even with odd places and the weighted sums of tokens and keys, in every round."""
        return sum(self._unit_flops(shape, share.tokens, size) for share, size in self.units(shape, budget))

    def _unit_flops(self, shape: Shape, tokens: int, left: int) -> float:
        key = shape.vision_width // shape.vision_heads
        width = {"key": key, "feature": shape.vision_width, "projected": shape.width}[self.similarity]
        total = 0.0
        while left > tokens:
            odd, count = left // 2, min(left - tokens, left // 2)
            total += 2.0 * (left - odd) * odd * width + 2.0 * odd * count * (width + shape.width)
            left -= count
        return total

    def reduce(self, tokens: VisualTokens, budget: Budget) -> Reduction:
        """`budget.tokens` means, weighted by the tokens in each."""
        bag = merged(tokens.projected, self._points(tokens), budget.tokens)
        spread = bag.values.gather(1, bag.place[..., None].expand(-1, -1, bag.values.shape[-1]))
        return regroup(spread, bag.place, bag.values.shape[1], self.order)

    def _points(self, tokens: VisualTokens) -> Tensor:
        """Points whose cosines are the similarity: [B, N, d] float32."""
        if self.similarity == "projected":
            return tokens.projected.detach().float()
        if self.similarity == "feature":
            return tokens.of_tiles(tokens.needed(Need.FEATURES).float())
        return tokens.of_tiles(tokens.needed(Need.ATTENTION).patch_keys())


def merged(values: Tensor, points: Tensor, count: int) -> Bag:
    """Tokens [B, N, D] merged by the similarity of their points [B, N, d] until `count` are left."""
    bag = fresh(values)
    while (left := bag.values.shape[1]) > count:
        with torch.no_grad():
            pairing = pair(points, min(left - count, left // 2))
            points = average(points, bag.size, pairing)
        bag = merge(bag, pairing)
    return bag
