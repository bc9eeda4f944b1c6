"""Visual tokens that are ranked together (`Unit`), how the budget of an image is shared over its tiles, and what became
of an image (`ImageOutcome`). Bookkeeping in numpy, on the CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llava_consensus.hosts.images import STRUCTURAL, Image, Integers
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.method import Method, Tiled
from llava_consensus.reduction.tokens import Reduction, Stopwatch


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
        if not len(tiles):
            continue
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
    return [Budget(max(size, 1)) for size in sizes] if whole.tokens >= sum(sizes) else whole.over(sizes)


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


# Results


class Reduced(NamedTuple):
    """Units that went through a method together."""

    units: UnitBatch
    reduction: Reduction


class ImageOutcome(NamedTuple):
    """Result for one image of one prompt."""

    row: int  # batch index
    before: int  # visual tokens the language model would have received
    after: int  # visual tokens it received; of methods that cut between its layers, those left after the last cut
    structural: int  # newline tokens, which are never candidates
    reductions: tuple[tuple[int, Reduction], ...]  # (tile, its reduction, one unit) for every unit that was reduced
    entering: tuple[int, ...] = ()  # visual tokens that entered each decoder layer, where that differs by layer
    origin: tuple[Tensor, Tensor] | None = None  # [before] tile, and token of that tile, of each visual token
    part: int = 0  # which part of its image this is, see `images.parts_of`

    def __repr__(self) -> str:
        structural = f" and {self.structural} structural ones" if self.structural else ""
        parts = f", reduced in {len(self.reductions)} parts" if len(self.reductions) > 1 else ""
        return f"<image of row {self.row}: {self.before} -> {self.after} tokens{structural}{parts}>"


class CachedLayer(NamedTuple):
    bytes: int  # of keys and values
    rows: int  # R
    length: int  # positions of each row, padding among them


@dataclass(frozen=True)
class Report:
    """Result of one call: per-image outcomes, notes, timings, cache sizes."""

    outcomes: list[ImageOutcome] = field(default_factory=list)
    notes: tuple[str, ...] = ()  # remarks that go into the record
    watch: Stopwatch | None = None  # times of the last reduction
    cache: tuple[CachedLayer, ...] = ()  # sizes of the cache that the prefill left


def unchanged(images: Sequence[Image], beams: int = 1) -> list[ImageOutcome]:
    found = []
    for image in images:
        real = image.token != STRUCTURAL
        origin = torch.from_numpy(image.tile[real]), torch.from_numpy(image.token[real])
        count = int(real.sum())
        found.append(ImageOutcome(image.row // beams, count, count, len(real) - count, (), (), origin, image.part[0]))
    return found


def reduced(outcomes: list[ImageOutcome], groups: Sequence[Reduced], drops: Sequence[bool]) -> list[ImageOutcome]:
    """The outcomes with the reductions of units.

    Args:
        drops: of each image, whether its structural rows leave if it is reduced.
    """
    found = list(outcomes)
    for units, reduction in groups:
        for number, unit in enumerate(units.units):
            own = reduction
            if len(reduction.tokens) > 1:
                own = Reduction._make(v[number : number + 1] if isinstance(v, Tensor) else v for v in reduction)
            outcome = found[unit.image]
            found[unit.image] = outcome._replace(
                after=outcome.after + reduction.tokens.shape[1] - len(unit.places),
                reductions=tuple(sorted((*outcome.reductions, (unit.part, own)), key=lambda part: part[0])),
                structural=0 if drops[unit.image] else outcome.structural,
            )
    return found


def joined_parts(outcomes: Sequence[ImageOutcome]) -> list[ImageOutcome]:
    found: list[ImageOutcome] = []
    for outcome in outcomes:
        if not outcome.part:
            found.append(outcome)
            continue
        first, origin = found[-1], None
        if first.origin is not None and outcome.origin is not None:
            tile = torch.cat((first.origin[0], outcome.origin[0] + outcome.part))
            origin = tile, torch.cat((first.origin[1], outcome.origin[1]))
        found[-1] = first._replace(
            before=first.before + outcome.before,
            after=first.after + outcome.after,
            structural=first.structural + outcome.structural,
            reductions=(*first.reductions, *((outcome.part, own) for _, own in outcome.reductions)),
            entering=tuple(map(sum, zip(first.entering, outcome.entering, strict=True))),
            origin=origin,
        )
    return found


def cached_layers(cache: Any, axis: int = 2) -> tuple[CachedLayer, ...]:
    """Sizes of the layers of a KV cache of transformers, or of tuples of keys and values, whose rows are along an axis.
    Recurrent layers, which hold no positions, are left out.
    """
    found = []
    for layer in cache if isinstance(cache, tuple) else getattr(cache, "layers", ()):
        pair = layer[:2] if isinstance(layer, tuple) else (getattr(layer, "keys", None), getattr(layer, "values", None))
        keys, values = pair
        if isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.ndim == 4:
            size = keys.numel() * keys.element_size() + values.numel() * values.element_size()
            found.append(CachedLayer(size, keys.shape[0], keys.shape[axis]))
    return tuple(found)
