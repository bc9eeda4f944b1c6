"""Visual tokens that are ranked together (`Unit`), and how the budget of an image is shared over its tiles: bookkeeping
in numpy, on the CPU.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from llava_consensus.hosts.images import STRUCTURAL, Image, Integers
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.method import Method, Tiled
from llava_consensus.reduction.tokens import Reduction


class Unit(NamedTuple):
    """Visual tokens that are ranked together: one image, or one tile of it."""

    image: int  # index into the images of the call
    places: Integers  # [N] columns of the prompt
    tile: Integers  # [N] of the image
    token: Integers  # [N] of the tile
    tiles: int
    part: int  # which part of its image this is: 0, 1, ...
    budget: Budget


class UnitBatch(NamedTuple):
    """B units of N tokens that go through a method together, with their indices on the device."""

    units: list[Unit]
    columns: Tensor  # [B, N] place in the prompt
    flat: Tensor  # [B, N] the same, counted over all prompts of the batch
    tile: Tensor  # [B, N] among the tiles of the images of this batch
    patch: Tensor  # [B, N] token of the tile
    image: Tensor  # [B]
    row: Tensor  # [B] batch index
    images: list[int]  # that these units are of


class Reduced(NamedTuple):
    """Units that went through a method together."""

    units: UnitBatch
    reduction: Reduction


def shares_of(
    sizes: Sequence[int], budget: Budget | Share, method: Method, most_tiles: int = 1, video: bool = False
) -> list[Budget]:
    """Budgets of one image: one for all of its tiles, or one for each. They add up to the budget that was asked for,
    but for `tile_budget=most_tiles`. A budget of all its tokens leaves an image as it is.

    Args:
        sizes: tokens of each tile.
        most_tiles: the most tiles an image of this model can have.
        video: whether the tiles are frames.
    Raises:
        OptionError: for fewer tokens than tiles, with a method that cannot rank all tiles together.
    """
    tiles, available = len(sizes), sum(sizes)
    whole = budget.of(available)
    if not method.reduces or whole.tokens >= available:
        return [Budget(max(available, 1))]
    if tiles == 1 or method.tile_budget == "global":
        return [whole]
    if method.tile_budget == "most_tiles" and not video and isinstance(budget, Budget):
        return whole.share(max(tiles, most_tiles))[:tiles]
    if whole.tokens < tiles and isinstance(method, Tiled):
        return [whole]  # some tiles would keep nothing, so all are ranked together
    return whole.over(sizes)


def units_of(
    images: Sequence[Image], budgets: Sequence[Budget | Share], method: Method, most_tiles: int = 1
) -> list[Unit]:
    found = []
    for number, (image, budget) in enumerate(zip(images, budgets, strict=True)):
        real = image.token != STRUCTURAL
        places, tile, token = image.places[real], image.tile[real], image.token[real]
        tiles, counts = np.unique(tile, return_counts=True)
        shares = shares_of(counts.tolist(), budget, method, most_tiles, image.video)
        if len(shares) == 1:
            units = [Unit(number, places, tile, token, len(tiles), 0, shares[0])]
        else:
            units = [
                Unit(number, places[tile == own], own_tile, token[tile == own], 1, int(own - tiles[0]), share)
                for own, share in zip(tiles, shares, strict=True)
                for own_tile in [tile[tile == own]]
            ]
        found += [unit for unit in units if unit.budget.tokens < len(unit.places)]
    return found


def whole_images(images: Sequence[Image]) -> list[list[int]]:
    """The indices of the parts of each image that the user passed."""
    starts = [index for index, image in enumerate(images) if image.part[0] == 0]
    return [list(range(start, start + images[start].part[1])) for start in starts]


def over_parts(budget: Budget | Share, sizes: Sequence[int]) -> list[Any]:
    """The budget of an image shared over the parts it is read in."""
    if len(sizes) == 1:
        return [budget]
    whole = budget.of(sum(sizes))
    return [Budget(size) for size in sizes] if whole.tokens >= sum(sizes) else whole.over(sizes)


def visual_rows(images: Sequence[Image], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """True for the rows of images, newlines among them: [R, S]."""
    rows = np.zeros(shape, dtype=bool)
    for image in images:
        rows[image.row, image.places] = True
    return rows


def prompt_hash(ids: Integers, real: NDArray[np.bool_], images: Sequence[Image]) -> Integers:
    """A number for each prompt [R, S], the same wherever padding is, in which every image counts as one row: [R]."""
    which = np.full(ids.shape, -1)
    for number, image in enumerate(images):
        which[image.row, image.places] = number
    first = which != np.pad(which, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    mask = (real & ((which < 0) | first)).astype(np.int64)
    with np.errstate(over="ignore"):
        return (np.where(which < 0, ids, -200) * mask * (mask.cumsum(1) * np.int64(0x2545F4914F6CDD1D))).sum(1)
