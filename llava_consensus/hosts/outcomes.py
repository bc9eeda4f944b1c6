"""Result of a forward call, image by image."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llava_consensus.hosts.images import STRUCTURAL, Image
from llava_consensus.hosts.units import Reduced
from llava_consensus.reduction.tokens import Reduction, Stopwatch


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
