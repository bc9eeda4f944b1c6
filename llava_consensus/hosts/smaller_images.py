"""Smaller images for towers that read images of any size, and images of which a tower sees some cells.

Each function gives the arguments of the model's own encoder, or its output, for fewer tokens; `Shrunk` says which of
these tokens each place of the full image is a copy of.
"""

import inspect
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from llava_consensus.errors import OptionError
from llava_consensus.hosts.open_tower import cells_of, positions, shrink

MERGED, SIDE = 4, 2  # patches of a cell of Qwen-VL, which makes a token, and in a row of it


class TokenGrid(NamedTuple):
    """The tokens of an image."""

    tiles: int
    rows: int  # of each tile
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return self.rows, self.columns

    @property
    def size(self) -> int:
        """Tokens of a tile."""
        return self.rows * self.columns


class Shrunk(NamedTuple):
    """Images whose tiles are made smaller, each one for itself."""

    grids: list[TokenGrid]
    small: list[list[tuple[int, int]]]  # of each image, rows and columns of tokens of each smaller tile

    def slots(self) -> list[Tensor]:
        """The smaller tile's token in whose cell each token lies: [T, N] of each image."""
        return [
            torch.stack([cells_of(grid.shape, small) for small in own])
            for grid, own in zip(self.grids, self.small, strict=True)
        ]

    def taken(self, slots: list[Tensor]) -> Tensor:
        """The same among the tokens of all smaller tiles: [n]."""
        first, found = 0, []
        for slot, own in zip(slots, self.small, strict=True):
            for tile, (rows, columns) in zip(slot, own, strict=True):
                found.append(tile + first)
                first += rows * columns
        return torch.cat(found)


def smaller_grids(inputs: dict[str, Any], modality: str, small: Shrunk, patch: int) -> dict[str, Any]:
    """Arguments of the encoder of Qwen-VL and GLM-4V, every tile of a video an entry of its own."""
    name, pixels = next((name, value) for name, value in inputs.items() if name.startswith("pixel_values"))
    grid_name = f"{modality}_grid_thw"
    sizes = inputs[grid_name].tolist()
    pieces: list[Tensor] = []
    for image, (frames, *size), own in zip(
        pixels.split([math.prod(size) for size in sizes]), sizes, small.small, strict=True
    ):
        for tile, (rows, columns) in zip(image.chunk(frames), own, strict=True):
            new = SIDE * rows, SIDE * columns
            if list(new) != size:
                resized = shrink(_image(tile, size, patch), new[0] * patch, new[1] * patch)
                tile = _patches(resized, patch).to(tile.dtype)
            pieces.append(tile)
    grids = [[1, SIDE * rows, SIDE * columns] for own in small.small for rows, columns in own]
    return {**inputs, name: torch.cat(pieces), grid_name: inputs[grid_name].new_tensor(grids)}


def smaller_sizes(inputs: dict[str, Any], small: Shrunk, step: int) -> dict[str, Any]:
    """Arguments of the encoder of Pixtral and Mistral 3, whose tokens are squares of `step` pixels."""
    sizes, pixels, new = torch.as_tensor(inputs["image_sizes"]).tolist(), inputs["pixel_values"].clone(), []
    for image, (height, width), grid, (less,) in zip(pixels, sizes, small.grids, small.small, strict=True):
        new.append([height, width] if less == grid.shape else [step * length for length in less])
        if new[-1] != [height, width]:
            resized = shrink(image[None, :, :height, :width], *new[-1])[0].to(image.dtype)
            image[:, : new[-1][0], : new[-1][1]] = resized
    return {**inputs, "pixel_values": pixels, "image_sizes": torch.tensor(new)}


