"""Resize: the model's own lever, a smaller image, and nothing else. VTC-Bench (arXiv 2510.07143) found that it beats
many compression methods. How many tokens an image has follows from its size on most models, which a processor's
`max_pixels` or `max_soft_tokens` bounds; here the pixels, already prepared for the tower, are resized, antialiased, and
the model's own encoder reads the smaller image as if the processor had made it. T counts tokens, and a tile is made
smaller in whole ones, however many patches make a token. The grid has the image's own form: both sides times one
factor and rounded down, with one row or column more where that fits, of the side that rounding cost more. A token
is in the place of the first token of the full image that lies in its cell.

A tower of fixed size, such as LLaVA's, takes no small image: there it runs on rows x columns patches with its
position embeddings interpolated bicubically. Tokens are floor(sqrt T) rows and columns, or one column more where
that fits: 192, 128, 64 and 32 give 182, 121, 64 and 30, never more than T, and it is these that are counted. So it is
with the tiles of a tiled image, each of which is made smaller.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import AtImage, Shape


@dataclass(frozen=True, kw_only=True)
class Resize(AtImage):
    """Shrink the image until it has at most T patches, and run the vision tower on that."""

    multiplies_nothing: ClassVar[bool] = True

    def image_size(self, tokens: int, rows: int = 1, columns: int = 1) -> tuple[int, int]:
        """Rows and columns of tokens that a tile of rows x columns is shrunk to by this budget."""
        return smaller(tokens, rows, columns)

    def left(self, budget: Budget, available: int, side: int = 0) -> int:
        grid = (available // side, side) if side else ()
        rows, columns = self.image_size(budget.tokens, *grid)
        return available if budget.tokens >= available else rows * columns

    def entering(self, budget: Budget, available: int, layers: int) -> list[int]:
        """The patches of the small image, in every layer."""
        return [self.left(budget, available)] * layers

    def vision_tokens(self, budget: Budget, shape: Shape) -> list[int]:
        """The small image in every block."""
        share, size = self.units(shape, budget)[0]
        return [self.left(share, size)] * shape.blocks


def smaller(count: int, rows: int = 1, columns: int = 1) -> tuple[int, int]:
    """Rows and columns of a grid of at most `count` cells of the form of a larger one: 64 of a square are 8 x 8, 192
    are 13 x 14, and 20 of 4 x 12 are 2 x 8.
    """
    height = min(max(1, math.isqrt(count * rows // columns)), count)
    width = min(max(1, math.isqrt(count * columns // rows)), count // height)
    if height * columns >= width * rows:  # not too wide
        wider = height * (width + 1) <= count
        return height + (not wider and (height + 1) * width <= count), width + wider
    higher = (height + 1) * width <= count
    return height + higher, width + (not higher and height * (width + 1) <= count)
