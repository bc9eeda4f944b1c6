"""Pool: the mean of the projected tokens in each of T equal cells. Average pooling before the language model, as
resamplers and video models do it (3 x 3 patches to a token at T = 64 of 576). Where T does not divide the grid, the
cells of `grid.py` differ by one row or column and never overlap, unlike adaptive pooling; exactly T tokens for any T.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from llava_consensus.reduction import merging
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.grid import divide
from llava_consensus.reduction.method import AfterTower, Order, Shape
from llava_consensus.reduction.selection import assemble
from llava_consensus.reduction.tokens import Reduction, VisualTokens


@dataclass(frozen=True, kw_only=True)
class Pool(AfterTower):
    """Average the tokens of each of T equal cells of the image, without looking at it."""

    order: Order = "raster"

    by_grid: ClassVar[bool] = True

    def flops(self, shape: Shape, budget: Budget) -> float:
        """The product with the 0/1 matrix of the cells."""
        return sum(2.0 * size * shape.width * count for count, size in self.losing(shape, budget))

    def reduce(self, tokens: VisualTokens, budget: Budget) -> Reduction:
        """`budget.tokens` means, each standing at the middle of its cell."""
        size = tokens.projected.shape[1]
        count = min(budget.tokens, size)
        cells = divide(tokens, count)
        places = torch.arange(size, device=cells.group.device).expand_as(cells.group)
        folded = merging.fold(tokens.projected, places, cells.centre, cells.group)
        return assemble(tokens.projected, cells.centre[:, :0], self.order, folded)
