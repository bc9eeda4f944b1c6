"""Pictures side by side with captions, under a heading, and the key to the colours of `overlay.py`."""

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from llava_consensus.evaluation.report.overlay import CALM, INK, PAPER, dot, tint

PANEL, MARGIN, TEXT = 480, 18, 19  # a contact sheet in pixels
HEAD = 23  # of the first line of a heading
LINE = 5  # pixels between lines
SKY, GRASS, SUN = (90, 170, 230), (70, 140, 70), (255, 212, 59)  # a patch that is no tint, in the key
KEY = ("kept as it is", "merged: one tint, one token", "anchor of a merged token", "anchor in the padding", "dropped")


def contact_sheet(
    panels: Sequence[tuple[str, Image.Image]],
    columns: int,
    legend: bool = True,
    head: Sequence[str] = (),
    width: int = PANEL,
) -> Image.Image:
    """Panels in rows, each under its caption, with the key to the overlay's colours at the foot.

    Args:
        panels: caption and picture.
        columns: panels in a row.
        legend: whether the key is there.
        head: lines above all panels, the first one larger.
        width: of a panel in pixels.
    """
    if not panels or columns < 1:
        raise ValueError(f"a contact sheet needs panels and columns, got {len(panels)} and {columns}")
    columns = min(columns, len(panels))
    captions = [_caption(title, width) for title, _ in panels]
    rows = []
    for first in range(0, len(panels), columns):
        here = slice(first, first + columns)
        most = max(len(lines) for lines in captions[here])
        pairs = zip(captions[here], panels[here], strict=True)
        rows.append([_tile([*lines, *[""] * (most - len(lines))], image, width) for lines, (_, image) in pairs])
    heights = [max(tile.height for tile in row) for row in rows]
    across = MARGIN + columns * (width + MARGIN)
    inner = across - 2 * MARGIN
    top, foot = _heading(head, inner), _legend(inner) if legend else Image.new("RGB", (1, 0))
    sheet = Image.new("RGB", (across, MARGIN + top.height + sum(heights) + MARGIN * len(rows) + foot.height), PAPER)
    sheet.paste(top, (MARGIN, MARGIN))
    down = MARGIN + top.height
    for row, height in zip(rows, heights, strict=True):
        for column, tile in enumerate(row):
            sheet.paste(tile, (MARGIN + column * (width + MARGIN), down))
        down += height + MARGIN
    if legend:
        sheet.paste(foot, (MARGIN, down))
    return sheet


def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)


def _heading(lines: Sequence[str], width: int) -> Image.Image:
    """Lines of text wrapped to a width; without lines an empty picture."""
    sized = [
        (part, HEAD if number == 0 else TEXT)
        for number, line in enumerate(lines)
        for part in _wrapped(line, width, HEAD if number == 0 else TEXT)
    ]
    picture = Image.new("RGB", (width, sum(size + LINE for _, size in sized) + (MARGIN if sized else 0)), PAPER)
    draw, top = ImageDraw.Draw(picture), 0
    for part, size in sized:
        draw.text((0, top), part, INK, _font(size))
        top += size + LINE
    return picture


def _caption(title: str, width: int) -> list[str]:
    return [line for part in title.split("\n") for line in _wrapped(part, width, TEXT)] if title else []


def _tile(lines: Sequence[str], image: Image.Image, width: int) -> Image.Image:
    """One panel: the lines of its caption above the picture."""
    height = max(1, round(image.height * width / image.width))
    picture = image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    head = len(lines) * (TEXT + LINE) + 6
    tile = Image.new("RGB", (width, head + height), PAPER)
    draw = ImageDraw.Draw(tile)
    for number, line in enumerate(lines):
        draw.text((0, number * (TEXT + LINE)), line, INK, _font(TEXT))
    tile.paste(picture, (0, head))
    draw.rectangle([0, head, width - 1, head + height - 1], None, (214, 214, 214))
    return tile


def _wrapped(text: str, width: int, size: int) -> list[str]:
    """Lines no wider than `width` pixels, unless one word is."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and _font(size).getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _legend(width: int) -> Image.Image:
    """Swatches and what they mean, wrapped to `width`."""
    box, gap = TEXT + 8, 26
    places, left, top = [], 0, 0
    for text in KEY:
        entry_width = box + 8 + round(_font(TEXT).getlength(text))
        if left and left + entry_width > width:
            left, top = 0, top + box + 8
        places.append((left, top))
        left += entry_width + gap
    key = Image.new("RGB", (width, top + box + MARGIN), PAPER)
    draw = ImageDraw.Draw(key)
    for number, ((left, top), text) in enumerate(zip(places, KEY, strict=True)):
        _swatch(draw, number, (left, top), box)
        draw.text((left + box + 8, top + 3), text, INK, _font(TEXT))
    return key


def _swatch(draw: ImageDraw.ImageDraw, number: int, corner: tuple[int, int], box: int) -> None:
    left, top = corner
    area = [left, top, left + box - 1, top + box - 1]
    half = [left + box // 2, top, left + box - 1, top + box - 1]
    if number == 0:
        draw.rectangle(area, SKY)
        draw.rectangle([left, top + 2 * box // 3, left + box - 1, top + box - 1], GRASS)
        draw.ellipse([left + box // 2, top + box // 6, left + 5 * box // 6, top + box // 2], SUN)
        draw.rectangle(area, None, INK, 2)
    elif number == 1:
        draw.rectangle(area, tint(0))
        draw.rectangle(half, tint(1))
    elif number < 4:
        draw.rectangle(area, tint(0) if number == 2 else CALM)
        dot(draw, corner, box, tint(0), ring=number == 3)
    else:
        draw.rectangle(area, (246, 246, 246), (214, 214, 214))
