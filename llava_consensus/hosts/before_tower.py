"""Methods before the projector: inside the blocks of a vision tower (ToMe), on the image it is shown (resize), or on
cells of the image (PixelPrune).

Tower and projector work on fewer tokens. Every placeholder of the prompt then gets a copy of the token that stands for
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
from llava_consensus.hosts.facts import SHUFFLED, TILES
from llava_consensus.hosts.images import TABLE, Image, Integers, images_of, with_class
from llava_consensus.hosts.open_tower import OpenTower, Run, cells_of
from llava_consensus.hosts.smaller_images import (
    MERGED,
    SIDE,
    Shrunk,
    Squares,
    TokenGrid,
    cells_left,
    first_of,
    see_cells,
    smaller_grids,
    smaller_sizes,
)
from llava_consensus.hosts.tower import RECORD, Encoded, Tiles, Tower, flat_features, records_of
from llava_consensus.hosts.units import Unit, shares_of
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.method import Place

ACTED_INSIDE = ("clip_vision_model", "siglip_vision_model")
STRAIGHT = ("llava", "llava_next", "llava_next_video", "llava_onevision", "video_llava")  # a token for each patch
POOLED = ("llava_next_video", "llava_onevision")  # of these, the ones that pool the patches of videos
SQUARES = ("internvl", "smolvlm", "idefics3", "gemma3", "aya_vision", "cohere2_vision", "ovis2")
SIZES = ("pixtral", "mistral3")
SEES_CELLS = ("qwen3_vl", "qwen3_vl_moe")
GRIDS = ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm4v_moe", "glm46v", *SEES_CELLS)
# families whose tower the next method of a composition can read
READABLE = (*STRAIGHT, "llava_llama", "llava_mistral", *GRIDS)
UNKNOWN_TOWER = (
    "acts before the projector, and it is not known how the tower of this model takes fewer patches. Take a method "
    "that acts after the tower"
)


def refusal(kind: str, vision: str, place: Place) -> str:
    """Why a method of this place cannot act on models of this type and vision tower; "" if it can."""
    if kind not in (*STRAIGHT, *SQUARES, *SIZES, *GRIDS):
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
    elif place is Place.TOWER and kind != "pixtral":
        reason = (
            "merges patches inside the tower, and what is left forms no grid, of which this model makes one token of "
            "each square of patches"
        )
    return f"{reason}. Take a method that acts after the tower" if reason else ""


def shares_left(tiles: int, size: int, budget: Budget | Share, method: Any) -> list[int]:
    """Tokens that a method before the projector leaves of each of so many tiles of `size` tokens."""
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


class ImageLeft(NamedTuple):
    """What is left of one image."""

    slot: Tensor  # [T, N] token of its tile that each place is a copy of
    columns: int  # places in a row of a tile
    shares: list[int]  # tokens that each tile may keep


class Left(NamedTuple):
    """What is left of the images of a record."""

    images: list[ImageLeft]
    record: Encoded | None  # of the tokens that are left, if the next method reads the tower


class BeforeTower:
    """A method before the projector of one model.

    Args:
        base: the module that encodes images.
        kind: of the model (`model_type`, or `pixtral`).
        method: that acts.
        budget: of one image.
        options: of the family (`HostEntry.options`).
    Raises:
        OptionError: for a model that the method cannot act in, or a budget that it cannot reach.
    """

    def __init__(self, base: Any, kind: str, method: Any, budget: Budget | Share, options: Any) -> None:
        config, self.kind, self.method, self.budget = base.config, kind, method, budget
        name = type(method).__name__
        vision: Any = getattr(config, "vision_config", None)
        if why := refusal(kind, getattr(vision, "model_type", ""), method.place):
            raise OptionError(f"{name} {why}")
        if options.get("class_tokens") == "candidates":
            raise OptionError(
                f"class_tokens=candidates: {name} acts before the projector, on patches, and class tokens are none. "
                "Take class_tokens=keep or class_tokens=drop"
            )
        drawn = getattr(vision, "tokenize_function", "softmax")
        if drawn != "softmax":
            raise OptionError(
                f"tokenize_function={drawn!r}: {name} is adapted to tokens that are mixtures of visual words "
                "(softmax). Take a method that acts after the tower"
            )
        side = getattr(base.visual, "spatial_merge_size", SIDE) if kind in GRIDS else SIDE
        if side != SIDE:
            raise OptionError(
                f"vision_config.spatial_merge_size={side}: {name} is adapted to tokens of {SIDE} x {SIDE} patches"
            )
        pins, size = getattr(config, "image_grid_pinpoints", None), self._tile_size(base)
        most = 1 + max(height * width // vision.image_size**2 for height, width in pins) if pins else TILES.get(kind, 1)
        shares = [share for tiles in (1, most) for share in shares_left(tiles, size, budget, method)] if size else []
        self.towers: dict[str, OpenTower] = {}
        if kind in STRAIGHT or (kind == "pixtral" and method.place is Place.TOWER):
            self._open(base, config)
        if method.place is Place.TOWER and kind != "pixtral":  # there each image has a schedule of its own
            for share in {share for share in shares if share < size}:
                method.schedule(share, size, self.towers["image"].merging)

    def _tile_size(self, base: Any) -> int:
        """Tokens of a tile; 0 if each image has its own."""
        vision = base.config.vision_config
        if self.kind in (*GRIDS, *SIZES):
            return 0
        side = first_of(vision.image_size) // first_of(vision.patch_size)
        if self.kind in STRAIGHT:
            return side**2
        stride: int = SHUFFLED[self.kind](base.config)
        return (side // stride) ** 2

    def _open(self, base: Any, config: Any) -> None:
        """The towers that the method acts inside, by modality."""
        layer, method = config.vision_feature_layer, self.method
        if not isinstance(layer, int):
            raise OptionError(f"vision_feature_layer={layer}: features of several layers are not adapted")
        names = {"image": "image_tower", "video": "video_tower"} if self.kind == "video_llava" else {}
        for modality in ("image", "video"):
            module = getattr(base, names.get(modality, "vision_tower"))
            vision = module.config
            strategy, classes = config.vision_feature_select_strategy, vision.model_type != "siglip_vision_model"
            if self.kind in STRAIGHT and (strategy == "default") != classes:
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
        """Shadows and hooks in the towers."""
        for tower in dict.fromkeys(self.towers.values()):
            tower.install()

    def remove(self) -> None:
        """Gives the towers back as they were."""
        for tower in dict.fromkeys(self.towers.values()):
            tower.remove()

    def _grid(self, base: Any, inputs: dict[str, Any], modality: str, image: Image, number: int) -> TokenGrid:
        """The tokens of an image as the model makes them."""
        if self.kind in GRIDS:
            frames, height, width = inputs[f"{modality}_grid_thw"][number].tolist()
            return TokenGrid(frames, height // SIDE, width // SIDE)
        if self.kind in SIZES:
            height, width = torch.as_tensor(inputs["image_sizes"])[number].tolist()
            return TokenGrid(1, height // self._step(base), width // self._step(base))
        side = math.isqrt(int(image.token.max()) + 1)
        if self.kind in STRAIGHT and not (modality == "video" and self.kind in POOLED):  # unpadding may have left less
            side = math.isqrt(self._tile_size(base))
        return TokenGrid(image.tiles, side, side)

    def _step(self, base: Any) -> int:
        """Height and width in pixels of a token of Pixtral or Mistral 3."""
        return int(base.config.vision_config.patch_size * getattr(base.config, "spatial_merge_size", 1))

    def encode(
        self, tower: Tower, plain: Any, base: Any, modality: str, ids: Integers, learns: bool, inputs: dict[str, Any]
    ) -> Any:
        """Takes the place of the model's encoder of a modality, for prompts [R, S].

        Args:
            tower: that records what the next method of a composition reads.
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
        elif self.method.place is Place.TOWER:
            output, slots = self._one_by_one(plain, base, grids, shares, inputs)
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
        run = Run([share for own in shares for share in own], grids[0].shape, front)
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

    def _one_by_one(
        self, plain: Any, base: Any, grids: list[TokenGrid], shares: list[list[int]], inputs: dict[str, Any]
    ) -> tuple[Any, list[Tensor]]:
        """Pixtral, whose images are one row in the tower: each goes through it by itself."""
        sizes = torch.as_tensor(inputs["image_sizes"])
        outputs, slots = [], []
        for pixels, size, grid, own in zip(inputs["pixel_values"], sizes, grids, shares, strict=True):
            height, width = size.tolist()
            run = Run(own, grid.shape, False)
            given = {**inputs, "pixel_values": pixels[None, :, :height, :width], "image_sizes": size[None]}
            with self.towers["image"].running(run):
                outputs.append(plain(**given))
            assert run.slot is not None
            slots.append(run.slot)
        output = outputs[0]
        output["pooler_output"] = [features for one in outputs for features in one["pooler_output"]]
        return output, slots

    def _smaller(
        self, tower: Tower, plain: Any, base: Any, modality: str, grids: list[TokenGrid], shares: list[list[int]],
        inputs: dict[str, Any],
    ) -> tuple[Any, list[Tensor]]:  # fmt: skip
        """Smaller images through the model's own tower."""
        small = Shrunk(grids, [
            [self.method.picture(share, *grid.shape) if share < grid.size else grid.shape for share in own]
            for grid, own in zip(grids, shares, strict=True)
        ])  # fmt: skip
        slots = small.slots()
        index = small.taken(slots)
        if self.kind in SQUARES:
            check_whole(inputs.get("pixel_attention_mask"))
            pixels = inputs["pixel_values"].flatten(0, -4)
            if inputs["pixel_values"].ndim > 4:
                pixels = pixels[(pixels != 0).flatten(1).any(1)]  # without padding
            squares = Squares(base, grids[0].columns)
            tokens = squares.tokens(pixels, small)
            size = grids[0].size
            output = squares.output(tokens[index.to(tokens.device)].unflatten(0, (-1, size)))
            return output, [slot.to(tokens.device) for slot in slots]
        if self.kind in GRIDS:
            inputs = smaller_grids(inputs, modality, small, base.visual.config.patch_size)
        else:
            inputs = smaller_sizes(inputs, small, self._step(base))
        output = tower.encode(plain, base, False, True, **inputs)
        return self._spread(output, index, slots)

    def _cells(
        self, tower: Tower, base: Any, modality: str, shares: list[list[int]], inputs: dict[str, Any]
    ) -> tuple[Any, list[Tensor]]:
        """Qwen3-VL's tower on cells of the images."""
        pixels = next(value for name, value in inputs.items() if name.startswith("pixel_values"))
        grid, visual = inputs[f"{modality}_grid_thw"], base.visual
        slots, cells = cells_left(self.method, pixels, grid.tolist(), shares, visual.config)
        counts = [int(slot.max()) + 1 for slot in slots]
        seen = torch.tensor([[1, SIDE, SIDE * count] for count in counts])
        output = tower.encode(
            see, base, False, True, visual=visual, pixels=pixels, grid=grid, image_grid_thw=seen, cells=cells
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


def see(visual: Any, pixels: Tensor, grid: Tensor, image_grid_thw: Tensor, cells: Tensor) -> Any:
    """An encoder that sees some cells; the grid of an image is a row of those it sees."""
    return see_cells(visual, pixels, grid, cells, (image_grid_thw.prod(1) // MERGED).tolist())


def check_whole(mask: Tensor | None) -> None:
    """Raises OptionError for images that fill a tile in part."""
    if mask is None:
        return
    patches = mask.flatten(0, 1).flatten(1).bool()
    if bool((patches.any(1) & ~patches.all(1)).any()):
        raise OptionError(
            "pixel_attention_mask: images that fill a tile in part are not adapted, since the tower's attention masks "
            "patches. Let the processor resize or split images"
        )


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
