"""Pictures of what a reduction kept, for people: one overlay, or several side by side with captions.

A patch kept as it is stays bright inside a white outline; a merged patch is dim and tinted in the colour of the anchor
that stands for it, and a dot in that colour marks the anchor itself; a dropped patch is nearly black. The model saw
the picture padded to a square (`image_aspect_ratio=pad`): the grid is laid over that square, then the padding is cut
off again; an anchor that lies in the padding is a ring at the nearest edge.
Reads plain indices (see `reduction.tokens.Reduction`), no model and no torch:

    picture = overlay(image, reduction.kept[0], reduction.anchors[0], reduction.owner[0], grid=24)
    contact_sheet([("ConsensusDrop, 64 of 576", picture)], columns=1).save("kept.png")
"""

import colorsys
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE = (768, 1152)  # the padded square in the picture is at least and at most so many pixels wide
MERGED_LIGHT, TINT, DROPPED_LIGHT = 0.45, 0.7, 0.13
PANEL, MARGIN, TEXT = 480, 18, 19  # a contact sheet in pixels
PAPER, INK = (255, 255, 255), (30, 30, 30)
GOLDEN = 0.61803398875  # turns of hue from one anchor to the next: neighbours never look alike

Indices = Sequence[int] | np.ndarray
Colour = tuple[int, int, int]


