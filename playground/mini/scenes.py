"""Seeded scenes: sample what is in an image, and draw it.

A scene is measured in units of a 192 x 192 canvas, the square that LLaVA's `pad` mode makes of a picture; its longer
side is 192 units. Files are drawn at two pixels a unit and the processor brings them back to 192.
Splits never share a seed: `scene("train", i)`, `scene("val", i)` and `scene("test", i)` seed from disjoint ranges.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np
from PIL import Image, ImageDraw

from playground.mini import glyphs
from playground.mini.catalogue import CATEGORY, NAMES, OBJECTS, POPULARITY, SIGN_ALPHABET, THEMES

UNITS = 192
SPLITS = {"train": 0, "val": 10**9, "test": 2 * 10**9}
BIG = 40  # an object of this many units or more is "large"


@dataclasses.dataclass(frozen=True)
class Item:
    """One object: a square box with its corner at (x, y), in units of the picture (not of the padded square)."""

    name: str
    colour: str
    x: int
    y: int
    size: int

    @property
    def centre(self) -> tuple[float, float]:
        return self.x + self.size / 2, self.y + self.size / 2

    @property
    def large(self) -> bool:
        return self.size >= BIG

    @property
    def category(self) -> str:
        return CATEGORY[self.name]


@dataclasses.dataclass(frozen=True)
class Sign:
    """A small white sign with two or three characters."""

    text: str
    x: int
    y: int
    char_width: int
    height: int

    @property
    def width(self) -> int:
        return self.char_width * len(self.text) + 6

    def char_box(self, index: int) -> tuple[int, int, int, int]:
        """Left, top, right, bottom of one character, in units."""
        left = self.x + 3 + index * self.char_width
        return left, self.y + 2, left + self.char_width, self.y + self.height - 2


@dataclasses.dataclass(frozen=True)
class Scene:
    """Everything that a picture shows and everything needed to draw it again."""

    seed: int
    theme: str
    width: int
    height: int
    items: tuple[Item, ...]
    sign: Sign | None


def _draw_sizes(rng: random.Random, count: int) -> list[int]:
    return [rng.choice((42, 44, 48, 52)) if rng.random() < 0.15 else rng.randrange(18, 33, 2) for _ in range(count)]


def _draw_names(rng: random.Random, theme: str, count: int) -> list[str]:
    names: list[str] = []
    while len(names) < count:
        pool = THEMES[theme] if rng.random() < 0.65 else NAMES
        name = rng.choices(pool, weights=[POPULARITY[n] for n in pool])[0]
        if name in names and rng.random() < 0.7:
            continue
        names.append(name)
    if rng.random() < 0.5:  # a group of the same thing, something to count
        copies = rng.choice((1, 1, 2, 2, 3))
        names[1 : 1 + copies] = [names[0]] * min(copies, count - 1)
    return names[:count]


Box = tuple[int, int, int, int]


def _place(
    rng: random.Random, boxes: list[Box], size: tuple[int, int], room: tuple[int, int]
) -> tuple[int, int] | None:
    """A free place for a box, as (x, y), or None: boxes may touch, centres never come close."""
    for _ in range(40):
        x, y = rng.randint(1, room[0] - size[0] - 1), rng.randint(1, room[1] - size[1] - 1)
        if all(x + size[0] <= a + 1 or x >= c - 1 or y + size[1] <= b + 1 or y >= d - 1 for a, b, c, d in boxes):
            boxes.append((x, y, x + size[0], y + size[1]))
            return x, y
    return None


def _colour(rng: random.Random, name: str) -> str:
    return rng.choice(list(OBJECTS[name][2]))


def sample(
    seed: int, least: int = 4, most: int = 8, sign_rate: float = 0.6, lengths: tuple[int, ...] = (2, 2, 3)
) -> Scene:
    """Draw a scene from a seed; `least` and `most` bound the number of objects, `lengths` the characters of a sign."""
    rng = random.Random(seed)
    theme = rng.choice(list(THEMES))
    short = UNITS if rng.random() < 0.3 else rng.randrange(136, UNITS, 4)
    width, height = (UNITS, short) if rng.random() < 0.7 else (short, UNITS)
    boxes: list[Box] = []
    sign = None
    if rng.random() < sign_rate:
        text = "".join(rng.sample(SIGN_ALPHABET, rng.choice(lengths)))
        char_width, tall = rng.choice(((13, 23), (14, 24), (15, 26)))
        place = _place(rng, boxes, (char_width * len(text) + 6, tall), (width, height))
        sign = Sign(text, place[0], place[1], char_width, tall) if place else None
    names = _draw_names(rng, theme, rng.randint(least, most))
    sizes = _draw_sizes(rng, len(names))
    items = []
    for name, size in sorted(zip(names, sizes, strict=True), key=lambda pair: -pair[1]):
        place = _place(rng, boxes, (size, size), (width, height))
        if place:
            items.append(Item(name, _colour(rng, name), place[0], place[1], size))
    return Scene(seed, theme, width, height, tuple(items), sign)


def scene(split: str, index: int) -> Scene:
    if not 0 <= index < 10**9:
        raise ValueError(f"scene index {index} is outside its split's range of seeds")
    return sample(SPLITS[split] + index)


def _palette(rng: np.random.Generator) -> np.ndarray:
    """Two or three related soft colours, light or dark, shape [k, 3]."""
    base = rng.uniform(60, 235, size=3)
    base = base.mean() + (base - base.mean()) * rng.uniform(0.2, 0.75)
    return np.clip(base + rng.normal(0, 16, size=(3, 3)) + rng.uniform(-22, 22, size=(3, 1)), 25, 245)


def background(seed: int, width: int, height: int) -> np.ndarray:
    """A textured background, uint8 [height, width, 3]: gradient, stripes, checks, dots or clouds."""
    rng = np.random.default_rng(seed)
    first, second, third = _palette(rng).astype(np.float32)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32) / max(width, height)
    angle, pitch = np.float32(rng.uniform(0, np.pi)), np.float32(rng.uniform(14, 60))
    along, across = np.cos(angle) * x + np.sin(angle) * y, np.cos(angle) * y - np.sin(angle) * x
    kind = rng.choice(["gradient", "stripes", "checks", "dots", "clouds"])
    if kind == "stripes":
        mix = np.clip(np.sin(along * pitch * 2) * 3 + 0.5, 0, 1)
    elif kind == "checks":
        mix = ((np.floor(along * pitch / 3) + np.floor(across * pitch / 3)) % 2).astype(np.float32)
    elif kind == "dots":
        mix = np.clip(3 * (np.sin(along * pitch * 1.6) * np.sin(across * pitch * 1.6)) - 1, 0, 1)
    else:
        mix = np.zeros_like(x)
    small = rng.random((6, 6), dtype=np.float32)
    rough = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))
    soft = np.clip(along, 0, 1) if kind == "gradient" else np.clip(rough * (1.4 if kind == "clouds" else 0.6), 0, 1)
    picture = first + (second - first) * mix[..., None] + (third - first) * soft[..., None]
    strength = np.float32(rng.uniform(0.5, 5))
    grain = (
        (strength * rng.standard_normal((height // 2 + 1, width // 2 + 1), dtype=np.float32)).repeat(2, 0).repeat(2, 1)
    )
    return np.clip(picture + grain[:height, :width, None], 0, 255).astype(np.uint8)


def render(scene_: Scene, scale: int = 2) -> Image.Image:
    """Draw the picture of a scene at `scale` pixels a unit (not padded)."""
    return draw(Image.fromarray(background(scene_.seed, scene_.width * scale, scene_.height * scale)), scene_, scale)


def draw(image: Image.Image, scene_: Scene, scale: int) -> Image.Image:
    """Paste the objects and the sign of a scene onto a background."""
    for item in scene_.items:
        glyph = glyphs.emoji(item.name, item.colour, item.size * scale)
        image.paste(glyph, (item.x * scale, item.y * scale), glyph)
    sign = scene_.sign
    if sign is not None:
        box = [v * scale for v in (sign.x, sign.y, sign.x + sign.width, sign.y + sign.height)]
        board = ImageDraw.Draw(image)
        board.rounded_rectangle(
            (box[0], box[1], box[2] - 1, box[3] - 1), 3 * scale, (252, 252, 250), (90, 90, 96), scale
        )
        for index, letter in enumerate(sign.text):
            left, top, right, bottom = (v * scale for v in sign.char_box(index))
            glyph = glyphs.char(letter, right - left, bottom - top)
            image.paste(glyph, (left, top), glyph)
    return image
