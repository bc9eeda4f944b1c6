"""Drawings of the kept, merged and dropped patches of an image. All drawings of patches are made here.

Kept, merged and dropped (KEY) differ in lightness, so that they can be distinguished without colour vision and in grey
print. The grid of patches lies over the image as the model saw it, padded to a square; the padding is cut off again.

Reads plain indices (see `reduction.tokens.Reduction`), no model and no torch:

    image = overlay(image, reduction.kept[0], reduction.anchors[0], reduction.owner[0], grid=24)
    contact_sheet([("ConsensusDrop, 64 of 576", image)], columns=1).save("kept.png")
"""

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from llava_consensus.errors import missing_extra

SIDE = (768, 1152)  # least and greatest width in pixels of the padded square in the image
MERGED, DROPPED = 0.62, 0.9  # how far a merged patch goes toward its tint, and a dropped one toward white
PALE = 0.5  # how far a tint goes toward white
PAPER, INK = (255, 255, 255), (30, 30, 30)
CALM = (176, 196, 214)  # the one tint if merged tokens are not distinguished
HUES = (  # Okabe and Ito's, distinct with any kind of colour vision
    (86, 180, 233),
    (230, 159, 0),
    (0, 158, 115),
    (204, 121, 167),
    (0, 114, 178),
    (213, 94, 0),
    (240, 228, 66),
)
GREY = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # ITU-R BT.601
PANEL, MARGIN, TEXT = 480, 18, 19  # a contact sheet in pixels
LINE = 5  # pixels between lines
EDGE = (214, 214, 214)  # a frame
KEY = "Outlined: kept as it is. Tinted: merged, one tint for each token, a dot on its anchor. Nearly white: dropped."

Indices = Sequence[int] | np.ndarray
Colour = tuple[int, int, int]
Box = tuple[int, int, int, int]


class View(NamedTuple):
    """An image under the grid of patches by which a model saw it."""

    pixels: np.ndarray  # [rows * cell, columns * cell, 3] float, 0 to 255, with the padding
    box: Box  # left, top, right and bottom of the image in it
    rows: int
    columns: int
    cell: int  # pixels of a patch's side
    first: int  # number of its first patch among all patches of the image


class Fates(NamedTuple):
    is_kept: np.ndarray  # [N]
    owner: np.ndarray  # [N] output slots, -1 where dropped
    heads: dict[int, int]  # the patch that leads each slot of several: an anchor, or a kept patch merged into


def view(image: Image.Image, grid: tuple[int, int], first: int = 0, side: tuple[int, int] = SIDE) -> View:
    """An image in the middle of rows x columns of patches, padded as LLaVA pads; `side` bounds the longer side."""
    cell = max(1, round(min(max(*image.size, side[0]), side[1]) / max(grid)))
    (width, height), (down, across) = image.size, (grid[0] * cell, grid[1] * cell)
    scale = min(across / width, down / height)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    left, top = (across - size[0]) // 2, (down - size[1]) // 2
    padded = Image.new("RGB", (across, down), PAPER)
    padded.paste(image.convert("RGB").resize(size, Image.Resampling.LANCZOS), (left, top))
    box = (left, top, left + size[0], top + size[1])
    return View(np.asarray(padded, dtype=np.float32), box, *grid, cell, first)


def fates(kept: Indices, anchors: Indices, owner: Indices) -> Fates:
    """Outcome of patches, from the indices of kept ones and of anchors, and the output slot of every patch."""
    kept, anchors, owner = (np.asarray(part, dtype=np.int64).reshape(-1) for part in (kept, anchors, owner))
    is_kept = np.isin(np.arange(owner.size), kept)
    leaders = {int(owner[index]): int(index) for index in [*kept, *anchors]}
    shared = {int(slot) for slot in owner[~is_kept] if slot >= 0}
    return Fates(is_kept, owner, {slot: leaders[slot] for slot in sorted(shared) if slot in leaders})


