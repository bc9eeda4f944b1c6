"""Where the visual tokens stand in assembled sequences, and which of them are reduced together. Pure bookkeeping on
the CPU; no model.

A host says by provenance what every assembled row is: 0 for text or padding, n > 0 for patch n - 1 counted over all
tiles, -1 for a newline.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from llava_consensus.reduction.budget import Budget


@dataclass(frozen=True, eq=False)
class Unit:
    """Visual tokens that are ranked together: one picture, or one tile of it."""

    picture: int  # index into `Layout.pictures`
    places: Tensor  # [N] in the sequence
    tile: Tensor  # [N] over all tiles of the batch
    patch: Tensor  # [N]
    tiles: int
    part: int  # which part of its picture this is: 0, 1, ...
    budget: Budget


@dataclass(frozen=True, eq=False)
class Picture:
    """One picture in one prompt."""

    row: int  # of the batch
    before: int  # patches
    structural: int  # newlines
    end: int  # place of its last row in the sequence
    text: Tensor  # [L] places of the text rows after it


@dataclass(frozen=True, eq=False)
class Layout:
    """A batch of assembled sequences."""

    rows: Tensor  # [R, S] provenance
    real: Tensor  # [R, S] true where the row is not padding
    pictures: list[Picture]
    units: list[Unit]

    def reduced(self) -> list[Unit]:
        """Units with more tokens than their budget; the others pass through untouched."""
        return [unit for unit in self.units if unit.budget.tokens < len(unit.places)]

    @cached_property
    def probes(self) -> tuple[list[Picture], list[int]]:
        """One picture for each prompt with text of its own after it, and which of them stands for every picture: the
        frames of a video are followed by the same words.
        """
        first: dict[tuple[int, ...], int] = {}
        keys = [(picture.row, *picture.text.tolist()) for picture in self.pictures]
        which = [first.setdefault(key, len(first)) for key in keys]
        return [self.pictures[keys.index(key)] for key in first], which

    def groups(self, adaptive: bool = False) -> list[list[Unit]]:
        """Reduced units that fit in one batch: equal numbers of tokens and tiles, equal budgets; one by one for an
        `adaptive` method, which leaves a number of tokens that nobody knows beforehand.
        """
        if adaptive:
            return [[unit] for unit in self.reduced()]
        found: dict[tuple[int, int, Budget], list[Unit]] = defaultdict(list)
        for unit in self.reduced():
            found[len(unit.places), unit.tiles, unit.budget].append(unit)
        return list(found.values())


def read_layout(rows: Tensor, real: Tensor, tiles_of: list[int], patches: int, shares: list[list[Budget]]) -> Layout:
    """The layout of assembled sequences.

    Args:
        rows: [R, S] provenance, on the CPU.
        real: [R, S] true where the row is not padding.
        tiles_of: tiles of each picture handed to the host, in its order.
        patches: patches of one tile.
        shares: budgets of each picture: one for all its tiles together, or one for each tile.
    """
    owner = torch.repeat_interleave(torch.arange(len(tiles_of)), torch.tensor(tiles_of))  # [T] picture of each tile
    tile = (rows - 1).div(patches, rounding_mode="floor")
    picture_of = torch.where(rows > 0, owner[tile.clamp(0, len(owner) - 1)], -1)
    pictures: list[Picture] = []
    units: list[Unit] = []
    for row in range(len(rows)):
        for index in picture_of[row].unique().tolist():
            if index < 0:
                continue
            places = (picture_of[row] == index).nonzero()[:, 0]
            after = picture_of[row, places[-1] + 1 :] >= 0
            limit = int(places[-1]) + 1 + (int(after.nonzero()[0]) if after.any() else len(after))
            newlines = (rows[row, int(places[0]) : limit] == -1).nonzero()[:, 0] + int(places[0])
            end = max(int(places[-1]), int(newlines[-1]) if len(newlines) else 0)
            text = (real[row] & (rows[row] == 0) & (torch.arange(rows.shape[1]) > end)).nonzero()[:, 0]
            units += _units(len(pictures), places, rows[row], patches, shares[index])
            pictures.append(Picture(row, len(places), len(newlines), end, text))
    return Layout(rows, real, pictures, units)


def _units(picture: int, places: Tensor, row: Tensor, patches: int, shares: list[Budget]) -> list[Unit]:
    """The units of one picture: the whole of it under one budget, or each tile under its own."""
    flat = row[places] - 1
    tile, patch = flat.div(patches, rounding_mode="floor"), flat % patches
    present = tile.unique()
    if len(shares) == 1:
        return [Unit(picture, places, tile, patch, len(present), 0, shares[0])]
    units = []
    for number in present.tolist():
        here = (tile == number).nonzero()[:, 0]
        part = number - int(present[0])
        units.append(Unit(picture, places[here], tile[here], patch[here], 1, part, shares[part]))
    return units
