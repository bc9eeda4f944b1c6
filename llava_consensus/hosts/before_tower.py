"""Methods before the projector: inside the blocks of a vision tower (ToMe), on the image before it (resize), or on
cells of the image (PixelPrune). They work on LLaVA and its kind, whose tokens are the patches of CLIP, SigLIP or DINOv2
(`open_tower`), and on Qwen-VL and GLM-4V, whose encoders take images of any size.

Tower and projector work on fewer tokens. Every placeholder of the prompt then gets a copy of the token that represents
it, and `slot` says which, so that the model puts features into the prompt as always. At the entrance of the language
model the method's `reduce` keeps one row of each token.
"""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.images import STRAIGHT, TABLE, Image, Integers, images_of, most_tiles, with_class
from llava_consensus.hosts.open_tower import EncoderRun, OpenTower, cells_of, shrink
from llava_consensus.hosts.tower import RECORD, Encoded, Tiles, Tower, flat_features, records_of
from llava_consensus.hosts.units import Unit, shares_of
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.method import Place

ACTED_INSIDE = ("clip_vision_model", "siglip_vision_model")
POOLED = ("llava_next_video", "llava_onevision")  # of these, the ones that pool the patches of videos
SEES_CELLS = ("qwen3_vl", "qwen3_vl_moe")
GRIDS = ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm4v_moe", "glm46v", *SEES_CELLS)
# families whose tower the next method of a composition can read
READABLE = (*STRAIGHT, "llava_llama", "llava_mistral", *GRIDS)
MERGED, SIDE = 4, 2  # patches of a cell of Qwen-VL, which makes a token, and in a row of it
UNKNOWN_TOWER = (
    "acts before the projector, and it is not known how the tower of this model takes fewer patches. Take a method "
    "that acts after the tower"
)


def refusal(kind: str, vision: str, place: Place) -> str:
    """Why a method of this place cannot act on models of this type and vision tower; "" if it can."""
    if kind not in (*STRAIGHT, *GRIDS):
        return UNKNOWN_TOWER
    reason = ""
    if place is Place.CELLS:
        if kind not in SEES_CELLS:
            reason = "leaves out cells of the image, which is done in the tower of Qwen3-VL only"
    elif kind in STRAIGHT:
        if place is Place.TOWER and vision not in ACTED_INSIDE:
            reason = "acts inside the vision tower, which is done in CLIP and SigLIP towers only"
        elif vision not in (*ACTED_INSIDE, "dinov2"):
            reason = "acts before the vision tower, which is done for CLIP, SigLIP and DINOv2 towers only"
    elif place is Place.TOWER:
        reason = (
            "merges patches inside the tower, and what is left forms no grid, of which this model makes one token of "
            "each square of patches"
        )
    return f"{reason}. Take a method that acts after the tower" if reason else ""


def shares_left(tiles: int, size: int, budget: Budget | Share, method: Any) -> list[int]:
    """Tokens that a method before the projector leaves of each of `tiles` tiles of `size` tokens."""
    shares = shares_of([size] * tiles, budget, method)
    return [min(share.tokens, size) for share in shares] if len(shares) == tiles else [size] * tiles


def check_equal(reader: Any, method: Any, shares: Sequence[int]) -> None:
    """Raises OptionError for tiles of several sizes, which the next method of a composition cannot read."""
    if len(set(shares)) > 1:
        raise OptionError(
            f"{type(reader).__name__} reads the tower, and {type(method).__name__} leaves tiles of several sizes "
            f"({', '.join(map(str, sorted(set(shares))))}). Give it a number of tokens that the tiles share equally"
        )


def check_masks(vision: Any, method: Any) -> None:
    """Raises OptionError for a method that adds to attention inside a tower whose kernel takes no additive mask."""
    kernel = getattr(vision, "_attn_implementation", "eager")
    if method.place is Place.TOWER and method.masks and kernel not in ("eager", "sdpa"):
        raise OptionError(
            f"attention {kernel!r} of the vision tower takes no additive mask: load it with sdpa, or proportional=false"
        )


class TokenGrid(NamedTuple):
    tiles: int
    rows: int  # of each tile
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def size(self) -> int:
        return self.rows * self.columns


class ImageLeft(NamedTuple):
    slot: Tensor  # [T, N] token of its tile that each place is a copy of
    columns: int  # places in a row of a tile
    shares: list[int]  # tokens that each tile may keep


class Left(NamedTuple):
    """The remaining tokens of the images of a record."""

    images: list[ImageLeft]
    record: Encoded | None  # of the tokens that are left, if the next method reads the tower