def overlay(
    image: Image.Image, kept: Indices, anchors: Indices, owner: Indices, grid: int | tuple[int, int]
) -> Image.Image:
    """The image with every patch drawn as kept, merged (tinted by anchor) or dropped; `owner` holds output slots."""
    shape = (grid, grid) if isinstance(grid, int) else grid
    known = fates(kept, anchors, owner)
    if known.owner.size != shape[0] * shape[1]:
        raise ValueError(f"owner has {known.owner.size} patches, but the grid is {shape[0]} x {shape[1]}")
    return selection(view(image, shape), known)


def draw(seen: View) -> Image.Image:
    """The image itself, as large as the drawings of the same view."""
    return _finished(seen, seen.pixels)


def selection(
    seen: View, known: Fates, shown: Sequence[str] = ("kept", "merged"), outline: Colour = INK, apart: bool = True
) -> Image.Image:
    """Kept patches as they are inside an outline, merged ones tinted (`apart`: each token in its own tint, with a dot
    on its anchor), all others nearly white, with them the kinds that are not `shown`.
    """
    here = slice(seen.first, seen.first + seen.rows * seen.columns)
    owner = known.owner[here]
    is_kept = known.is_kept[here] & ("kept" in shown)
    is_merged = ~known.is_kept[here] & (owner >= 0) & ("merged" in shown)
    tints = {slot: tint(number) for number, slot in enumerate(known.heads)} if apart else {}
    grey = (seen.pixels @ GREY)[..., None]
    by_patch = np.array([tints.get(int(slot), CALM) for slot in owner], dtype=np.float32)
    tinted = (1 - MERGED) * grey + MERGED * _per_pixel(seen, by_patch)
    rest = np.where(_per_pixel(seen, is_merged)[..., None], tinted, (1 - DROPPED) * grey + DROPPED * 255)
    drawn = Image.fromarray(_whole(np.where(_per_pixel(seen, is_kept)[..., None], seen.pixels, rest)))
    draw = ImageDraw.Draw(drawn)
    if apart and "merged" in shown:
        _edges(draw, seen, np.where(is_merged, owner, -1), PAPER, max(1, seen.cell // 24))
    _edges(draw, seen, is_kept, outline, _line(seen))
    for slot, index in known.heads.items() if apart and "merged" in shown else ():
        if here.start <= index < here.stop:
            _mark(draw, seen, index - seen.first, tints[slot])
    return drawn.crop(seen.box)


def heat(seen: View, values: Sequence[float]) -> Image.Image:
    """A saliency of the patches over the grey image, from its least to its 99th percentile; bright is salient."""
    try:
        from matplotlib import colormaps
    except ImportError as error:
        raise missing_extra("heat maps (matplotlib)", "plots") from error
    table = np.nan_to_num(np.asarray(values, dtype=np.float64).reshape(-1))
    low, high = table.min(), np.percentile(table, 99)
    shares = ((table - low) / (high - low if high > low else 1)).clip(0, 1)
    colours = 255 * np.asarray(colormaps["viridis"](shares))[:, :3].astype(np.float32)
    return _finished(seen, 0.28 * (seen.pixels @ GREY)[..., None] + 0.72 * _per_pixel(seen, colours))


def overlap(
    seen: View, sets: Mapping[Colour, Sequence[int]], both: Colour, framed: Sequence[int], frame: Colour
) -> Image.Image:
    """A Venn diagram on the image: both sets and their overlap in three colours, a further set outlined."""
    masks = [_mask(seen, places) for places in sets.values()]
    shared = masks[0] & masks[1]
    pixels = 0.45 * (seen.pixels @ GREY)[..., None] + 0.55 * np.array(PAPER, dtype=np.float32)
    for colour, mask in [*zip(sets, (masks[0] & ~shared, masks[1] & ~shared), strict=True), (both, shared)]:
        tint = 0.35 * seen.pixels + 0.65 * np.array(colour, dtype=np.float32)
        pixels = np.where(_per_pixel(seen, mask)[..., None], tint, pixels)
    drawn = Image.fromarray(_whole(pixels))
    _edges(ImageDraw.Draw(drawn), seen, _mask(seen, framed), frame, _line(seen))
    return drawn.crop(seen.box)


def tint(number: int) -> Colour:
    """The pale tint of the number-th merged token: seven hues, in three degrees of lightness one after the other."""
    turn, place = divmod(number, len(HUES))
    share = (PALE, PALE + 0.25, PALE - 0.25)[turn % 3]
    red, green, blue = (round(part + share * (255 - part)) for part in HUES[place])
    return red, green, blue


def _line(seen: View) -> int:
    return min(8, max(2, seen.cell // 12))


def _mask(seen: View, places: Sequence[int]) -> np.ndarray:
    return np.isin(np.arange(seen.rows * seen.columns) + seen.first, np.asarray(places, dtype=np.int64))


def _per_pixel(seen: View, values: np.ndarray) -> np.ndarray:
    """[rows * columns, ...] -> [H, W, ...]: the value of the patch in which a pixel lies."""
    table = values.reshape(seen.rows, seen.columns, *values.shape[1:])
    return table.repeat(seen.cell, axis=0).repeat(seen.cell, axis=1)


def _whole(pixels: np.ndarray) -> np.ndarray:
    return pixels.clip(0, 255).round().astype(np.uint8)


def _finished(seen: View, pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(_whole(pixels)).crop(seen.box)


def _edges(draw: ImageDraw.ImageDraw, seen: View, values: np.ndarray, colour: Colour, width: int) -> None:
    table, cell = values.reshape(seen.rows, seen.columns), seen.cell
    for row, column in np.argwhere(table[1:] != table[:-1]).tolist():
        draw.line([column * cell, (row + 1) * cell, (column + 1) * cell, (row + 1) * cell], colour, width)
    for row, column in np.argwhere(table[:, 1:] != table[:, :-1]).tolist():
        draw.line([(column + 1) * cell, row * cell, (column + 1) * cell, (row + 1) * cell], colour, width)


def _mark(draw: ImageDraw.ImageDraw, seen: View, place: int, colour: Colour) -> None:
    row, column = divmod(place, seen.columns)
    edge, width = max(1, seen.cell // 6), max(1, seen.cell // 12)
    left, top, across = column * seen.cell + edge, row * seen.cell + edge, max(0, seen.cell - 2 * edge - 1)
    draw.ellipse([left, top, left + across, top + across], colour, INK, width)


# ---- images side by side, with captions and the key to the colours


def contact_sheet(
    panels: Sequence[tuple[str, Image.Image]],
    columns: int,
    head: Sequence[str] = (),
    width: int = PANEL,
    key: str = KEY,
) -> Image.Image:
    """Panels in rows, each under its caption, with the key to the overlay's colours at the foot."""
    if not panels or columns < 1:
        raise ValueError(f"a contact sheet needs panels and columns, got {len(panels)} and {columns}")
    columns = min(columns, len(panels))
    inner = columns * (width + MARGIN) - MARGIN
    tiles = []
    for caption, image in panels:
        size = width, max(1, round(image.height * width / image.width))
        framed = ImageOps.expand(
            image.convert("RGB").resize(size, Image.Resampling.LANCZOS).crop((2, 2, *size)), 1, EDGE
        )
        tiles.append(_joined([_text(caption, width), framed]))
    rows = [_text("\n".join(head), inner)] if head else []
    rows += [_joined(tiles[first : first + columns], MARGIN, across=True) for first in range(0, len(tiles), columns)]
    return ImageOps.expand(_joined([*rows, _text(key, inner)], MARGIN), MARGIN, PAPER)


def _text(text: str, width: int) -> Image.Image:
    lines = [part for line in text.split("\n") for part in wrap(line, width // (TEXT // 2)) or [""]]
    image = Image.new("RGB", (width, len(lines) * (TEXT + LINE)), PAPER)
    font = ImageFont.load_default(TEXT)
    for place, line in enumerate(lines):
        ImageDraw.Draw(image).text((0, place * (TEXT + LINE)), line, INK, font)
    return image


def _joined(images: Sequence[Image.Image], gap: int = 0, across: bool = False) -> Image.Image:
    sizes = np.array([image.size if across else image.size[::-1] for image in images])
    length, other = int(sizes[:, 0].sum()) + gap * (len(images) - 1), int(sizes[:, 1].max())
    sheet, place = Image.new("RGB", (length, other) if across else (other, length), PAPER), 0
    for image in images:
        sheet.paste(image, (place, other - image.height) if across else (0, place))
        place += gap + (image.width if across else image.height)
    return sheet
