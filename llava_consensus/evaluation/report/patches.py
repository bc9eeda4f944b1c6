"""Fate of every patch of an image (kept, merged, dropped), in plain numbers for drawings."""

from typing import NamedTuple

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.outcomes import ImageOutcome
from llava_consensus.reduction.tokens import Reduction


class Patches(NamedTuple):
    """The N patches of an image: of its only view, of one tile after the other, or of the base view and then of the
    grid, row by row over all of its tiles.
    """

    kept: list[int]
    anchors: list[int]
    owner: list[int]  # [N] output slot of each patch; -1 if it was dropped, or is no token
    vision: list[float] | None = None  # [N] saliencies, nan if a patch has none; None if the method has none
    cross: list[float] | None = None
    fused: list[float] | None = None


def patches(outcome: ImageOutcome, side: int, columns: int, rows: int | None = None) -> Patches:
    """The patches of an image. `side` and `rows` are those of a tile, `columns` the tiles in a row of the grid: 0 for
    one square, or tiles that stand by themselves, such as frames.
    """
    assert outcome.origin is not None
    if outcome.after < outcome.before and not outcome.reductions:
        raise OptionError("patches: a composition keeps the counts of its images, not which patches stay")
    tile, token = (part.cpu() for part in outcome.origin)
    area = side * (rows or side)
    place = _places(tile, token, side, columns, area)
    lines = -(-int(tile.max()) // columns) if columns else 0
    count = (1 + lines * columns) * area if columns else (1 + int(tile.max())) * area
    owner = torch.full((count,), -1)
    owner[place] = torch.arange(len(place))
    stays = torch.ones(len(place), dtype=torch.bool)
    anchors: list[int] = []
    units: list[tuple[Reduction, Tensor]] = []  # with the places of its tokens in the drawing
    slot = len(place)
    for part, reduction in outcome.reductions:
        whole = reduction.owner.shape[1] == len(place)
        here = (torch.ones_like(stays) if whole else tile == tile[0] + part).nonzero()[:, 0]
        own = reduction.owner[0].cpu()
        owner[place[here]] = torch.where(own >= 0, own + slot, -1)
        units.append((reduction, place[here]))
        slot += reduction.source.shape[1]
        stays[here] = False
        stays[here[reduction.kept[0].cpu()]] = True
        anchors += place[here[reduction.anchors[0].cpu()]].tolist()
    saliencies = (_saliency(units, name, count) for name in ("vision", "cross", "fused"))
    return Patches(place[stays].tolist(), anchors, owner.tolist(), *saliencies)


def _saliency(units: list[tuple[Reduction, Tensor]], name: str, count: int) -> list[float] | None:
    found = torch.full((count,), torch.nan, dtype=torch.float64)
    known = [(place, value) for unit, place in units if (value := getattr(unit, name)) is not None]
    for place, value in known:
        found[place] = value[0].detach().to("cpu", torch.float64)
    return found.tolist() if known else None


def _places(tile: Tensor, token: Tensor, side: int, columns: int, area: int) -> Tensor:
    if not columns:
        return tile * area + token
    row = (tile - 1) // columns * side + token // side
    column = (tile - 1) % columns * side + token % side
    return torch.where(tile == 0, token, area + row * columns * side + column)
