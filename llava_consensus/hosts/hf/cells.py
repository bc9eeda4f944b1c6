"""Towers that see some cells of a picture, the squares of patches that make a token: those of Qwen3-VL and Qwen3.5."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Tiles
from llava_consensus.reduction.method import Place

MERGED, SIDE = 4, 2  # patches of a cell, which makes a token, and in a row of it
ADAPTED: Mapping[Place, str] = MappingProxyType({Place.CELLS: ""})


class SeenCells(NamedTuple):
    """Pictures of which a tower has seen some cells."""

    output: Any  # of the tower, a row for each cell it has seen
    slots: list[Tensor]  # of each picture, which seen cell of its own stands for each cell [n]
    stand_in: Tensor  # [all cells] the same among the seen cells of all pictures
    columns: list[int]  # cells in a row of each picture

    def tiles(self, tokens: Tensor) -> list[Tiles]:
        """The tiles of each picture, given a token for each cell [all cells, D]."""
        split = tokens.detach().split([len(one) for one in self.slots])
        return [
            Tiles(own[None], {"slot": slot[None]}, columns)
            for own, slot, columns in zip(split, self.slots, self.columns, strict=True)
        ]


def through_tower(visual: Any, attachment: Any, modality: str, inputs: dict[str, Any]) -> SeenCells:
    """The cells that the method leaves, through a model's own tower, each at its own place in its picture.

    Raises:
        OptionError: for a video of several frames, or a transformers whose tower is not given places.
    """
    try:
        from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids
    except ImportError as error:
        raise OptionError("cells of a picture are left out on transformers >= 5.23: upgrade it") from error
    grid, method = inputs[f"{modality}_grid_thw"], attachment.method
    pixels, sizes = inputs["pixel_values" if modality == "image" else "pixel_values_videos"], grid.tolist()
    if any(frames > 1 for frames, _, _ in sizes):
        raise OptionError(f"{type(method).__name__} is for pictures, and this prompt shows a video")
    slots: list[Tensor] = []
    kept: list[Tensor] = []
    for picture, (_, rows, columns) in zip(pixels.split([math.prod(one) for one in sizes]), sizes, strict=True):
        shape = rows // SIDE, columns // SIDE
        own = torch.arange(math.prod(shape), device=pixels.device)
        stand_in = own
        if attachment.sharing.of_tiles(1, len(own))[0] < len(own):
            # both pictures of a temporal patch are the same, and pixels are in -1..1
            first = picture.view(*shape, MERGED, -1, visual.config.temporal_patch_size, visual.patch_size**2)
            stand_in = method.stand_ins(first[..., 0, :].flatten(2).float() * 0.5 + 0.5).flatten()
        stays = stand_in == own
        slots.append((stays.cumsum(0) - 1)[stand_in])
        kept.append(stays.nonzero()[:, 0])
    cells = torch.cat([one + start for one, start in zip(kept, _starts(slots), strict=True)])
    patches = (cells[:, None] * MERGED + torch.arange(MERGED, device=cells.device)).flatten()
    taps, weights = get_vision_interpolation_indices_and_weights(
        grid, num_grid_per_side=visual.num_grid_per_side, mode=visual.interpolation_mode,
        align_corners=visual.interpolation_align_corners, spatial_merge_size=SIDE,
    )  # fmt: skip
    ends = torch.tensor([0, *(MERGED * len(one) for one in kept)], device=grid.device).cumsum(0)
    output = visual(
        pixels[patches].type(visual.dtype), grid_thw=grid,
        interp_indices=taps[patches], interp_weights=weights[patches],
        position_ids=get_vision_position_ids(grid, SIDE)[patches], cu_seqlens=ends.to(torch.int32), return_dict=True,
    )  # fmt: skip
    index = torch.cat([slot + start for slot, start in zip(slots, _starts(kept), strict=True)])
    return SeenCells(output, slots, index, [columns // SIDE for _, _, columns in sizes])


def _starts(parts: list[Tensor]) -> list[int]:
    """Number of rows before each part."""
    return [sum(len(one) for one in parts[:number]) for number in range(len(parts))]