def _image(patches: Tensor, size: list[int], patch: int) -> Tensor:
    """A tile [rows, values] as the processor gives it, each token's four patches together, as [1, channels, h, w]; the
    images that a temporal patch takes together are channels.
    """
    height, width = size
    tile = patches.view(height // SIDE, width // SIDE, SIDE, SIDE, -1, patch, patch)
    return tile.permute(4, 0, 2, 5, 1, 3, 6).reshape(1, -1, height * patch, width * patch)


def _patches(image: Tensor, patch: int) -> Tensor:
    """The way back: [1, channels, h, w] -> [rows, values]."""
    _, channels, height, width = image.shape
    tile = image.view(channels, height // SIDE // patch, SIDE, patch, width // SIDE // patch, SIDE, patch)
    return tile.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, channels * patch**2)


# Equal tiles, a token for each square of patches


class Squares:
    """Tower and projector of a family of equal tiles, for tiles of any size.

    Args:
        base: the module that encodes images.
        side: tokens in a row of a full tile.
    """

    def __init__(self, base: Any, side: int) -> None:
        config = base.config
        self.base, self.kind, self.side = base, config.model_type, side
        vision, size = config.vision_config, config.vision_config.image_size
        self.patch = first_of(vision.patch_size)
        self.stride = first_of(size) // self.patch // side
        self.vision = base.vision_model if self.kind in ("smolvlm", "idefics3") else base.vision_tower
        self.classes = int(self.kind == "internvl")
        layer = getattr(config, "vision_feature_layer", None)
        self.layer = None if layer == -1 and self.kind == "internvl" else layer

    def tokens(self, pixels: Tensor, small: Shrunk) -> Tensor:
        """The tokens of all smaller tiles in order [n', D], given the full ones [T, 3, h, w]."""
        sizes, whole = [cells for own in small.small for cells in own], (self.side, self.side)
        found: dict[int, Tensor] = {}
        for cells in dict.fromkeys(sizes):
            places = [place for place, own in enumerate(sizes) if own == cells]
            part = torch.stack([pixels[place] for place in places])
            if cells != whole:
                step = self.patch * self.stride
                part = shrink(part, cells[0] * step, cells[1] * step).to(pixels.dtype)
            found.update(zip(places, self.read(part), strict=True))
        return torch.cat([found[place] for place in range(len(sizes))])

    def read(self, pixels: Tensor) -> Tensor:
        """Tiles of any one size through tower and projector, which takes each square for a whole tile: [T, 3, h, w] ->
        [T, N, D].
        """
        height, width = (size // self.patch for size in pixels.shape[-2:])
        squares = self._patches(pixels)[:, square_members(height, width, self.stride)]  # [T, N, m, D_v]
        return self._joined(squares.flatten(0, 1)).reshape(*squares.shape[:2], -1)

    def _patches(self, pixels: Tensor) -> Tensor:
        """Tiles through the vision model: [T, 3, h, w] -> [T, n, D_v], without a class token."""
        if self.kind == "ovis2":  # its embeddings take whole tiles only
            transformer = self.vision.transformer
            front, weight = transformer.embeddings, transformer.embeddings.position_embedding.weight
            rows, columns = (size // self.patch for size in pixels.shape[-2:])
            patches = front.rms_norm(front.patch_embedding(pixels.to(weight.dtype)).flatten(2).transpose(1, 2))
            places = weight if rows * columns == len(weight) else positions(weight, rows, columns, classes=0)
            states: Tensor = transformer.encoder(inputs_embeds=patches + places).last_hidden_state
            return transformer.rms_norm(states)
        more = {} if self.layer is None else {"output_hidden_states": True}
        if "interpolate_pos_encoding" in inspect.signature(type(self.vision).forward).parameters:  # else it always does
            more["interpolate_pos_encoding"] = True
        output = self.vision(pixels.to(self.base.dtype), **more)
        states = output.last_hidden_state if self.layer is None else output.hidden_states[self.layer]
        return states[:, self.classes :]

    def _joined(self, squares: Tensor) -> Tensor:
        """Tokens [n, ...] of squares of patches [n, m, D_v] by the model's own projector."""
        base = self.base
        if self.kind in ("smolvlm", "idefics3"):
            return base.connector(squares)
        if self.kind == "internvl":
            square = squares.unflatten(1, (self.stride, self.stride))
            return base.multi_modal_projector(base.pixel_shuffle(square, base.config.downsample_ratio))
        if self.kind == "gemma3":  # whose projector takes whole tiles only
            projector = base.multi_modal_projector
            normed: Tensor = projector.mm_soft_emb_norm(squares.mean(1))
            return (normed @ projector.mm_input_projection_weight).type_as(squares)
        if self.kind == "ovis2":
            tower = self.vision
            words = tower.head_norm(tower.head_linear(squares.flatten(1))).softmax(-1)
            return base.visual_embeddings_table(pad(words, (0, tower.num_visual_indicator_tokens)))
        return base.multi_modal_projector(squares)

    def output(self, tokens: Tensor) -> Any:
        """An encoder's output with features [T, N, D]."""
        if self.kind == "ovis2":  # with the embeddings of the rows around tiles
            from transformers.models.ovis2.modeling_ovis2 import BaseModelOutputWithVisualIndicatorFeatures

            table = self.base.visual_embeddings_table.weight
            rows = table[-self.base.config.vision_config.num_visual_indicator_tokens :]
            return BaseModelOutputWithVisualIndicatorFeatures(pooler_output=tokens, visual_indicator_features=rows)
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        return BaseModelOutputWithPooling(pooler_output=tokens)


def square_members(height: int, width: int, stride: int) -> Tensor:
    """The patches of each square of a grid of patches: [N, stride * stride], without what does not fill a square."""
    corner = torch.arange(height // stride)[:, None] * stride * width + torch.arange(width // stride) * stride
    inside = torch.arange(stride)[:, None] * width + torch.arange(stride)
    return corner.flatten()[:, None] + inside.flatten()


def first_of(size: Any) -> int:
    """Height in pixels of what a configuration may give height and width of."""
    return int(size if isinstance(size, int) else size[0])


# Cells of Qwen3-VL


def cells_left(
    method: Any, pixels: Tensor, sizes: list[list[int]], shares: list[list[int]], vision: Any
) -> tuple[list[Tensor], Tensor]:
    """The seen cell that stands for each cell of an image, [1, N] each, and all cells that the tower sees.

    Args:
        pixels: of all images [rows, values].
        sizes: of each image, frames and patches in a column and a row.
    """
    if any(frames > 1 for frames, _, _ in sizes):
        raise OptionError(f"{type(method).__name__} is for images, and this prompt shows a video")
    slots: list[Tensor] = []
    kept: list[Tensor] = []
    first = 0
    for image, (_, rows, columns), (share,) in zip(
        pixels.split([math.prod(size) for size in sizes]), sizes, shares, strict=True
    ):
        shape = rows // SIDE, columns // SIDE
        own = torch.arange(math.prod(shape), device=pixels.device)
        stand_in = own
        if share < len(own):
            # both images of a temporal patch are the same, and pixels are in -1..1
            view = image.view(*shape, MERGED, -1, vision.temporal_patch_size, vision.patch_size**2)
            stand_in = method.stand_ins(view[..., 0, :].flatten(2).float() * 0.5 + 0.5).flatten()
        stays = stand_in == own
        slots.append((stays.cumsum(0) - 1)[stand_in][None])
        kept.append(stays.nonzero()[:, 0] + first)
        first += len(own)
    return slots, torch.cat(kept)


def see_cells(visual: Any, pixels: Tensor, grid: Tensor, cells: Tensor, counts: list[int]) -> Any:
    """The tower of Qwen3-VL on these cells, `counts` of each image, at their own places."""
    try:
        from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids
    except ImportError as error:
        raise OptionError("cells of an image are left out on transformers >= 5.23: upgrade it") from error
    patches = (cells[:, None] * MERGED + torch.arange(MERGED, device=cells.device)).flatten()
    taps, weights = get_vision_interpolation_indices_and_weights(
        grid, num_grid_per_side=visual.num_grid_per_side, mode=visual.interpolation_mode,
        align_corners=visual.interpolation_align_corners, spatial_merge_size=SIDE,
    )  # fmt: skip
    ends = torch.tensor([0, *(MERGED * count for count in counts)], device=grid.device).cumsum(0)
    return visual(
        pixels[patches].type(visual.dtype), grid_thw=grid,
        interp_indices=taps[patches], interp_weights=weights[patches],
        position_ids=get_vision_position_ids(grid, SIDE)[patches], cu_seqlens=ends.to(torch.int32), return_dict=True,
    )  # fmt: skip
