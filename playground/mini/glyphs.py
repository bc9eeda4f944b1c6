"""The committed glyph sheet: read it (always), or draw it again from the Noto Color Emoji font (rarely).

    python -m playground.mini.glyphs      # needs /usr/share/fonts/truetype/noto/NotoColorEmoji.ttf

Emoji are from Noto Color Emoji (SIL Open Font License 1.1, see glyphs-LICENSE.txt); the sign characters are drawn
with the font that Pillow carries (Aileron, CC0). Nothing but the sheet is needed to render a scene.
"""

from __future__ import annotations

import functools
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from playground.mini.catalogue import OBJECTS, SIGN_ALPHABET, variant_keys

SHEET = Path(__file__).with_name("glyphs.webp")
FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
CELL = 96
COLUMNS = 12
CHAR_W, CHAR_H = 32, 48


def _cell(index: int) -> tuple[int, int]:
    return (index % COLUMNS) * CELL, (index // COLUMNS) * CELL


def draw_sheet() -> Image.Image:
    """Draw the whole sheet from the font: one 96 px cell for each emoji, then one for each sign character."""
    font = ImageFont.truetype(str(FONT), 109)
    keys = variant_keys()
    total = len(keys) + len(SIGN_ALPHABET)
    sheet = Image.new("RGBA", (COLUMNS * CELL, -(-total // COLUMNS) * CELL))
    for index, (name, colour) in enumerate(keys):
        canvas = Image.new("RGBA", (160, 160))
        ImageDraw.Draw(canvas).text((8, 8), OBJECTS[name][2][colour], font=font, embedded_color=True)
        canvas = canvas.crop(canvas.getbbox())
        scale = (CELL - 2) / max(canvas.size)
        canvas = canvas.resize((round(canvas.width * scale), round(canvas.height * scale)), Image.Resampling.LANCZOS)
        x, y = _cell(index)
        sheet.paste(canvas, (x + (CELL - canvas.width) // 2, y + (CELL - canvas.height) // 2))
    text_font = ImageFont.load_default(size=50)
    for index, char in enumerate(SIGN_ALPHABET, start=len(keys)):
        canvas = Image.new("L", (CELL, CELL))
        ImageDraw.Draw(canvas).text((20, 12), char, font=text_font, fill=255, stroke_width=1)
        canvas = canvas.crop(canvas.getbbox()).resize((CHAR_W - 4, CHAR_H - 6), Image.Resampling.LANCZOS)
        ink = Image.new("RGBA", canvas.size, (20, 20, 30, 255))
        ink.putalpha(canvas)
        x, y = _cell(index)
        sheet.paste(ink, (x + 2, y + 3))
    return sheet


@functools.cache
def _sheet() -> Image.Image:
    with Image.open(SHEET) as image:
        return image.convert("RGBA")


@functools.cache
def emoji(name: str, colour: str, size: int) -> Image.Image:
    """The glyph of an object, `size` x `size` pixels, with alpha."""
    x, y = _cell(variant_keys().index((name, colour)))
    return _sheet().crop((x, y, x + CELL, y + CELL)).resize((size, size), Image.Resampling.LANCZOS)


@functools.cache
def char(letter: str, width: int, height: int) -> Image.Image:
    x, y = _cell(len(variant_keys()) + SIGN_ALPHABET.index(letter))
    return _sheet().crop((x, y, x + CHAR_W, y + CHAR_H)).resize((width, height), Image.Resampling.LANCZOS)


if __name__ == "__main__":
    draw_sheet().save(SHEET, lossless=True, exact=True, quality=100, method=6)
