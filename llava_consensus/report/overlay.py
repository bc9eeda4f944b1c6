"""Pictures of what a reduction kept, for people: one overlay, or several side by side with captions.

A patch kept as it is stays bright inside a white outline; a merged patch is dim and tinted in the colour of the anchor
that stands for it, and a dot in that colour marks the anchor itself; a dropped patch is nearly black. The model saw
the picture padded to a square (`image_aspect_ratio=pad`): the grid is laid over that square, then the padding is cut
off again; an anchor that lies in the padding is a ring at the nearest edge.
Reads plain indices (see `reduction.tokens.Reduction`), no model and no torch:

    picture = overlay(image, reduction.kept[0], reduction.anchors[0], reduction.owner[0], grid=24)
    contact_sheet([("ConsensusDrop, 64 of 576", picture)], columns=1).save("kept.png")
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

SIDE = (768, 1152)  # the padded square in the picture is at least and at most so many pixels wide
MERGED_LIGHT, TINT, DROPPED_LIGHT = 0.45, 0.7, 0.13
PAPER, INK = (255, 255, 255), (30, 30, 30)
HUES = (  # Okabe and Ito's, which people with any kind of colour vision tell apart
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
)

Indices = Sequence[int] | np.ndarray
Colour = tuple[int, int, int]


def overlay(
    image: Image.Image, kept: Indices, anchors: Indices, owner: Indices, grid: int | tuple[int, int]
) -> Image.Image:
    """The picture with every patch shown as kept, merged (tinted by anchor) or dropped; `owner` holds output slots."""
    rows, columns = (grid, grid) if isinstance(grid, int) else grid
    fates = _fates(kept, anchors, owner)
    if fates.owner.size != rows * columns:
        raise ValueError(f"owner has {fates.owner.size} patches, but the grid is {rows} x {columns}")
    return _panel(image, fates, 0, (rows, columns))


def tiled_overlay(
    image: Image.Image, kept: Indices, anchors: Indices, owner: Indices, side: int, grid: tuple[int, int]
) -> tuple[Image.Image, Image.Image]:
    """The same of a picture that the model saw twice: whole, as a base view of side x side patches, for which it was
    stretched to a square, and cut into rows x columns of tiles. One colour is one anchor in both.

    Args:
        kept, anchors, owner: of the patches of the base view, then of the grid, row by row over all of its tiles. A
            patch that is no token, which unpadding cuts away, is dropped.
        side: patches in a row of a tile.
        grid: rows and columns of tiles.
    """
    fates = _fates(kept, anchors, owner)
    patches = grid[0] * side, grid[1] * side
    if fates.owner.size != side**2 + patches[0] * patches[1]:
        raise ValueError(f"owner has {fates.owner.size} patches, which are not {side} x {side} and {patches}")
    whole = _panel(image.resize((max(image.size),) * 2, Image.Resampling.LANCZOS), fates, 0, (side, side))
    tiles = _panel(image, fates, side**2, patches)
    return whole.resize(tiles.size, Image.Resampling.LANCZOS), tiles


class _Fates(NamedTuple):
    """What became of patches."""

    is_kept: np.ndarray  # [N]
    owner: np.ndarray  # [N] output slots
    heads: dict[int, int]  # the patch that leads each slot of several
    colours: dict[int, Colour]  # of these slots


def _fates(kept: Indices, anchors: Indices, owner: Indices) -> _Fates:
    kept, anchors, owner = (np.asarray(part, dtype=np.int64).reshape(-1) for part in (kept, anchors, owner))
    is_kept = np.isin(np.arange(owner.size), kept)
    heads = _heads(kept, anchors, owner, is_kept)
    return _Fates(is_kept, owner, heads, {slot: colour(number) for number, slot in enumerate(heads)})


def _panel(image: Image.Image, fates: _Fates, first: int, grid: tuple[int, int]) -> Image.Image:
    """The picture with the patches of one grid, of which the first is number `first`."""
    rows, columns = grid
    here = slice(first, first + rows * columns)
    is_kept, owner = fates.is_kept[here], fates.owner[here]
    cell = _cell(image.size, max(grid))
    padded, box = _padded(image, grid, cell)
    shaded = _shade(np.asarray(padded, dtype=np.float32), is_kept, owner, fates.colours, grid)
    picture = Image.fromarray(shaded.round().astype(np.uint8))
    draw = ImageDraw.Draw(picture)
    _outline(draw, is_kept.reshape(grid), cell)
    for slot, index in fates.heads.items():
        if here.start <= index < here.stop:
            row, column = divmod(index - first, columns)
            _mark(draw, (column * cell, row * cell), cell, box, fates.colours[slot])
    return picture.crop(box)


def _cell(size: tuple[int, int], across: int) -> int:
    low, high = SIDE
    return max(1, round(min(max(*size, low), high) / across))


def _padded(image: Image.Image, grid: tuple[int, int], cell: int) -> tuple[Image.Image, tuple[int, int, int, int]]:
    """The picture in the middle of its grid, as LLaVA pads it, and the box it fills there."""
    (width, height), (down, across) = image.size, (grid[0] * cell, grid[1] * cell)
    scale = min(across / width, down / height)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    left, top = (across - size[0]) // 2, (down - size[1]) // 2
    padded = Image.new("RGB", (across, down))
    padded.paste(image.convert("RGB").resize(size, Image.Resampling.LANCZOS), (left, top))
    return padded, (left, top, left + size[0], top + size[1])


def _heads(kept: np.ndarray, anchors: np.ndarray, owner: np.ndarray, is_kept: np.ndarray) -> dict[int, int]:
    """Output slots that stand for others, and the patch that leads each: an anchor, or a kept patch merged into."""
    leaders = {int(owner[index]): int(index) for index in [*kept, *anchors]}
    shared = {int(slot) for slot in owner[~is_kept] if slot >= 0}
    return {slot: leaders[slot] for slot in sorted(shared) if slot in leaders}


def colour(number: int) -> Colour:
    """One of seven colours that do not need full colour vision, in three degrees of lightness one after the other."""
    turn, place = divmod(number, len(HUES))
    towards, share = ((0, 0.0), (255, 0.3), (0, 0.25))[turn % 3]
    red, green, blue = (round(part + share * (towards - part)) for part in HUES[place])
    return red, green, blue


def _shade(
    pixels: np.ndarray, is_kept: np.ndarray, owner: np.ndarray, colours: dict[int, Colour], grid: tuple[int, int]
) -> np.ndarray:
    """Pixels [H, W, 3] as they are, dim and tinted, or nearly black, by the patch they lie in."""
    tints = np.array([colours.get(int(slot), (128, 128, 128)) for slot in owner], dtype=np.float32)
    spread = (pixels.shape[0] // grid[0], pixels.shape[1] // grid[1])

    def per_pixel(values: np.ndarray) -> np.ndarray:  # [N, ...] -> [H, W, ...]
        return values.reshape(*grid, *values.shape[1:]).repeat(spread[0], axis=0).repeat(spread[1], axis=1)

    gray = pixels @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    light = (0.25 + 0.75 * gray / 255)[..., None]
    merged = MERGED_LIGHT * ((1 - TINT) * gray[..., None] + TINT * 2 * per_pixel(tints) * light)
    rest = np.where(per_pixel(owner < 0)[..., None], DROPPED_LIGHT * gray[..., None], merged)
    return np.where(per_pixel(is_kept)[..., None], pixels, rest).clip(0, 255)


def _outline(draw: ImageDraw.ImageDraw, is_kept: np.ndarray, cell: int) -> None:
    """A white line wherever a kept patch meets one that is not."""
    width = max(1, cell // 14)
    for row, column in np.argwhere(is_kept[1:] != is_kept[:-1]):
        draw.line([column * cell, (row + 1) * cell, (column + 1) * cell, (row + 1) * cell], PAPER, width)
    for row, column in np.argwhere(is_kept[:, 1:] != is_kept[:, :-1]):
        draw.line([(column + 1) * cell, row * cell, (column + 1) * cell, (row + 1) * cell], PAPER, width)


def _mark(
    draw: ImageDraw.ImageDraw, corner: tuple[int, int], cell: int, box: tuple[int, int, int, int], colour: Colour
) -> None:
    """A dot on an anchor's patch; if its middle is in the padding, a ring where the picture is nearest."""
    left = max(box[0], min(corner[0], box[2] - cell))
    top = max(box[1], min(corner[1], box[3] - cell))
    outside = max(abs(left - corner[0]), abs(top - corner[1])) * 2 > cell
    dot(draw, (left, top), cell, colour, ring=outside)


def dot(draw: ImageDraw.ImageDraw, corner: tuple[int, int], cell: int, colour: Colour, ring: bool = False) -> None:
    edge, width = max(1, cell // 12), max(1, cell // 10)
    left, top, across = corner[0] + edge, corner[1] + edge, max(0, cell - 2 * edge - 1)
    if ring:
        draw.ellipse([left, top, left + across, top + across], INK, colour, 2 * width)
    else:
        draw.ellipse([left, top, left + across, top + across], colour, PAPER, width)
