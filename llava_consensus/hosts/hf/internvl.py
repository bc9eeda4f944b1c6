"""`InternVLForConditionalGeneration`: tiles of 448 pixels, a class token, and a shuffle that makes one token of 2 x 2
patches. The tiles of a picture are one run of placeholders; a frame of a video is a picture of its own.
"""

import inspect
from functools import cached_property
from operator import attrgetter
from typing import Any

from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Offer
from llava_consensus.hosts.hf.model import HfModel, run_whole
from llava_consensus.hosts.hf.rows import Features, PictureRows, unbroken
from llava_consensus.hosts.hf.towers import MERGER, PATCHES, TapTower, cells
from llava_consensus.hosts.old_attachment import Attachment
from llava_consensus.hosts.tower_hooks import TokenGrid, shrunk
from llava_consensus.reduction.method import Place
from llava_consensus.reduction.tokens import Need

MOST_PATCHES = 12  # tiles of a picture, where no processor says another number


class Shuffled(HfModel):
    """Equal tiles, each run of placeholders one or more of them; a projector makes one token of each square of
    patches.
    """

    offer = Offer(PATCHES, inside=MERGER)
    classes = 0  # class tokens in front of the patches
    placed = staticmethod(unbroken)  # how its processor places the tiles of a picture in a prompt
    merge = ""  # entry of the configuration: patches in a row of the square that makes a token

    @property
    def vision(self) -> Any:
        """The vision model."""
        return self.inner.vision_tower

    @property
    def layer(self) -> int | None:
        """Hidden states that feed the projector; None for the states that the vision model returns."""
        return getattr(self.module.config, "vision_feature_layer", None)

    @property
    def stride(self) -> int:
        """Patches in a row of the square that makes a token."""
        return int(attrgetter(self.merge)(self.module.config))

    @property
    def patch(self) -> int:
        """Height and width of a patch in pixels."""
        return _first(self.module.config.vision_config.patch_size)

    @property
    def most_tiles(self) -> int:
        """Number of tiles of the largest grid its processor makes, and the whole view."""
        processor = self.image_processor
        return 1 + int(MOST_PATCHES if processor is None else processor.max_patches)

    @cached_property
    def tower(self) -> TapTower:
        """The vision side."""
        side = _first(self.module.config.vision_config.image_size) // self.patch
        members = cells(side, side, self.stride)
        layer = -1 if self.layer is None else self.layer
        return TapTower(self.vision, len(members), members, classes=self.classes, layer=layer)

    def tiles(self, inputs: dict[str, Any]) -> Tensor:
        """Pixels of all tiles: [T, 3, h, w]."""
        return inputs["pixel_values"]

    def pictures(self, modality: str, inputs: dict[str, Any], ids: Tensor) -> list[PictureRows]:
        """The rows of every picture. OptionError where there are pixels of another number of tiles."""
        pictures = self.placed(ids, self.placeholder(modality), self.tower.tokens)
        count, placed = len(self.tiles(inputs)), sum(rows.tiles for rows in pictures)
        if count != placed:
            raise OptionError(
                f"{count} tiles of pixels, and the prompts have placeholders for {placed}: pass input_ids and pixels "
                "of one call of the model's own processor"
            )
        return pictures

    def patches(self, pixels: Tensor) -> Tensor:
        """Tiles of any size through the vision model: [T, 3, h, w] -> [T, n, D_v], without a class token."""
        more = {} if self.layer is None else {"output_hidden_states": True}
        if "interpolate_pos_encoding" in inspect.signature(type(self.vision).forward).parameters:  # else it always does
            more["interpolate_pos_encoding"] = True
        output = self.vision(pixels.to(self.inner.dtype), **more)
        states: Tensor = output.last_hidden_state if self.layer is None else output.hidden_states[self.layer]
        return states[:, self.classes :]

    def joined(self, squares: Tensor) -> Tensor:
        """Tokens of the patches that each is made of, row by row, by the model's own projector, which takes each square
        for a whole tile: [n, m, D_v] -> [n, D] in any number of dimensions.
        """
        raise NotImplementedError

    def read(self, pixels: Tensor) -> Tensor:
        """Tiles of any size through tower and projector: [T, 3, h, w] -> [T, N, D]."""
        height, width = (size // self.patch for size in pixels.shape[-2:])
        squares = self.patches(pixels)[:, cells(height, width, self.stride)]  # [T, N, m, D_v]
        return self.joined(squares.flatten(0, 1)).reshape(*squares.shape[:2], -1)

    def encode(
        self, attachment: Attachment, modality: str, inputs: dict[str, Any], pictures: list[PictureRows]
    ) -> Features:
        """The model's own encoder."""
        if attachment.method.place is Place.PICTURE:
            tower, pixels = self.tower, self.tiles(inputs)
            small = shrunk(attachment, [TokenGrid(rows.tiles, tower.side, tower.side) for rows in pictures])
            tokens = small.read(pixels, self.patch * self.stride, self.read)
            tiles, index = small.tiles(tokens)
            return Features(tiles, tokens[index])
        return run_whole(self, attachment, modality, inputs, self.tiles(inputs), pictures)


def _first(size: int | list[int]) -> int:
    """Height in pixels of what a configuration may give height and width of."""
    return size if isinstance(size, int) else size[0]


class InternVL(Shuffled):
    """InternViT with a class token."""

    offer = Offer(PATCHES | {Need.CLASS_FEATURE}, inside=MERGER)
    around = (1, 1)
    tensors = frozenset({"image"})
    classes = 1

    @property
    def layer(self) -> int | None:
        """Hidden states that feed the projector."""
        layer: int = self.module.config.vision_feature_layer
        return None if layer == -1 else layer

    @property
    def stride(self) -> int:
        """Patches in a row of the square that makes a token."""
        return round(1 / self.module.config.downsample_ratio)

    def joined(self, squares: Tensor) -> Tensor:
        """Shuffle and projector."""
        inner, square = self.inner, squares.unflatten(1, (self.stride, self.stride))
        square = inner.pixel_shuffle(square, self.module.config.downsample_ratio)
        return inner.multi_modal_projector(square)
