"""The rule of `tokens="auto"`: more tokens for an image with small print, fewer for a plain one, before it is encoded.

Print is made of strokes: grey rises and falls again, or falls and rises, by at least EDGE within WIDE pixels. An image
is looked at with at most SIDE pixels a side, in GRID x GRID cells; a cell has small print where one pixel in RARE or
more lies on a stroke across or down. With d the part of such cells, an image is given min(1/2, (1 + 8 d) / 9) of its
tokens: of 576, 64 for a plain wall, 128 where print covers an eighth of the image, 288 for a page. Fur and
leaves have strokes too.
"""

from typing import Any

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.reduction.budget import AUTO, MOST, Share

SIDE, GRID = 672, 24
EDGE, WIDE, RARE = 32, 4, 16
PLAIN, GAIN = 1 / 9, 8


def auto_share(picture: Any) -> Share:
    """Share of its tokens that an image is given.

    Args:
        image: of PIL, of any size and mode.
    Raises:
        OptionError: for anything else.
    """
    if not hasattr(picture, "convert") or not hasattr(picture, "thumbnail"):
        raise OptionError(
            f"tokens={AUTO!r} looks at images of PIL, and this is {type(picture).__name__}: give a number or a share"
        )
    small = picture.convert("L")
    small.thumbnail((SIDE, SIDE))
    grey = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).view(small.height, small.width)
    return Share(round(min(MOST, PLAIN * (1 + GAIN * print_of(grey))), 4))


def print_of(grey: Tensor) -> float:
    """The part of cells with small print, in [0, 1], of grey values [h, w] of 0 to 255."""
    grey = grey.to(torch.int16)
    found = (strokes(grey) | strokes(grey.T).T).double()
    cells = [torch.arange(size) * GRID // size for size in grey.shape]
    cell = (cells[0][:, None] * GRID + cells[1]).flatten()
    pixels = torch.bincount(cell, minlength=GRID * GRID)
    marked = torch.bincount(cell, found.flatten(), minlength=GRID * GRID)
    return float((marked * RARE >= pixels.clamp_min(1)).double().mean())


def strokes(grey: Tensor) -> Tensor:
    """Pixels [h, w] that lie on strokes across."""
    step = grey.diff(dim=1)
    found = torch.zeros_like(grey, dtype=torch.bool)
    for width in range(1, min(WIDE, step.shape[1] - 1) + 1):
        first, last = step[:, :-width], step[:, width:]
        both = ((first >= EDGE) & (last <= -EDGE)) | ((first <= -EDGE) & (last >= EDGE))
        found[:, 1 : 1 + both.shape[1]] |= both
    return found
