"""Seeded scenes: one to four cut-outs, and now and then a sign, over a photograph.

A scene is measured in units of a 192 x 192 canvas, as the mini playground's are, and is drawn at 336 x 336 pixels, so
that a patch of the tower is 8 units. `train` scenes show training cut-outs over training photographs; `val` and `test`
the same cut-outs over other photographs; `unseen` cut-outs, and names, that no training scene shows; `crowded` 12 to 20
of the training cut-outs at once, each of another name.
"""

from __future__ import annotations

import dataclasses
import functools
import random

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFont

from playground.photo.catalogue import BACKGROUNDS, CATEGORY, CUTOUTS, SIGNS, background, cutout, held_out

UNITS, PIXELS, GRID = 192, 336, 24
SCALE = PIXELS / UNITS
HALF = UNITS // 2
CROWD = (5, 4)  # columns and rows of a crowded scene
CLOSE = 54  # units of the room of a thing there, which is wider than a column
SPLITS = {"train": 0, "val": 10**9, "test": 2 * 10**9, "unseen": 3 * 10**9, "crowded": 4 * 10**9}
SIGNED = {"train": 0.6}  # how often there is room made for a sign, else 0.3: reading needs more examples than naming
QUADRANTS = {(0, 0): "top left", (1, 0): "top right", (0, 1): "bottom left", (1, 1): "bottom right"}


@dataclasses.dataclass(frozen=True)
class Thing:
    """A cut-out in its box, in units; of a category that may be empty."""

    name: str
    stem: str
    x: int
    y: int
    width: int
    height: int
    flipped: bool
    light: float
    colour: str = ""

    @property
    def centre(self) -> tuple[float, float]:
        """The centre of the box."""
        return self.x + self.width / 2, self.y + self.height / 2

    @property
    def category(self) -> str:
        """The category of the thing."""
        return CATEGORY[self.name]

    @property
    def size(self) -> int:
        """The longer side."""
        return max(self.width, self.height)


@dataclasses.dataclass(frozen=True)
class Board:
    """A sign with a word, in units."""

    text: str
    x: int
    y: int
    width: int
    height: int
    dark: bool


@dataclasses.dataclass(frozen=True)
class PhotoScene:
    """Everything that a picture shows and everything needed to draw it again."""

    seed: int
    place: str
    crop: tuple[float, float, float]
    veil: float
    items: tuple[Thing, ...]
    sign: Board | None
    width: int = UNITS
    height: int = UNITS


@functools.cache
def shown_in(split: str) -> dict[str, list[str]]:
    """The cut-outs of each name that a split shows."""
    held = held_out()
    known = {name: [s for s in stems if (s in held) == (split == "unseen")] for name, stems in CUTOUTS.items()}
    return {name: stems for name, stems in known.items() if stems}


@functools.cache
def places_of(split: str) -> list[str]:
    """The photographs behind the scenes of a split."""
    return [p for k, p in enumerate(BACKGROUNDS) if (k % 6 == 0) == (split != "train")]