class BeforeTower:
    """A method before the projector of one model.

    Args:
        base: the module that encodes images.
        kind: of the model (`model_type`, or `pixtral`).
        method: that acts.
        budget: of one image.
    Raises:
        OptionError: for a model that the method cannot act in, or a budget that it cannot reach.
    """

    def __init__(self, base: Any, kind: str, method: Any, budget: Budget | Share) -> None:
        config, self.kind, self.method, self.budget = base.config, kind, method, budget
        name = type(method).__name__
        vision: Any = getattr(config, "vision_config", None)
        if why := refusal(kind, getattr(vision, "model_type", ""), method.place):
            raise OptionError(f"{name} {why}")
        side = getattr(base.visual, "spatial_merge_size", SIDE) if kind in GRIDS else SIDE
        if side != SIDE:
            raise OptionError(
                f"vision_config.spatial_merge_size={side}: {name} is adapted to tokens of {SIDE} x {SIDE} patches"
            )
        self.towers: dict[str, OpenTower] = {}
        if kind in STRAIGHT:
            self._open(base, config)
            size = (vision.image_size // vision.patch_size) ** 2
            shares = {share for tiles in (1, most_tiles(base)) for share in shares_left(tiles, size, budget, method)}
            for share in shares if method.place is Place.TOWER else ():
                if share < size:
                    method.schedule(share, size, self.towers["image"].merging)

    def _open(self, base: Any, config: Any) -> None:
        layer, method = config.vision_feature_layer, self.method
        if not isinstance(layer, int):
            raise OptionError(f"vision_feature_layer={layer}: features of several layers are not adapted")
        names = {"image": "image_tower", "video": "video_tower"} if self.kind == "video_llava" else {}
        for modality in ("image", "video"):
            module = getattr(base, names.get(modality, "vision_tower"))
            vision = module.config
            strategy, classes = config.vision_feature_select_strategy, vision.model_type != "siglip_vision_model"
            if (strategy == "default") != classes:
                raise OptionError(
                    f"vision_feature_select_strategy={strategy!r} does not fit a {vision.model_type}: a class token "
                    "among the patches is no candidate"
                )
            count = vision.num_hidden_layers
            self.towers[modality] = OpenTower(
                module, base.multi_modal_projector, method, layer, layer + count if layer < 0 else layer - 1
            )
            if not names:
                self.towers["video"] = self.towers["image"]
                break
        check_masks(self.towers["image"].module.config, method)

    def install(self) -> None:
        for tower in dict.fromkeys(self.towers.values()):
            tower.install()

    def remove(self) -> None:
        for tower in dict.fromkeys(self.towers.values()):
            tower.remove()

    def _grid(self, base: Any, inputs: dict[str, Any], modality: str, image: Image, number: int) -> TokenGrid:
        if self.kind in GRIDS:
            frames, height, width = inputs[f"{modality}_grid_thw"][number].tolist()
            return TokenGrid(frames, height // SIDE, width // SIDE)
        if modality == "video" and self.kind in POOLED:
            side = math.isqrt(int(image.token.max()) + 1)
        else:  # unpadding may have left less
            side = base.config.vision_config.image_size // base.config.vision_config.patch_size
        return TokenGrid(image.tiles, side, side)

    def encode(
        self, tower: Tower, plain: Any, base: Any, modality: str, ids: Integers, learns: bool, inputs: dict[str, Any]
    ) -> Any:
        """Takes the place of the model's encoder of a modality, for prompts [R, S].

        Args:
            tower: records the tensors that the next method of a composition reads.
            plain: the encoder.
        """
        record = SimpleNamespace(inputs=inputs, count=None)
        ((_, _, images, _),) = images_of(base, base.config, {modality: [record]}, ids)
        grids = [self._grid(base, inputs, modality, image, number) for number, image in enumerate(images)]
        shares = [shares_left(grid.tiles, grid.size, self.budget, self.method) for grid in grids]
        if all(share == grid.size for grid, own in zip(grids, shares, strict=True) for share in own):
            return tower.encode(plain, base, False, learns, **inputs)
        if modality == "video" and self.kind in POOLED:
            raise OptionError(
                f"{type(self.method).__name__} acts before the projector, and this model pools the patches of a video "
                "after the tower: take a method that acts after the tower"
            )
        if tower.reads and self.kind in STRAIGHT:
            check_equal(tower.method, self.method, [share for own in shares for share in own])
        if self.kind in STRAIGHT:
            output, slots = self._inside(tower, plain, base, modality, images, grids, shares, inputs)
        elif self.method.place is Place.CELLS:
            output, slots = self._cells(tower, base, modality, shares, inputs)
        else:
            output, slots = self._smaller(tower, plain, base, modality, grids, shares, inputs)
        rows = flat_features(output)
        small = records_of(output)[0] if hasattr(output, RECORD) else None
        left = Left([ImageLeft(*of) for of in zip(slots, (g.columns for g in grids), shares, strict=True)], small)
        count = None if rows is None else len(rows)
        object.__setattr__(output, RECORD, [Encoded(inputs, None, count, {}, {}, {}, left)])
        return output

    def _inside(
        self, tower: Tower, plain: Any, base: Any, modality: str, images: list[Image], grids: list[TokenGrid],
        shares: list[list[int]], inputs: dict[str, Any],
    ) -> tuple[Any, list[Tensor]]:  # fmt: skip
        """LLaVA and its kind: the model's own encoder, with an open tower in it."""
        front = modality == "video" and TABLE[self.kind].video is with_class
        run = EncoderRun([share for own in shares for share in own], grids[0].shape, front)
        with self.towers[modality].running(run):
            output = tower.encode(plain, base, False, False, **inputs)
        assert run.slot is not None and run.projected is not None
        if self.kind == "llava_onevision":  # which resizes maps of large images: a place has the patch in its middle
            for image, features in zip(images, output["pooler_output"], strict=True):
                real = np.flatnonzero(image.token >= 0)
                at = torch.from_numpy(np.stack((real, image.tile[real] + image.first, image.token[real])))
                place, tile, token = at.to(features.device)
                features[place] = run.projected[tile, token]
        return output, list(run.slot.split([grid.tiles for grid in grids]))

    def _smaller(
        self, tower: Tower, plain: Any, base: Any, modality: str, grids: list[TokenGrid], shares: list[list[int]],
        inputs: dict[str, Any],
    ) -> tuple[Any, list[Tensor]]:  # fmt: skip
        small = [
            [self.method.image_size(share, *grid.shape) if share < grid.size else grid.shape for share in own]
            for grid, own in zip(grids, shares, strict=True)
        ]
        slots, taken, first = [], [], 0
        for grid, own in zip(grids, small, strict=True):
            slots.append(torch.stack([cells_of(grid.shape, cells) for cells in own]))
            for slot, (rows, columns) in zip(slots[-1], own, strict=True):
                taken.append(slot + first)
                first += rows * columns
        inputs = smaller_grids(inputs, modality, small, base.visual.config.patch_size)
        output = tower.encode(plain, base, False, True, **inputs)
        return self._spread(output, torch.cat(taken), slots)

    def _cells(
        self, tower: Tower, base: Any, modality: str, shares: list[list[int]], inputs: dict[str, Any]
    ) -> tuple[Any, list[Tensor]]:
        if modality == "video":
            raise OptionError(f"{type(self.method).__name__} is for images, and this prompt shows a video")
        pixels, grid, visual = inputs["pixel_values"], inputs["image_grid_thw"], base.visual
        slots, cells = cells_left(self.method, pixels, grid.tolist(), shares, visual.config)
        counts = [int(slot.max()) + 1 for slot in slots]
        seen = torch.tensor([[1, SIDE, SIDE * count] for count in counts])
        output = tower.encode(
            see_cells, base, False, True, visual=visual, pixels=pixels, grid=grid, image_grid_thw=seen, cells=cells
        )
        starts = np.cumsum([0, *counts]).tolist()
        index = torch.cat([slot[0] + start for slot, start in zip(slots, starts, strict=False)])
        return self._spread(output, index, slots)

    def _spread(self, output: Any, index: Tensor, slots: list[Tensor]) -> tuple[Any, list[Tensor]]:
        """An encoder's output with a copy of a token for each place."""
        sizes = [slot.numel() for slot in slots]
        for name in ("pooler_output", "deepstack_features"):
            value = output.get(name)
            if value is None:
                continue
            layers = value if name == "deepstack_features" else [value]
            flat = [
                layer if isinstance(layer, Tensor) else torch.cat([own.reshape(-1, own.shape[-1]) for own in layer])
                for layer in layers
            ]
            index = index.to(flat[0].device)
            spread = [list(layer[index].split(sizes)) for layer in flat]
            output[name] = spread if name == "deepstack_features" else spread[0]
        return output, [slot.to(index.device) for slot in slots]


# Smaller images of Qwen-VL and GLM-4V, and cells of Qwen3-VL


def smaller_grids(
    inputs: dict[str, Any], modality: str, small: list[list[tuple[int, int]]], patch: int
) -> dict[str, Any]:
    """Arguments of the encoder of Qwen-VL and GLM-4V, every tile of a video a separate entry.

    Args:
        small: of each image, rows and columns of tokens of each smaller tile.
    """
    name, pixels = next((name, value) for name, value in inputs.items() if name.startswith("pixel_values"))
    grid_name = f"{modality}_grid_thw"
    sizes = inputs[grid_name].tolist()
    pieces: list[Tensor] = []
    for image, (frames, *size), own in zip(
        pixels.split([math.prod(size) for size in sizes]), sizes, small, strict=True
    ):
        for tile, (rows, columns) in zip(image.chunk(frames), own, strict=True):
            new = SIDE * rows, SIDE * columns
            if list(new) != size:
                resized = shrink(_image(tile, size, patch), new[0] * patch, new[1] * patch)
                tile = _patches(resized, patch).to(tile.dtype)
            pieces.append(tile)
    grids = [[1, SIDE * rows, SIDE * columns] for own in small for rows, columns in own]
    return {**inputs, name: torch.cat(pieces), grid_name: inputs[grid_name].new_tensor(grids)}


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


def cells_left(
    method: Any, pixels: Tensor, sizes: list[list[int]], shares: list[list[int]], vision: Any
) -> tuple[list[Tensor], Tensor]:
    """The seen cell that represents each cell of an image, [1, N] each, and all cells that the tower sees.

    Args:
        pixels: of all images [rows, values].
        sizes: of each image, frames and patches in a column and a row.
    """
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


def see_cells(visual: Any, pixels: Tensor, grid: Tensor, image_grid_thw: Tensor, cells: Tensor) -> Any:
    """The tower of Qwen3-VL on these cells, at their own places; `image_grid_thw` has a row of cells for each image."""
    try:
        from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids
    except ImportError as error:
        raise OptionError("cells of an image are left out on transformers >= 5.23: upgrade it") from error
    patches = (cells[:, None] * MERGED + torch.arange(MERGED, device=cells.device)).flatten()
    taps, weights = get_vision_interpolation_indices_and_weights(
        grid, num_grid_per_side=visual.num_grid_per_side, mode=visual.interpolation_mode,
        align_corners=visual.interpolation_align_corners, spatial_merge_size=SIDE,
    )  # fmt: skip
    ends = torch.cat((grid.new_zeros(1), image_grid_thw.prod(1).to(grid.device).cumsum(0)))
    return visual(
        pixels[patches].type(visual.dtype), grid_thw=grid,
        interp_indices=taps[patches], interp_weights=weights[patches],
        position_ids=get_vision_position_ids(grid, SIDE)[patches], cu_seqlens=ends.to(torch.int32), return_dict=True,
    )  # fmt: skip


# At the entrance of the language model


def whole_tiles(image: Image, left: ImageLeft) -> Tiles:
    """The tiles of an image with a copy of a token for each place."""
    tiles, size = left.slot.shape
    return Tiles(tiles, size, left.columns, {"slot": left.slot})


def tiles_left(tower: Tower, left: Left, images: list[Image], straight: bool, square: bool) -> tuple[list[Tiles], str]:
    """The tiles of the tokens that are left, and why attention that the next method reads is missing. Synchronises."""
    whole, sides = [], []
    for image, own in zip(images, left.images, strict=True):
        slot = own.slot.cpu()
        tiles, count = len(slot), int(slot.max()) + 1
        columns = int(slot[0, : own.columns].max()) + 1
        grids = (slot.shape[1] // own.columns, own.columns), (count // columns, columns)
        sides.append(columns if torch.equal(slot[0], cells_of(*grids)) else 0)
        places = np.arange(tiles * count)
        whole.append(Image(0, places, places // count, places % count, tiles, image.video, image.first))
    if left.record is None or not tower.reads:
        found = [Tiles(one.tiles, int(one.token.max()) + 1, side, {}) for one, side in zip(whole, sides, strict=True)]
        return found, ""
    found, short = tower.tiles(left.record, whole, straight, square)
    return [tiles._replace(side=side) for tiles, side in zip(found, sides, strict=True)], short


def units_left(images: list[Image], left: Sequence[ImageLeft | None]) -> list[Unit]:
    """Tiles of which a method before the projector has left fewer tokens."""
    found = []
    for number, (image, own) in enumerate(zip(images, left, strict=True)):
        if own is None:
            continue
        real = image.token >= 0
        first = int(image.tile[real].min())
        for tile in np.unique(image.tile[real]).tolist():
            here = real & (image.tile == tile)
            if own.shares[tile] < int(here.sum()):
                budget = Budget(own.shares[tile])
                found.append(
                    Unit(number, image.places[here], image.tile[here], image.token[here], 1, tile - first, budget)
                )
    return found


def numbered(images: list[Image], left: Sequence[ImageLeft | None]) -> list[Image]:
    """Images whose tokens are numbered among those that are left. Synchronises."""
    found = []
    for image, own in zip(images, left, strict=True):
        if own is None:
            found.append(image)
            continue
        slot, real = own.slot.cpu().numpy(), image.token >= 0
        token = image.token.copy()
        token[real] = slot[image.tile[real], image.token[real]]
        found.append(image._replace(token=token))
    return found
