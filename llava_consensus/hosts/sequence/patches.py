"""What became of every patch of a picture, in plain numbers that a drawing takes."""

from typing import NamedTuple

import torch
from torch import Tensor

from llava_consensus.hosts.base import PictureOutcome


class Patches(NamedTuple):
    """The patches of a picture: of its only view, or of the base view and then of the grid, row by row over all of its
    tiles.
    """

    kept: list[int]
    anchors: list[int]
    owner: list[int]  # output slot of each patch; -1 where it was dropped, or is no token


def patches(outcome: PictureOutcome, side: int, columns: int) -> Patches:
    """The patches of a reduced picture, or of one that stays as it is.

    Args:
        outcome: of the picture.
        side: patches in a row of a tile.
        columns: tiles in a row of the grid; 0 for one square.
    """
    assert outcome.origin is not None
    tile, token = outcome.origin
    place = _places(tile, token, side, columns)
    rows = -(-int(tile.max()) // columns) if columns else 0
    owner = torch.full(((1 + rows * columns) * side**2,), -1)
    owner[place] = torch.arange(len(place))
    stays = torch.ones(len(place), dtype=torch.bool)
    anchors: list[int] = []
    slot = len(place)
    for part, reduction in outcome.reductions:
        whole = reduction.owner.shape[1] == len(place)
        here = (torch.ones_like(stays) if whole else tile == tile[0] + part).nonzero()[:, 0]
        own = reduction.owner[0].cpu()
        owner[place[here]] = torch.where(own >= 0, own + slot, -1)
        slot += reduction.source.shape[1]
        stays[here] = False
        stays[here[reduction.kept[0].cpu()]] = True
        anchors += place[here[reduction.anchors[0].cpu()]].tolist()
    return Patches(place[stays].tolist(), anchors, owner.tolist())


def _places(tile: Tensor, token: Tensor, side: int, columns: int) -> Tensor:
    """Number of each token's patch in the drawing."""
    if not columns:
        return token
    row = (tile - 1) // columns * side + token // side
    column = (tile - 1) % columns * side + token % side
    return torch.where(tile == 0, token, side**2 + row * columns * side + column)
