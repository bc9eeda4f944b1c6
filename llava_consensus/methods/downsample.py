"""Downsample: make the picture smaller, and change nothing else. VTC-Bench (arXiv 2510.07143) found that it beats many
compression methods. A tower of fixed size takes no small picture, so the pixels (already prepared for the tower) are
resized to rows x columns patches, antialiased, and the tower runs on these alone with its position embeddings
interpolated bicubically. Tokens are floor(sqrt T) rows of as many columns, or one column more where that fits: 192,
128, 64 and 32 give 182, 121, 64 and 30, never more than T, and it is these that are counted.
"""

import math
from dataclasses import dataclass

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import AtPicture, Shape


@dataclass(frozen=True, kw_only=True)
class Downsample(AtPicture):
    """Shrink the picture until it has at most T patches, and run the vision tower on that."""

    def picture(self, tokens: int) -> tuple[int, int]:
        """Rows and columns of patches a tile of this budget is shrunk to."""
        return near_square(tokens)

    def left(self, budget: Budget, available: int) -> int:
        """Rows times columns, which is at most T."""
        rows, columns = self.picture(budget.tokens)
        return available if budget.tokens >= available else rows * columns

    def entering(self, budget: Budget, available: int, layers: int) -> list[int]:
        """The patches of the small picture, in every layer."""
        return [self.left(budget, available)] * layers

    def vision_tokens(self, budget: Budget, shape: Shape) -> list[int]:
        """The small picture in every block."""
        share, size = self.units(shape, budget)[0]
        return [self.left(share, size)] * shape.blocks

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Nothing: resizing the pixels is no matrix product."""
        return 0.0


def near_square(count: int) -> tuple[int, int]:
    """Rows and columns of the largest grid of at most `count` cells that is a square or one column more: 64 -> 8 x 8,
    192 -> 13 x 14.
    """
    rows = math.isqrt(count)
    return rows, rows + (rows * (rows + 1) <= count)
