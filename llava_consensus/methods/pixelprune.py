"""PixelPrune: leave out the cells of an image whose pixels are predicted by their neighbours, before the vision tower
(arXiv 2604.00886; official code a870e31, its `pred_2d`).

A cell is the square of patches that makes one token. In raster order each is predicted from cells left, above and
between (A, B, C): by B where C equals A and not B, else by A; in the first row by A, in the first column by B. A cell
that its prediction does not differ from by more than the threshold leaves, and the prediction represents it. With
threshold 0 nothing is lost but the mass that copies have in the tower's attention; above 0, predictions are made of
the cells' representatives, so that errors do not add up.

The tower runs on the cells that stay, with their own positions, and a token that stays keeps its coordinates; the
cells that leave depend only on the image, and T only says whether to reduce at all. Differences: an image is
predicted diagonal by diagonal, which gives the same cells. Qwen3-VL, as in the authors' code; on Qwen2.5-VL windows of
the tower would have to be made again, and no array says how. A video of several frames is refused, where theirs fails.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import AtCells, Positions
from llava_consensus.reduction.options import NotNegative


@dataclass(frozen=True, kw_only=True)
class PixelPrune(AtCells):
    """Leave out cells of an image that repeat their neighbours, so that neither tower nor language model sees them.

    Args:
        threshold: the most that a cell may differ from its prediction, of pixels in 0..1; 0 is equality.
        measure: of the difference: `max` | `mae` (mean of its size) | `rmse`.
    """

    threshold: NotNegative = 0.0
    measure: Literal["max", "mae", "rmse"] = "max"
    positions: Positions = "keep"

    title: ClassVar[str] = "PixelPrune"
    multiplies_nothing: ClassVar[bool] = True

    def stand_ins(self, cells: Tensor) -> Tensor:
        """Place of the cell that represents each: [rows, columns, V] -> [rows, columns], its own for one that stays."""
        rows, columns = cells.shape[:2]
        own = torch.arange(rows * columns, device=cells.device).view(rows, columns)
        place, rebuilt = own.clone(), cells.clone()
        for diagonal in range(1, rows + columns - 1):  # cells of one diagonal follow from those of the two before
            row = torch.arange(max(0, diagonal - columns + 1), min(rows, diagonal + 1), device=cells.device)
            column = diagonal - row
            left, upper = (row, (column - 1).clamp_min(0)), ((row - 1).clamp_min(0), column)
            corner = rebuilt[upper[0], left[1]]
            edge = self._equal(corner, rebuilt[left]) & ~self._equal(corner, rebuilt[upper])
            by_upper = ((column == 0) | (edge & (row > 0)))[:, None]
            predicted = torch.where(by_upper, rebuilt[upper], rebuilt[left])
            same = self._equal(cells[row, column], predicted)
            rebuilt[row, column] = torch.where(same[:, None], predicted, cells[row, column])
            source = torch.where(by_upper[:, 0], place[upper], place[left])
            place[row, column] = torch.where(same, source, own[row, column])
        return place

    def _equal(self, one: Tensor, other: Tensor) -> Tensor:
        """Whether cells [n, V] differ by no more than the threshold: [n]."""
        apart = (one - other).abs()
        if self.measure == "max":
            return apart.amax(-1) <= self.threshold
        return (apart.mean(-1) if self.measure == "mae" else apart.square().mean(-1).sqrt()) <= self.threshold

    def entering(self, budget: Budget, available: int, layers: int) -> list[int]:
        """All tokens, which is the most it can be; a run's records have the true number."""
        return [available] * layers
