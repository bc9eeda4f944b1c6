"""Even division of a unit's patches into T regions, for methods that look at no content.

A unit is a rectangle of patches. It is cut into bands of rows, each band into cells of columns, so that there are
exactly T cells, as square and as equal as T allows: 64 of 24 x 24 are cells of 3 x 3; 192 are 14 bands of 13 or 14
cells. Cells depend on the rectangle's form only, so they are worked out once, on the CPU, for every form that N patches
can have. On the device each unit looks up its own form, so nothing waits for it.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from llava_consensus.reduction.tokens import VisualTokens

CPU = torch.device("cpu")


class Cells(NamedTuple):
    """T cells of each unit, in raster order of their centres. Indices count the unit's own tokens."""

    centre: Tensor  # [B, T] the patch in the middle, ascending
    group: Tensor  # [B, N] the cell of each patch


def divide(tokens: VisualTokens, count: int) -> Cells:
    """`count` cells, at most N, for each unit, a rectangle of patches whose rows and columns may have gaps."""
    size = tokens.patch.shape[1]
    forms, cells = _tables(size, count, tokens.patch.device)
    if not tokens.side:  # without a grid, the patches are one row
        found = cells[-1:].expand(len(tokens.patch), -1)
    else:
        row = tokens.patch // tokens.side  # [B, N]
        width = (row == row[:, :1]).sum(1)  # [B] patches in the first row
        found = embedding(embedding(width, forms)[:, 0], cells)  # [B, T + N]
    return Cells(found[:, :count], found[:, count:])


@lru_cache(maxsize=32)
def _tables(size: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each width of a rectangle of `size` patches, 0..size, the row [size + 1, 1] of the second table that is for
    it, and that table: centres and groups [forms, T + N]. Its last form is one row of patches.
    """
    with torch.inference_mode(False):  # a tensor made in inference mode could not be saved for a backward pass
        widths = [width for width in range(1, size + 1) if size % width == 0]
        forms = torch.full((size + 1, 1), len(widths) - 1, device=CPU)
        forms[widths, 0] = torch.arange(len(widths), device=CPU)
        cells = torch.stack([torch.cat(_cells(count, size // width, width)) for width in widths])
        return forms.to(device), cells.to(device)


def _cells(count: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Centres [T] and groups [N] of `count` cells of height x width patches."""
    bands = int((torch.tensor(count * height, device=CPU) / width).sqrt().round())
    bands = max(min(bands, height, count), -(-count // width))
    slot, place = torch.arange(count, device=CPU), torch.arange(height * width, device=CPU)
    row, column = place // width, place % width
    first, cells = _band(slot * bands // count, bands, count)
    centre = _middle(slot * bands // count, bands, height) * width + _middle(slot - first, cells, width)
    first, cells = _band(row * bands // height, bands, count)
    return centre, first + column * cells // width


def _band(band: Tensor, bands: int, count: int) -> tuple[Tensor, Tensor]:
    """The first cell of a band and how many it has, `count` cells being spread evenly over the bands."""
    first, after = (-(-number * count // bands) for number in (band, band + 1))
    return first, after - first


def _middle(cell: Tensor, cells: Tensor | int, length: int) -> Tensor:
    """The middle of one of the equal `cells` of a row or column; the lower one of two."""
    start, stop = (-(-edge * length // cells) for edge in (cell, cell + 1))
    return (start + stop - 1) // 2
