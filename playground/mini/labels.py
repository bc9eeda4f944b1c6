"""What every patch of a scene shows: the truth that the tower is taught and the measurements are made against.

Classes of a patch: 0 background, 1..62 objects, then the sign characters; -1 where an edge makes it undecidable.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from playground.mini.catalogue import COLOURS, NAMES, SIGN_ALPHABET
from playground.mini.scenes import GRID, PATCH, Scene, coverage

CLASSES = 1 + len(NAMES) + len(SIGN_ALPHABET)
FIRST_CHAR = 1 + len(NAMES)
COLOUR_NAMES = ["", *COLOURS]
ORDERS = 3  # a sign character has its place in the string where an object has its colour
TINTS = len(COLOUR_NAMES) + ORDERS
SURE, NOTHING = 0.3, 0.04


@dataclasses.dataclass(frozen=True)
class PatchLabels:
    """Per patch [24, 24]: class, colour (or place in the sign), large, centre of its item, anchor, item number."""

    kind: np.ndarray
    colour: np.ndarray
    large: np.ndarray
    dx: np.ndarray
    dy: np.ndarray
    anchor: np.ndarray
    item: np.ndarray

    def packed(self) -> np.ndarray:
        """All of it as int8 [7, 24, 24]."""
        return np.stack([getattr(self, f.name) for f in dataclasses.fields(self)]).astype(np.int8)


def parts(scene: Scene) -> list[tuple[int, int, int, float, float]]:
    """Class, colour, large and centre (in the padded square) of every item and sign character."""
    dx, dy = scene.offset
    rows = [(1 + NAMES.index(i.name), COLOUR_NAMES.index(i.colour), int(i.large), i.centre[0] + dx, i.centre[1] + dy)
            for i in scene.items]  # fmt: skip
    for index, letter in enumerate(scene.sign.text if scene.sign else ""):
        left, top, right, bottom = scene.sign.char_box(index)  # type: ignore[union-attr]
        order = len(COLOUR_NAMES) + index if index < ORDERS else 0
        rows.append(
            (FIRST_CHAR + SIGN_ALPHABET.index(letter), order, 0, (left + right) / 2 + dx, (top + bottom) / 2 + dy)
        )
    return rows


def label(scene: Scene) -> PatchLabels:
    """The labels of a scene's 24 x 24 patches."""
    rows, cover = parts(scene), coverage(scene)
    owner, best = cover.argmax(0), cover.max(0)
    table = np.array(rows, dtype=np.float32)
    shown = best >= SURE
    kind = np.where(shown, table[owner, 0], np.where(best > NOTHING, -1, 0))
    y, x = np.mgrid[0:GRID, 0:GRID] * PATCH + PATCH / 2
    off_x, off_y = table[owner, 3] - x, table[owner, 4] - y
    anchor = np.zeros((GRID, GRID), bool)
    for number in range(len(rows)):
        mine = np.where(shown & (owner == number), np.hypot(off_x, off_y), np.inf)
        if np.isfinite(mine).any():
            anchor.flat[mine.argmin()] = True
    none = np.zeros((GRID, GRID))
    return PatchLabels(kind, np.where(shown, table[owner, 1], none), np.where(shown, table[owner, 2], none),
                       np.where(shown, off_x, none), np.where(shown, off_y, none), anchor,
                       np.where(shown, owner, -1))  # fmt: skip
