"""`InternVLForConditionalGeneration`: tiles of 448 pixels, a class token, and a shuffle that makes one token of 2 x 2
patches. The tiles of a picture are one run of placeholders; a frame of a video is a picture of its own.
"""

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.base import Offer
from llava_consensus.hosts.hf.model import HfModel, joined, run_encoder, tiles_of
from llava_consensus.hosts.hf.rows import Features, PictureRows, runs, whole_tiles
from llava_consensus.hosts.hf.towers import PATCHES, ShuffledTower, cells
from llava_consensus.hosts.tower_hooks import TokenGrid, shrunk
from llava_consensus.hosts.towers import fingerprint, hidden_state_block
from llava_consensus.reduction.method import Place
from llava_consensus.reduction.tokens import Need

MOST_PATCHES = 12  # tiles of a picture, where no processor says another number


class Shuffled(HfModel):
    """Equal tiles, each run of placeholders one or more of them."""

    def tiles(self, inputs: dict[str, Any]) -> Tensor:
        """Pixels of all tiles: [T, 3, h, w]."""
        pixels: Tensor = inputs["pixel_values"]
        return pixels

    def pictures(self, modality: str, inputs: dict[str, Any], ids: Tensor) -> list[PictureRows]:
        """Every unbroken run of placeholders is one picture."""
        size, pictures = self.tower.tokens, []
        for row, start, length in runs(ids, self.placeholder(modality)):
            if length % size:
                raise OptionError(
                    f"prompt {row} has {length} placeholders from row {start} on, and a tile is {size} tokens: pass "
                    "input_ids and pixels of one call of the model's own processor, and truncate nothing"
                )
            pictures.append(whole_tiles(length // size, size))
        return self.matching(inputs, pictures)

    def matching(self, inputs: dict[str, Any], pictures: list[PictureRows]) -> list[PictureRows]:
        """The pictures, which must have as many tiles as there are pixels of."""
        count, placed = len(self.tiles(inputs)), sum(rows.tiles for rows in pictures)
        if count != placed:
            raise OptionError(
                f"{count} tiles of pixels, and the prompts have placeholders for {placed}: pass input_ids and pixels "
                "of one call of the model's own processor"
            )
        return pictures

    def patches(self, pixels: Tensor) -> Tensor:
        """Tiles of any size through the tower: [T, 3, h, w] -> [T, n, D_v], without a class token."""
        raise NotImplementedError

    def joined(self, squares: Tensor) -> Tensor:
        """Tokens of the patches that each is made of, row by row, by the model's own projector, which takes each square
        for a whole tile: [n, m, D_v] -> [n, D] in any number of dimensions.
        """
        raise NotImplementedError

    def read(self, pixels: Tensor) -> Tensor:
        """Tiles of any size through tower and projector: [T, 3, h, w] -> [T, N, D]."""
        patch, members = patch_size(self.module.config.vision_config), self.tower.members
        height, width = (size // patch for size in pixels.shape[-2:])
        squares = self.patches(pixels)[:, cells(height, width, math.isqrt(members.shape[1]))]  # [T, N, m, D_v]
        return self.joined(squares.flatten(0, 1)).reshape(*squares.shape[:2], -1)

    def encode(
        self, attachment: Attachment, modality: str, inputs: dict[str, Any], pictures: list[PictureRows]
    ) -> Features:
        """The model's own encoder."""
        if attachment.method.place is Place.PICTURE:
            tower, pixels = self.tower, self.tiles(inputs)
            small = shrunk(attachment, [TokenGrid(rows.tiles, tower.side, tower.side) for rows in pictures])
            size = patch_size(self.module.config.vision_config) * math.isqrt(tower.members.shape[1])
            tokens = small.read(pixels, size, self.read)
            tiles, index = small.tiles(tokens)
            return Features(tiles, tokens[index])
        output, parts = run_encoder(self, attachment, modality, inputs)
        if Need.FINGERPRINT in attachment.needs:
            parts["fingerprint"] = fingerprint(self.tiles(inputs))
        tokens = joined(output.pooler_output)
        return Features(tiles_of(tokens, parts, pictures), tokens)


def patch_size(vision: Any) -> int:
    """Height and width of a patch in pixels."""
    size: int | list[int] = vision.patch_size
    return size if isinstance(size, int) else size[0]


class InternVL(Shuffled):
    """InternViT with a class token."""

    offer = Offer(PATCHES | {Need.CLASS_FEATURE}, inside=ShuffledTower.inside)
    around = (1, 1)
    tensors = frozenset({"image"})

    @property
    def most_tiles(self) -> int:
        """Number of tiles of the largest grid its processor makes, and the whole view."""
        processor = self.image_processor
        return 1 + int(MOST_PATCHES if processor is None else processor.max_patches)

    @cached_property
    def tower(self) -> ShuffledTower:
        """The blocks, and the patches that the model's own shuffle puts together."""
        inner, config = self.inner, self.module.config
        vision = config.vision_config
        height, width = (size // patch for size, patch in zip(vision.image_size, vision.patch_size, strict=True))
        place = torch.arange(height * width).view(1, height, width, 1)
        grouped = inner.pixel_shuffle(place, scale_factor=config.downsample_ratio)
        blocks, layer = list(inner.vision_tower.encoder.layer), config.vision_feature_layer
        tower = ShuffledTower(blocks, grouped.flatten(0, 2), 1, "attention", ("q_norm", "k_norm"))
        tower.feature_block = hidden_state_block(layer, len(blocks))
        return tower

    def patches(self, pixels: Tensor) -> Tensor:
        """The tower interpolates its positions by itself."""
        layer = self.module.config.vision_feature_layer
        more = {} if layer == -1 else {"output_hidden_states": True}
        output = self.inner.vision_tower(pixel_values=pixels.to(self.inner.dtype), **more)
        states: Tensor = output.last_hidden_state if layer == -1 else output.hidden_states[layer]
        return states[:, 1:]

    def joined(self, squares: Tensor) -> Tensor:
        """Shuffle and projector."""
        side, inner = math.isqrt(squares.shape[1]), self.inner
        square = inner.pixel_shuffle(squares.unflatten(1, (side, side)), self.module.config.downsample_ratio)
        tokens: Tensor = inner.multi_modal_projector(square)
        return tokens
