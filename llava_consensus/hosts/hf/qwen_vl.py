"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL, dense and of experts: pictures of any size, no class token, a merger that makes
one token of four patches that stand one after the other, and positions of three axes, which are kept.

Each temporal patch of a video is a tile: attention never crosses it. Qwen2.5-VL computes most blocks in windows and
keeps its rows in window order, which is undone here; Qwen3-VL adds features of earlier blocks between the first decoder
layers (DeepStack), which are reduced with the same rows.
"""

import math
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.base import Offer, Tap, Tiles
from llava_consensus.hosts.derived.decoder import TapDecoder
from llava_consensus.hosts.hf.cells import ADAPTED, through_tower
from llava_consensus.hosts.hf.model import HfModel, joined, run_encoder
from llava_consensus.hosts.hf.rows import Features, PictureRows, whole_tiles
from llava_consensus.hosts.hf.towers import MERGER, PATCHES
from llava_consensus.hosts.tower_hooks import TokenGrid, shrink, shrunk
from llava_consensus.hosts.towers import FRONTS, fingerprint
from llava_consensus.reduction.method import Method, Place
from llava_consensus.reduction.saliency import rotate
from llava_consensus.reduction.tokens import Need

MERGED = 4  # patches of a token, in a row
CELLS = MappingProxyType({**MERGER, **ADAPTED})
SIDE = 2  # patches in a row of the square that makes a token


class QwenTower:
    """The blocks of the tower; where the patches of a picture stand is known picture by picture."""

    classes, side, offers, merged, varies = 0, 0, PATCHES, MERGED, True
    members: Tensor | None = None
    inside: Mapping[Place, str] = MERGER

    def __init__(self, visual: Any, most: int) -> None:
        self.visual, self.blocks, self.tokens = visual, list(visual.blocks), most
        self.full: tuple[int, ...] = tuple(getattr(visual, "fullatt_block_indexes", range(len(self.blocks))))
        self.feature_block = len(self.blocks) - 1
        self.reorders = hasattr(visual, "window_size")  # rows are in the order of the windows inside

    def encode(self, pixels: Tensor) -> Tensor:
        """Never asked for: the model's own encoder runs, and hooks collect."""
        raise NotImplementedError

    def project(self, features: Tensor) -> Tensor:
        """Not offered: the merger takes four patches at a time."""
        raise NotImplementedError

    def scale(self, block: int) -> float:
        """Scale of the attention logits of a block."""
        scale: float = self.blocks[block].attn.scaling
        return scale

    def taps(self, needs: frozenset[Need], features: int, attention: int) -> list[Tap]:
        """The projection of one block, the rotation, and the output of another block: rows as the tower has them.

        Raises:
            OptionError: for the attention of a block that looks at windows.
        """
        taps = []
        if Need.ATTENTION in needs:
            if attention not in self.full:
                raise OptionError(
                    f"vision_layer={attention}: this block attends within windows, so its patches cannot be compared. "
                    f"Take one of {', '.join(map(str, self.full))}"
                )
            taps.append(Tap(self.blocks[attention].attn.qkv, lambda output: {"qkv": output}))
            taps.append(Tap(self.visual.rotary_pos_emb, lambda output: dict(zip(("cos", "sin"), output, strict=True))))
        if Need.FEATURES in needs:
            taps.append(Tap(self.blocks[features], lambda output: {"features": output}))
        return taps