def overlay(
    image: Image.Image, kept: Indices, anchors: Indices, owner: Indices, grid: int | tuple[int, int]
) -> Image.Image:
    """The picture with every patch shown as kept, merged (tinted by anchor) or dropped; `owner` holds output slots."""
    rows, columns = (grid, grid) if isinstance(grid, int) else grid
    kept, anchors, owner = (np.asarray(part, dtype=np.int64).reshape(-1) for part in (kept, anchors, owner))
    if owner.size != rows * columns:
        raise ValueError(f"owner has {owner.size} patches, but the grid is {rows} x {columns}")
    cell = _cell(image.size, max(rows, columns))
    square, box = _padded(image, (columns * cell, rows * cell))
    is_kept = np.isin(np.arange(owner.size), kept)
    heads = _heads(kept, anchors, owner, is_kept)
    colours = {slot: _colour(number) for number, slot in enumerate(heads)}
    shaded = _shade(np.asarray(square, dtype=np.float32), is_kept, owner, colours, (rows, columns))
    picture = Image.fromarray(shaded.round().astype(np.uint8))
    draw = ImageDraw.Draw(picture)
    _outline(draw, is_kept.reshape(rows, columns), cell)
    for slot, index in heads.items():
        _mark(draw, (index % columns * cell, index // columns * cell), cell, box, colours[slot])
    return picture.crop(box)


def contact_sheet(panels: Sequence[tuple[str, Image.Image]], columns: int, legend: bool = True) -> Image.Image:
    """Panels of equal width in rows, each under its caption, with the key to the overlay's colours at the foot."""
    if not panels or columns < 1:
        raise ValueError(f"a contact sheet needs panels and columns, got {len(panels)} and {columns}")
    columns = min(columns, len(panels))
    tiles = [_tile(title, image) for title, image in panels]
    rows = [tiles[first : first + columns] for first in range(0, len(tiles), columns)]
    heights = [max(tile.height for tile in row) for row in rows]
    width = MARGIN + columns * (PANEL + MARGIN)
    key = _legend(width - 2 * MARGIN) if legend else Image.new("RGB", (1, 0))
    sheet = Image.new("RGB", (width, MARGIN + sum(heights) + MARGIN * len(rows) + key.height), PAPER)
    top = MARGIN
    for row, height in zip(rows, heights, strict=True):
        for column, tile in enumerate(row):
            sheet.paste(tile, (MARGIN + column * (PANEL + MARGIN), top))
        top += height + MARGIN
    if legend:
        sheet.paste(key, (MARGIN, top))
    return sheet


def _cell(size: tuple[int, int], across: int) -> int:
    low, high = SIDE
    return max(1, round(min(max(*size, low), high) / across))


def _padded(image: Image.Image, size: tuple[int, int]) -> tuple[Image.Image, tuple[int, int, int, int]]:
    """The picture centred in its square as LLaVA pads it, at `size`, and the box it fills there."""
    width, height = image.size
    side = max(width, height)
    left, top = (side - width) // 2, (side - height) // 2
    across, down = size[0] / side, size[1] / side
    box = (round(left * across), round(top * down), round((left + width) * across), round((top + height) * down))
    box = (box[0], box[1], max(box[2], box[0] + 1), max(box[3], box[1] + 1))
    square = Image.new("RGB", size)
    square.paste(image.convert("RGB").resize((box[2] - box[0], box[3] - box[1]), Image.Resampling.LANCZOS), box[:2])
    return square, box


def _heads(kept: np.ndarray, anchors: np.ndarray, owner: np.ndarray, is_kept: np.ndarray) -> dict[int, int]:
    """Output slots that stand for others, and the patch that leads each: an anchor, or a kept patch merged into."""
    leaders = {int(owner[index]): int(index) for index in [*kept, *anchors]}
    shared = {int(slot) for slot in owner[~is_kept] if slot >= 0}
    return {slot: leaders[slot] for slot in sorted(shared) if slot in leaders}


def _colour(number: int) -> Colour:
    light, saturation = ((1.0, 0.85), (0.92, 0.9), (1.0, 0.6))[number % 3]
    red, green, blue = colorsys.hsv_to_rgb((0.02 + number * GOLDEN) % 1, saturation, light)
    return round(255 * red), round(255 * green), round(255 * blue)


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
    _dot(draw, (left, top), cell, colour, ring=outside)


def _dot(draw: ImageDraw.ImageDraw, corner: tuple[int, int], cell: int, colour: Colour, ring: bool = False) -> None:
    edge, width = max(1, cell // 12), max(1, cell // 10)
    left, top, across = corner[0] + edge, corner[1] + edge, max(0, cell - 2 * edge - 1)
    if ring:
        draw.ellipse([left, top, left + across, top + across], INK, colour, 2 * width)
    else:
        draw.ellipse([left, top, left + across, top + across], colour, PAPER, width)


def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)


def _tile(title: str, image: Image.Image) -> Image.Image:
    """One panel: caption, wrapped to its width, above the picture."""
    height = max(1, round(image.height * PANEL / image.width))
    picture = image.convert("RGB").resize((PANEL, height), Image.Resampling.LANCZOS)
    lines = [line for part in title.split("\n") for line in _wrapped(part, PANEL)]
    head = len(lines) * (TEXT + 5) + 6
    tile = Image.new("RGB", (PANEL, head + height), PAPER)
    draw = ImageDraw.Draw(tile)
    for number, line in enumerate(lines):
        draw.text((0, number * (TEXT + 5)), line, INK, _font(TEXT))
    tile.paste(picture, (0, head))
    return tile


def _wrapped(text: str, width: int) -> list[str]:
    """Lines no wider than `width` pixels, unless one word is."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and _font(TEXT).getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _legend(width: int) -> Image.Image:
    """Swatches and what they mean, wrapped to `width`."""
    entries = ("kept as it is", "merged into the anchor of its colour", "anchor", "anchor in the padding", "dropped")
    box, gap = TEXT + 8, 26
    places, left, top = [], 0, 0
    for text in entries:
        entry_width = box + 8 + round(_font(TEXT).getlength(text))
        if left and left + entry_width > width:
            left, top = 0, top + box + 8
        places.append((left, top))
        left += entry_width + gap
    key = Image.new("RGB", (width, top + box + MARGIN), PAPER)
    draw = ImageDraw.Draw(key)
    for number, ((left, top), text) in enumerate(zip(places, entries, strict=True)):
        _swatch(draw, number, (left, top), box)
        draw.text((left + box + 8, top + 3), text, INK, _font(TEXT))
    return key


def _swatch(draw: ImageDraw.ImageDraw, number: int, corner: tuple[int, int], box: int) -> None:
    left, top = corner
    area = [left, top, left + box - 1, top + box - 1]
    half = [left + box // 2, top, left + box - 1, top + box - 1]
    if number == 0:
        draw.rectangle(area, (250, 214, 120), INK, 2)
        draw.rectangle([left + 3, top + 3, left + box - 4, top + box - 4], None, PAPER, 2)
    elif number == 1:
        draw.rectangle(area, _dim(_colour(0)))
        draw.rectangle(half, _dim(_colour(1)))
    elif number < 4:
        draw.rectangle(area, _dim(_colour(0)))
        _dot(draw, corner, box, _colour(0), ring=number == 3)
    else:
        draw.rectangle(area, (16, 16, 16))


def _dim(colour: Colour) -> Colour:
    red, green, blue = (round(part * MERGED_LIGHT) for part in colour)
    return red, green, blue
