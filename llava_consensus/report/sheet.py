"""Pictures side by side with captions, and the key to an overlay's colours (`overlay.py`)."""

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from llava_consensus.report.overlay import INK, MERGED_LIGHT, PAPER, Colour, colour, dot

PANEL, MARGIN, TEXT = 480, 18, 19  # a contact sheet in pixels


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
        draw.rectangle(area, _dim(colour(0)))
        draw.rectangle(half, _dim(colour(1)))
    elif number < 4:
        draw.rectangle(area, _dim(colour(0)))
        dot(draw, corner, box, colour(0), ring=number == 3)
    else:
        draw.rectangle(area, (16, 16, 16))


def _dim(colour: Colour) -> Colour:
    red, green, blue = (round(part * MERGED_LIGHT) for part in colour)
    return red, green, blue