def _thing(
    rng: random.Random, name: str, stem: str, cell: tuple[int, int] | None, grid: tuple[int, int] = (2, 2)
) -> Thing:
    image, room, left, top = cutout(stem), UNITS, 0, 0
    if cell is not None:
        room = HALF if grid == (2, 2) else CLOSE
        left, top = (
            min(max(0, (2 * place + 1) * UNITS // (2 * cells) - room // 2), UNITS - room)
            for place, cells in zip(cell, grid, strict=True)
        )
    longest = rng.randint(90, 176) if cell is None else rng.randint(room * 62 // 96, room * 94 // 96)
    scale = longest / max(image.size)
    width, height = max(10, round(image.width * scale)), max(10, round(image.height * scale))
    x, y = left + rng.randint(0, room - width), top + rng.randint(0, room - height)
    return Thing(name, stem, x, y, width, height, rng.random() < 0.5, rng.uniform(0.75, 1.25))


def _names(rng: random.Random, count: int, pool: list[str]) -> list[str]:
    """Names of the things of a scene, sometimes several of the same."""
    names = rng.sample(pool, count)
    if count > 1 and rng.random() < 0.3:
        copies = rng.randint(1, count - 1)
        names[1 : 1 + copies] = [names[0]] * copies
    return names


def sample(seed: int, split: str, counts: tuple[int, ...] = (1, 1, 2, 2, 3, 3, 4), signs: float = 0.3) -> PhotoScene:
    """Draw a scene from a seed; `counts` weighs how many things, `signs` is how often there is a sign."""
    rng = random.Random(seed)
    known, cells = shown_in(split), rng.sample(list(QUADRANTS), 4)
    count, sign = rng.choice(counts), None
    if count < 4 and rng.random() < signs:
        left, top = (HALF * part for part in cells.pop())
        width, height = rng.randint(76, 94), rng.randint(28, 38)
        x, y = left + rng.randint(0, HALF - width), top + rng.randint(0, HALF - height)
        sign = Board(rng.choice(SIGNS), x, y, width, height, rng.random() < 0.5)
    alone = count == 1 and sign is None
    items = tuple(
        _thing(rng, name, rng.choice(known[name]), None if alone and rng.random() < 0.7 else cell)
        for name, cell in zip(_names(rng, count, list(known)), cells[:count], strict=True)
    )
    crop = rng.random(), rng.random(), rng.uniform(0.6, 1.0)
    return PhotoScene(seed, rng.choice(places_of(split)), crop, rng.uniform(0.0, 0.35), items, sign)


def crowd(seed: int, split: str) -> PhotoScene:
    """Draw a scene of 12 to 20 things from a seed: each of another name, close to the centre of another cell."""
    rng, known = random.Random(seed), shown_in(split)
    cells = rng.sample([(x, y) for x in range(CROWD[0]) for y in range(CROWD[1])], rng.randint(12, 20))
    names = rng.sample(list(known), len(cells))
    items = tuple(_thing(rng, n, rng.choice(known[n]), c, CROWD) for n, c in zip(names, cells, strict=True))
    crop = rng.random(), rng.random(), rng.uniform(0.6, 1.0)
    return PhotoScene(seed, rng.choice(places_of(split)), crop, rng.uniform(0.0, 0.35), items, None)


def scene(split: str, index: int, signs: float | None = None) -> PhotoScene:
    """Scene number `index` of a split; `signs` as in `sample`, by default the split's."""
    if split == "crowded":
        return crowd(SPLITS[split] + index, split)
    return sample(SPLITS[split] + index, split, signs=SIGNED.get(split, 0.3) if signs is None else signs)


def _pixels(value: float) -> int:
    return round(value * SCALE)


def _pasted(item: Thing) -> Image.Image:
    image = cutout(item.stem).resize((_pixels(item.width), _pixels(item.height)), Image.Resampling.BICUBIC)
    if item.flipped:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    alpha = image.getchannel("A")
    image = ImageEnhance.Brightness(image.convert("RGB")).enhance(item.light).convert("RGBA")
    image.putalpha(alpha)
    return image


def _board(sign: Board) -> Image.Image:
    """A sign as it is pasted: a white or a blue board."""
    ground, ink = ((24, 60, 130), (250, 250, 250)) if sign.dark else ((250, 250, 246), (20, 20, 24))
    size = _pixels(sign.width), _pixels(sign.height)
    board = Image.new("RGB", size, ground)
    pen = ImageDraw.Draw(board)
    pen.rectangle((1, 1, size[0] - 2, size[1] - 2), outline=ink, width=2)
    font = ImageFont.load_default(100)
    left, top, right, bottom = pen.textbbox((0, 0), sign.text, font=font)
    scale = min((size[0] - 14) / (right - left), (size[1] - 14) / (bottom - top))
    pen.text((size[0] / 2, size[1] / 2), sign.text, ink, ImageFont.load_default(int(100 * scale)), "mm")
    return board


def render(shown: PhotoScene) -> tuple[Image.Image, np.ndarray]:
    """The picture, 336 x 336, and what each pixel shows: uint8 [336, 336], 0 the photograph, k thing k - 1, 255
    a sign."""
    photograph = background(shown.place)
    side = int(min(photograph.size) * shown.crop[2])
    left = int((photograph.width - side) * shown.crop[0])
    top = int((photograph.height - side) * shown.crop[1])
    image = photograph.crop((left, top, left + side, top + side)).resize((PIXELS, PIXELS), Image.Resampling.BICUBIC)
    image = Image.blend(image, Image.new("RGB", image.size, (128, 128, 128)), shown.veil)
    labels = np.zeros((PIXELS, PIXELS), np.uint8)
    for number, item in enumerate(shown.items, start=1):
        pasted, x, y = _pasted(item), _pixels(item.x), _pixels(item.y)
        image.paste(pasted, (x, y), pasted)
        opaque = np.asarray(pasted.getchannel("A"))[: PIXELS - y, : PIXELS - x] > 127
        labels[y : y + opaque.shape[0], x : x + opaque.shape[1]][opaque] = number
    if shown.sign is not None:
        board, x, y = _board(shown.sign), _pixels(shown.sign.x), _pixels(shown.sign.y)
        image.paste(board, (x, y))
        labels[y : y + board.height, x : x + board.width] = 255
    return image, labels


def patch_labels(labels: np.ndarray, grid: int) -> np.ndarray:
    """What covers more than half of each patch, int64 [grid * grid]: as in `render`, 0 where nothing does."""
    patches = labels.reshape(grid, PIXELS // grid, grid, PIXELS // grid).transpose(0, 2, 1, 3).reshape(grid * grid, -1)
    result = np.zeros(grid * grid, np.int64)
    for value in np.unique(labels):
        if value:
            result[(patches == value).mean(1) > 0.5] = value
    return result
