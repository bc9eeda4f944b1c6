"""Downsample: make the picture smaller, and change nothing else. VTC-Bench (arXiv 2510.07143) found that it beats many
compression methods. A tower of fixed size takes no small picture, so the pixels (already prepared for the tower) are
resized to rows x columns patches, antialiased, and the tower runs on these alone with its position embeddings
interpolated bicubically. Tokens are floor(sqrt T) rows of as many columns, or one column more where that fits: 192,
128, 64 and 32 give 182, 121, 64 and 30, never more than T, and it is these that are counted.
"""

from dataclasses import dataclass
from typing import ClassVar

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.grid import forbid_global, near_square
from llava_consensus.reduction.method import Placement
from llava_consensus.reduction.output import regroup
from llava_consensus.reduction.shape import Shape
from llava_consensus.reduction.tokens import Reduction, VisualTokens


@dataclass(frozen=True, kw_only=True)
class Downsample(Placement):
    """Shrink the picture until it has at most T patches, and run the vision tower on that."""

    order: str = "raster"

    seam: ClassVar[str] = "picture"

    def __post_init__(self) -> None:
        super().__post_init__()
        forbid_global("downsample", self.tile_budget)

    def picture(self, tokens: int) -> tuple[int, int]:
        """Rows and columns of patches a tile of this budget is shrunk to."""
        return near_square(tokens)

    def entering(self, budget: Budget, available: int, layers: int) -> list[int]:
        """Rows times columns, which is at most T."""
        return [self._count(budget, available)] * layers

    def vision_tokens(self, budget: Budget, shape: Shape) -> list[int]:
        """The small picture in every block."""
        share, size = self.units(shape, budget)[0]
        return [self._count(share, size)] * shape.blocks

    def reduce(self, tokens: VisualTokens, budget: Budget) -> Reduction:
        """The tokens of the small picture, which the host handed over spread over the full grid."""
        if tokens.slot is None:
            raise ValueError("downsample acts on the picture: the host did not shrink it")
        size = tokens.projected.shape[1]
        return regroup(tokens.projected, tokens.of_tiles(tokens.slot), self._count(budget, size), self.order)

    def _count(self, budget: Budget, available: int) -> int:
        rows, columns = self.picture(budget.tokens)
        return available if budget.tokens >= available else rows * columns