class QwenVL(HfModel):
    """Adapter for the models of this file."""

    offer = Offer(PATCHES, inside=QwenTower.inside)
    keeps_positions = True
    around, typed, reads_inside = (1, 1), True, True
    placed_by = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")

    @cached_property
    def tower(self) -> QwenTower:
        """The vision side."""
        return QwenTower(self.inner.visual, self.decoder.reach)

    @cached_property
    def decoder(self) -> TapDecoder:
        """The language side."""
        return TapDecoder(self.inner.language_model, axes=3)

    def check(self, method: Method) -> None:
        """Raises OptionError for new positions that somebody asks for. A default of a method means one axis."""
        super().check(method)
        side = getattr(self.inner.visual, "spatial_merge_size", SIDE) if hasattr(self.module, "model") else SIDE
        if side != SIDE:
            raise OptionError(
                f"vision_config.spatial_merge_size={side}: methods are adapted to tokens of {SIDE} x {SIDE} patches"
            )
        if "positions" in method.asked and method.positions == "renumber":
            raise OptionError(
                f"positions=renumber: {type(self.module).__name__} has positions of three axes (time, row, column), "
                "which are kept. Leave it out, or take positions=keep"
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
        if attachment.method.place is Place.CELLS:
            return self.fewer(attachment, modality, inputs)
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

    def fewer(self, attachment: Attachment, modality: str, inputs: dict[str, Any]) -> Features:
        """Refused: only the tower of Qwen3-VL takes some of a picture's patches."""
        raise NotImplementedError

    def ordered(self, parts: dict[str, Tensor], grids: Tensor) -> dict[str, Tensor]:
        """Queries and keys [rows, H, d], rotated, and features [rows, D_v], each token's four rows together."""
        ordered = dict(parts)
        angles = [
            [ordered.pop(front + name, None) for name in ("cos", "sin")] for front in FRONTS
        ]  # before the windows
        if hasattr(self.inner.visual, "window_size"):
            back = _window_order(self.inner.visual, grids).argsort()
            ordered = {name: value.unflatten(0, (-1, MERGED))[back].flatten(0, 1) for name, value in ordered.items()}
        for front, (cos, sin) in zip(FRONTS, angles, strict=True):
            if cos is not None and sin is not None:
                heads = self.inner.visual.config.num_heads
                states = ordered.pop(front + "qkv").unflatten(-1, (3, heads, -1)).permute(1, 2, 0, 3)  # [3, H, rows, d]
                turned = rotate(states[:2].float(), cos.float()[None], sin.float()[None]).to(states.dtype)
                ordered[front + "query"], ordered[front + "key"] = turned.transpose(1, 2)
        return ordered

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
        coordinates: Tensor = places.permute(1, 2, 0)
        return coordinates

    def types(self, inputs: dict[str, Any], ids: Tensor) -> Tensor:
        """Type of every row: token of a picture (1) or of a video (2): [R, S]."""
        return (ids == self.placeholder("image")).int() + 2 * (ids == self.placeholder("video")).int()

    def row_inputs(self, ids: Tensor, real: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The positions: time, row and column of every row."""
        return {"position_ids": self.positions(inputs, ids, real).permute(2, 0, 1).to(ids.device)}

    def placing(self, inputs: dict[str, Any], positions: Tensor, real: Tensor) -> dict[str, Any]:
        """A text axis in front of the three, as `generate` wants it, and the step from rows to positions, for decoding
        loops that give no positions.
        """
        text = (real.cumsum(1) - 1).clamp_min(0)
        following = positions.masked_fill(~real[..., None], 0).amax((1, 2)) + 1
        self.inner.rope_deltas = following[:, None] - real.sum(1, keepdim=True)
        return {"position_ids": torch.cat((text[None], positions.permute(2, 0, 1)))}

    def output(self, tokens: Any, planes: list[list[Tensor]], like: Any) -> Any:
        """Encoder output with DeepStack's features if the model has them."""
        output = super().output(tokens, planes, like)
        if not planes:
            return output
        from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

        return BaseModelOutputWithDeepstackFeatures(pooler_output=tokens, deepstack_features=planes)


class Qwen3Tower(QwenTower):
    """The tower of Qwen3-VL, which looks at whole pictures."""

    inside = CELLS


class Qwen3VL(QwenVL):
    """Adapter for Qwen3-VL, whose tower looks at whole pictures: it can see some of their cells."""

    offer = Offer(PATCHES, inside=CELLS)

    @cached_property
    def tower(self) -> QwenTower:
        """The vision side."""
        return Qwen3Tower(self.inner.visual, self.decoder.reach)

    def fewer(self, attachment: Attachment, modality: str, inputs: dict[str, Any]) -> Features:
        """The cells that the method leaves, through the model's own tower, each at its own place in its picture."""
        with attachment.collecting() as parts:
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


def picture_tiles(tokens: Tensor, parts: dict[str, Tensor], grids: list[list[int]]) -> list[Tiles]:
    """The tiles of every picture, with the width of its grid and the rows of each token."""
    rows = [frames * height * width for frames, height, width in grids]
    split = {name: value.split(rows) for name, value in parts.items()}
    tiles = []
    for index, picture_tokens in enumerate(tokens.split([count // MERGED for count in rows])):
        frames, _, width = grids[index]
        size = rows[index] // frames
        picture_parts = {name: values[index].unflatten(0, (frames, size)) for name, values in split.items()}
        for name in [name for name in picture_parts if name.endswith(("query", "key"))]:
            picture_parts[name] = picture_parts[name].transpose(1, 2)
        if "pixels" in picture_parts:
            picture_parts["fingerprint"] = fingerprint(picture_parts.pop("pixels"))
        members = torch.arange(size).view(-1, MERGED)
        tiles.append(Tiles(picture_tokens.unflatten(0, (frames, -1)), picture_parts, width // 2, members))
    return tiles
