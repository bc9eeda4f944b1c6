"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL, dense and of experts: pictures of any size, no class token, a merger that makes
one token of four patches that stand one after the other, and positions of three axes, which are kept.

Each temporal patch of a video is a tile: attention never crosses it. Qwen2.5-VL computes most blocks in windows and
keeps its rows in window order, which is undone here; Qwen3-VL adds features of earlier blocks between the first decoder
layers (DeepStack), which are reduced with the same rows.
"""

import math
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Offer, Tiles
from llava_consensus.hosts.hf.cells import ADAPTED, MERGED, SIDE, through_tower
from llava_consensus.hosts.hf.model import HfModel, joined, picture_tiles, reading, run_encoder
from llava_consensus.hosts.hf.rows import Features, PictureRows, whole_tiles
from llava_consensus.hosts.hf.towers import MERGER, PATCHES, TapTower
from llava_consensus.hosts.old_attachment import Attachment
from llava_consensus.hosts.tower_hooks import TokenGrid, shrink, shrunk
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.tokens import Need

CELLS = MappingProxyType({**MERGER, **ADAPTED})


class QwenVL(HfModel):
    """Adapter for the models of this file."""

    offer = Offer(PATCHES, inside=MERGER)
    decoding, keeps_positions = MappingProxyType({"axes": 3}), True
    around, typed, reads_inside = (1, 1), True, True
    placed_by = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")

    @cached_property
    def tower(self) -> TapTower:
        """The vision side."""
        return TapTower(self.inner.visual, self.decoder.reach, merged=MERGED, inside=self.offer.inside)

    def check(self, method: Method) -> None:
        """Raises OptionError for tokens of more patches than methods are adapted to."""
        super().check(method)
        side = getattr(self.inner.visual, "spatial_merge_size", SIDE) if hasattr(self.module, "model") else SIDE
        if side != SIDE:
            raise OptionError(
                f"vision_config.spatial_merge_size={side}: methods are adapted to tokens of {SIDE} x {SIDE} patches"
            )

    def pictures(self, modality: str, inputs: dict[str, Any], ids: Tensor) -> list[PictureRows]:
        """A tile for each temporal patch."""
        grids = inputs[f"{modality}_grid_thw"].tolist()
        return [whole_tiles(frames, height * width // MERGED) for frames, height, width in grids]

    def encode(
        self, attachment: Attachment, modality: str, inputs: dict[str, Any], pictures: list[PictureRows]
    ) -> Features:
        """The model's own encoder; its rows in the order of the tokens."""
        if attachment.method.place is Place.PICTURE:
            return self.smaller(attachment, modality, inputs)
        output, parts = run_encoder(self, attachment, modality, inputs)
        grids = inputs[f"{modality}_grid_thw"]
        parts = self.ordered(parts, grids)
        if Need.FINGERPRINT in attachment.needs:
            parts["pixels"] = next(inputs[name] for name in ("pixel_values", "pixel_values_videos") if name in inputs)
        tokens = joined(output.pooler_output)
        planes = tuple(joined(layer) for layer in getattr(output, "deepstack_features", None) or ())
        return Features(picture_tiles(tokens.detach(), parts, grids.tolist()), tokens, planes)

    def smaller(self, attachment: Attachment, modality: str, inputs: dict[str, Any]) -> Features:
        """Smaller pictures through the model's own encoder, every tile of a video an entry of its own."""
        name, pixels = next((name, value) for name, value in inputs.items() if name.startswith("pixel_values"))
        grid_name, patch = f"{modality}_grid_thw", self.inner.visual.config.patch_size
        sizes = inputs[grid_name].tolist()
        small = shrunk(
            attachment, [TokenGrid(frames, height // SIDE, width // SIDE) for frames, height, width in sizes]
        )
        pieces: list[Tensor] = []
        for picture, (frames, *size), own in zip(
            pixels.split([math.prod(one) for one in sizes]), sizes, small.small, strict=True
        ):
            for tile, (rows, columns) in zip(picture.chunk(frames), own, strict=True):
                new = SIDE * rows, SIDE * columns
                if list(new) != size:
                    resized = shrink(_image(tile, size, patch), new[0] * patch, new[1] * patch)
                    tile = _patches(resized, patch).to(tile.dtype)
                pieces.append(tile)
        grids = [[1, SIDE * rows, SIDE * columns] for own in small.small for rows, columns in own]
        inputs = {**inputs, name: torch.cat(pieces), grid_name: inputs[grid_name].new_tensor(grids)}
        output, parts = run_encoder(self, attachment, modality, inputs)
        tokens = joined(output.pooler_output)
        tiles, index = small.tiles(tokens)
        tiles = self.with_parts(tiles, tokens, parts, inputs[grid_name])
        planes = tuple(joined(layer)[index] for layer in getattr(output, "deepstack_features", None) or ())
        return Features(tiles, tokens[index], planes)

    def with_parts(self, tiles: list[Tiles], tokens: Tensor, parts: dict[str, Tensor], grids: Tensor) -> list[Tiles]:
        """The tiles with what was read of the tower for the tokens that are left, of which `grids` are one tile each.

        Raises:
            OptionError: where the tiles of one picture have several sizes.
        """
        if not parts:
            return tiles
        read = iter(picture_tiles(tokens.detach(), self.ordered(parts, grids), grids.tolist()))
        found = []
        for whole in tiles:
            own = [next(read) for _ in range(len(whole.projected))]
            if len({one.projected.shape for one in own}) > 1:
                raise OptionError("tokens: the frames of this video are left at several sizes, and a method reads them")
            together = {name: torch.cat([one.parts[name] for one in own]) for name in own[0].parts}
            found.append(whole._replace(parts=whole.parts | together, members=own[0].members))
        return found

    def ordered(self, parts: dict[str, Tensor], grids: Tensor) -> dict[str, Tensor]:
        """Parts [rows, ...], each token's four rows together."""
        if not hasattr(self.inner.visual, "window_size"):
            return parts
        back = _window_order(self.inner.visual, grids).argsort()
        return {name: value.unflatten(0, (-1, MERGED))[back].flatten(0, 1) for name, value in parts.items()}

    def positions(self, inputs: dict[str, Any], ids: Tensor, real: Tensor) -> Tensor:
        """Time, row and column of every row, by the model's own function: [R, S, 3]."""
        positions = inputs.get("position_ids")
        if positions is not None and positions.ndim == 3:
            return positions[-3:].expand(3, *ids.shape).permute(1, 2, 0)
        ids, real = ids.cpu(), real.cpu()  # the function below reads number after number
        grids = {name: inputs[name] for name in self.placed_by if inputs.get(name) is not None}
        grids = {name: grid.cpu() if isinstance(grid, Tensor) else grid for name, grid in grids.items()}
        types = inputs.get("mm_token_type_ids")
        types = self.types(inputs, ids) if types is None else types.cpu()
        places, _ = self.inner.get_rope_index(ids, mm_token_type_ids=types, attention_mask=real.long(), **grids)
        return places.permute(1, 2, 0)

    def types(self, inputs: dict[str, Any], ids: Tensor) -> Tensor:
        """Type of every row: token of a picture (1) or of a video (2): [R, S]."""
        return (ids == self.placeholder("image")).int() + 2 * (ids == self.placeholder("video")).int()

    def row_inputs(self, ids: Tensor, real: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The positions: time, row and column of every row."""
        return {"position_ids": self.positions(inputs, ids, real).permute(2, 0, 1).to(ids.device)}

    def placing(self, inputs: dict[str, Any], positions: Tensor, real: Tensor) -> dict[str, Any]:
        """A text axis in front of the three, as `generate` wants it."""
        text = (real.cumsum(1) - 1).clamp_min(0)
        axes = super().placing(inputs, positions, real)["position_ids"]
        return {"position_ids": torch.cat((text[None], axes))}

    def output(self, tokens: Any, planes: list[list[Tensor]], like: Any) -> Any:
        """Encoder output with DeepStack's features if the model has them."""
        output = super().output(tokens, planes, like)
        if not planes:
            return output
        from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

        return BaseModelOutputWithDeepstackFeatures(pooler_output=tokens, deepstack_features=planes)


class Qwen3VL(QwenVL):
    """Adapter for Qwen3-VL, whose tower looks at whole pictures: it can see some of their cells."""

    offer = Offer(PATCHES, inside=CELLS)

    def encode(
        self, attachment: Attachment, modality: str, inputs: dict[str, Any], pictures: list[PictureRows]
    ) -> Features:
        """Encodes as Qwen2.5-VL does; for methods that leave cells out those that stay."""
        if attachment.method.place is not Place.CELLS:
            return super().encode(attachment, modality, inputs, pictures)
        with reading(self, attachment) as parts:
            seen = through_tower(self.inner.visual, attachment, modality, inputs)
        left = seen.output.pooler_output
        tokens = left[seen.stand_in]
        planes = tuple(layer[seen.stand_in] for layer in seen.output.deepstack_features)
        grids = torch.tensor([[1, SIDE, SIDE * (int(slot.max()) + 1)] for slot in seen.slots])
        return Features(self.with_parts(seen.tiles(tokens), left, parts, grids), tokens, planes)


def _image(patches: Tensor, size: list[int], patch: int) -> Tensor:
    """A tile [rows, values] as the processor gives it, each token's four patches together, as [1, channels, h, w]; the
    pictures that a temporal patch takes together are channels.
    """
    height, width = size
    tile = patches.view(height // SIDE, width // SIDE, SIDE, SIDE, -1, patch, patch)
    return tile.permute(4, 0, 2, 5, 1, 3, 6).reshape(1, -1, height * patch, width * patch)


def _patches(image: Tensor, patch: int) -> Tensor:
    """The way back: [1, channels, h, w] -> [rows, values]."""
    _, channels, height, width = image.shape
    tile = image.view(channels, height // SIDE // patch, SIDE, patch, width // SIDE // patch, SIDE, patch)
    return tile.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, channels * patch**2)


def _window_order(visual: Any, grids: Tensor) -> Tensor:
    """The order in which the tower holds the tokens: [all tokens]."""
    from transformers.vision_utils import get_vision_window_index

    order: Tensor = get_vision_window_index(
        grids,
        spatial_merge_size=visual.spatial_merge_size,
        window_size=visual.window_size,
        patch_size=visual.patch_size,
    )[0]
    return order.to(grids.device)
