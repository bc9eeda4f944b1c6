"""What became of the patches of a picture, in matplotlib panels: kept ones as they are, merged ones in a calm tint.

A panel shows the whole picture in its own shape. The model saw it padded to a square, over which the grid of patches
lies, so patches of the padding are cut off with it. Reads plain indices, no model and no torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

SIDE = 480  # pixels of the padded square
CALM = (176, 196, 214)  # what merged patches are tinted with: a pale blue grey
MERGED, DROPPED = 0.62, 0.88  # how far a merged patch goes toward its tint, and a dropped one toward white
EDGE = 1.1  # points

Array = np.ndarray
Colour = str


class View(NamedTuple):
    """A picture as the model saw it: padded to a square of side x side patches."""

    square: Array  # [SIDE, SIDE, 3], 0 to 255
    left: int  # of the picture in the square, in pixels
    top: int
    right: int
    bottom: int
    side: int


def view(image: Image.Image, side: int) -> View:
    """The padded square of a picture, and where the picture lies in it."""
    scale = SIDE / max(image.size)
    width, height = (max(1, round(length * scale)) for length in image.size)
    left, top = (SIDE - width) // 2, (SIDE - height) // 2
    square = Image.new("RGB", (SIDE, SIDE), "white")
    square.paste(image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS), (left, top))
    return View(np.asarray(square, dtype=float), left, top, left + width, top + height, side)


def picture(panel: Any, seen: View) -> None:
    """The picture itself."""
    _show(panel, seen, seen.square)


def selection(panel: Any, seen: View, kept: Sequence[int], merged: Sequence[int], colour: Colour) -> None:
    """Kept patches as they are inside an outline, merged ones tinted, dropped ones nearly white."""
    grey = seen.square.mean(axis=-1, keepdims=True).repeat(3, axis=-1)
    is_kept, is_merged = (_per_pixel(_mask(seen, places), seen)[..., None] for places in (kept, merged))
    tinted = (1 - MERGED) * grey + MERGED * np.array(CALM, dtype=float)
    faded = (1 - DROPPED) * grey + DROPPED * 255
    _show(panel, seen, np.where(is_kept, seen.square, np.where(is_merged, tinted, faded)))
    outline(panel, seen, kept, colour)


def heat(panel: Any, seen: View, values: Sequence[float]) -> None:
    """A saliency over the grey picture, from its least to its 99th percentile; bright is salient."""
    grey = seen.square.mean(axis=-1)
    panel.imshow(grey, cmap="gray", vmin=0, vmax=255, extent=(0, SIDE, SIDE, 0))
    table = np.asarray(values, dtype=float).reshape(seen.side, seen.side)
    extent = (0, SIDE, SIDE, 0)
    panel.imshow(table, alpha=0.72, extent=extent, vmin=table.min(), vmax=np.percentile(table, 99) or None)
    _crop(panel, seen)


def overlap(panel: Any, seen: View, sets: Mapping[Colour, Sequence[int]], both: Colour) -> None:
    """A Venn diagram on the picture: patches in one of two sets in its colour, those in both in a third."""
    pale = 0.45 * seen.square.mean(axis=-1, keepdims=True).repeat(3, axis=-1) + 0.55 * 255
    masks = [_mask(seen, places) for places in sets.values()]
    pixels = pale.copy()
    shared = masks[0] & masks[1]
    for colour, mask in [*zip(sets, masks, strict=True), (both, shared)]:
        only = mask if colour == both else mask & ~shared
        tint = np.array(_rgb(colour))
        pixels = np.where(_per_pixel(only, seen)[..., None], 0.35 * seen.square + 0.65 * tint, pixels)
    _show(panel, seen, pixels)


def outline(panel: Any, seen: View, places: Sequence[int], colour: Colour) -> None:
    """A line wherever a patch of a set meets one that is not in it."""
    from matplotlib.collections import LineCollection

    inside = np.pad(_mask(seen, places), 1)
    step = SIDE / seen.side
    lines = []
    for row, column in np.argwhere(inside[1:] != inside[:-1]):
        lines.append([((column - 1) * step, row * step), (column * step, row * step)])
    for row, column in np.argwhere(inside[:, 1:] != inside[:, :-1]):
        lines.append([(column * step, (row - 1) * step), (column * step, row * step)])
    panel.add_collection(LineCollection(lines, colors=colour, linewidths=EDGE))


def _show(panel: Any, seen: View, pixels: Array) -> None:
    panel.imshow(pixels.clip(0, 255).astype(np.uint8), extent=(0, SIDE, SIDE, 0))
    _crop(panel, seen)


def _crop(panel: Any, seen: View) -> None:
    panel.set_xlim(seen.left, seen.right)
    panel.set_ylim(seen.bottom, seen.top)
    panel.set_xticks([])
    panel.set_yticks([])
    panel.spines[:].set_visible(False)


def _mask(seen: View, places: Sequence[int]) -> Array:
    """[side, side], true at these patches."""
    mask = np.zeros(seen.side**2, dtype=bool)
    mask[np.asarray(places, dtype=int)] = True
    return mask.reshape(seen.side, seen.side)


def _per_pixel(mask: Array, seen: View) -> Array:
    """[SIDE, SIDE] from [side, side]: the value of the patch in which a pixel lies."""
    place = np.arange(SIDE) * seen.side // SIDE
    return mask[place][:, place]


def _rgb(colour: Colour) -> tuple[int, ...]:
    return tuple(int(colour[start : start + 2], 16) for start in (1, 3, 5))
