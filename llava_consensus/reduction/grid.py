"""Even division of a unit's patches into T regions, for methods that look at no content.

A unit is a rectangle of patches. It is cut into bands of rows, each band into cells of columns, so that there are
exactly T cells, as square and as equal as T allows: 64 of 24 x 24 are cells of 3 x 3; 192 are 14 bands of 13 or 14
cells. Integer arithmetic on the device; nothing waits for it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from llava_consensus.reduction.tokens import VisualTokens


class Cells(NamedTuple):
    """T cells of each unit, in raster order of their centres. Indices count the unit's own tokens."""

    centre: Tensor  # [B, T] the patch in the middle, ascending
    group: Tensor  # [B, N] the cell of each patch


def divide(tokens: VisualTokens, count: int) -> Cells:
    """`count` cells, at most N, for each unit; its patches are a rectangle in raster order, of which rows and columns
    may be left out.
    """
    size = tokens.patch.shape[1]
    side = tokens.side or size  # without a grid, the patches are one row
    row, column = tokens.patch // side, tokens.patch % side
    row, column = _dense(row, side + size), _dense(column, side)
    height, width = row.amax(1, keepdim=True) + 1, column.amax(1, keepdim=True) + 1  # [B, 1]
    bands = (count * height / width).sqrt().round().long()
    bands = torch.minimum(bands, height).clamp_max(count).maximum((count + width - 1) // width)
    slot = torch.arange(count, device=row.device).expand(len(row), -1)  # [B, T]
    first, cells = _band(slot * bands // count, bands, count)
    centre_row = _middle(slot * bands // count, bands, height)
    centre_column = _middle(slot - first, cells, width)
    first, cells = _band(row * bands // height, bands, count)
    return Cells(centre_row * width + centre_column, first + column * cells // width)


def _dense(place: Tensor, size: int) -> Tensor:
    """Places [B, N] below `size`, counted among those that there are: 3, 5, 5, 9 -> 0, 1, 1, 2."""
    present = place.new_zeros(len(place), size).scatter(1, place, 1)
    return present.cumsum(1).gather(1, place) - 1


def _band(band: Tensor, bands: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first cell of a band and how many it has, `count` cells being spread evenly over the bands."""
    first = (band * count + bands - 1) // bands
    return first, ((band + 1) * count + bands - 1) // bands - first


def _middle(cell: Tensor, cells: Tensor, length: Tensor) -> Tensor:
    """The middle of one of the equal `cells` of a row or column; the lower one of two."""
    start, stop = ((edge * length + cells - 1) // cells for edge in (cell, cell + 1))
    return (start + stop - 1) // 2
