"""LLaVA-NeXT, LLaVA-NeXT-Video and LLaVA-OneVision: pictures of several tiles, packed into one row after another with a
newline after each, and videos whose frames are pooled. Newlines are structural.

Where a token comes from is asked of the model's own packing, given coordinates in place of features. OneVision resizes
the feature map of large pictures; a token then counts as the patch in its middle.
"""

import copy
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Offer, Tiles
from llava_consensus.hosts.hf.llava import Llava
from llava_consensus.hosts.hf.rows import Features, PictureRows, whole_tiles
from llava_consensus.hosts.hf.towers import PATCHES, LlavaTower, cells
from llava_consensus.hosts.next_grid import STOCK, check_tiles, fixed_grid
from llava_consensus.hosts.old_attachment import Attachment
from llava_consensus.reduction.tokens import Need

NEWLINE = -9.0  # as a coordinate


class LlavaNext(Llava):
    """A base view and a grid of tiles, unpadded."""

    @property
    def lays_out(self) -> bool:
        """True if the grid is fixed."""
        return self.options.get("layout", STOCK) != STOCK

    @property
    def preprocessing(self) -> dict[str, Any]:
        """The grids the image processor may choose from."""
        return {"image_grid_pinpoints": self.pinpoints} if self.lays_out else {}

    @property
    def pinpoints(self) -> list[list[int]]:
        """Height and width in pixels of the grids a picture may be cut to."""
        config = self.module.config
        grids: list[list[int]] = config.image_grid_pinpoints
        return fixed_grid(config.vision_config.image_size) if self.lays_out else grids

    @property
    def most_tiles(self) -> int:
        """One for the base view, and those of the largest grid there is."""
        size = self.module.config.vision_config.image_size
        return 1 + max((height // size) * (width // size) for height, width in self.pinpoints)

    def counts(self, inputs: dict[str, Any]) -> list[int]:
        """Tiles of each picture."""
        size, family_module = self.module.config.vision_config.image_size, import_module(type(self.inner).__module__)
        return [
            family_module.image_size_to_num_patches(image_size, self.pinpoints, size)
            for image_size in inputs["image_sizes"].cpu()
        ]

    def packing(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """More arguments of the model's packing."""
        return {"vision_feature_select_strategy": self.module.config.vision_feature_select_strategy}

    def pictures(self, modality: str, inputs: dict[str, Any], ids: Tensor) -> list[PictureRows]:
        """The rows of every picture, in the order in which the model packs its tiles."""
        sizes, newline = inputs["image_sizes"].cpu(), torch.full((3,), NEWLINE)
        pictures = []
        for index, count in enumerate(self.counts({**inputs, "image_sizes": sizes})):
            size, columns = sizes[index : index + 1], self._columns(sizes[index])
            packed = self._packed([self._coordinates(count, columns)], size, newline, inputs)
            pictures.append(self._rows(packed[0], count, columns))
        return pictures

    def grid_columns(self, size: tuple[int, int]) -> int:
        """Tiles in a row of the grid after the base view of a picture of this width and height."""
        return self._columns(torch.tensor(size[::-1]))

    def _columns(self, size: Tensor) -> int:
        """Tiles in a row of the grid of a picture of this size."""
        tile, family_module = self.module.config.vision_config.image_size, import_module(type(self.inner).__module__)
        return int(family_module.get_anyres_image_grid_shape(size, self.pinpoints, tile)[1])

    def _coordinates(self, tiles: int, columns: int) -> Tensor:
        """Row and column of every patch in its view, and which view: 0 the base, 1 the grid. [tiles, N, 3]."""
        side = self.tower.side
        place = torch.arange(side**2)
        tile = torch.arange(tiles)[:, None]
        row = place // side + (tile - 1).clamp_min(0) // columns * side
        column = place % side + (tile - 1).clamp_min(0) % columns * side
        return torch.stack((row, column, (tile > 0).expand_as(row)), -1).float()

    def _rows(self, packed: Tensor, tiles: int, columns: int) -> PictureRows:
        """The rows of a picture, from packed coordinates [n, 3]."""
        side = self.tower.side
        row, column, view = packed.round().long().unbind(-1)
        tile = torch.where(view > 0, 1 + row // side * columns + column // side, 0)
        token = torch.where(view < 0, -1, row % side * side + column % side)
        return PictureRows(tile, token, tiles)

    def pixels(self, modality: str, inputs: dict[str, Any], pictures: list[PictureRows]) -> Tensor:
        """Tiles without the padding after those of smaller pictures."""
        if modality == "video":
            return inputs["pixel_values_videos"].flatten(0, 1)
        pixels: Tensor = inputs["pixel_values"]
        if self.lays_out:
            check_tiles(len(picture_tiles) for picture_tiles in pixels)
        if pixels.ndim == 4:
            return pixels
        return torch.cat([picture_tiles[: rows.tiles] for picture_tiles, rows in zip(pixels, pictures, strict=True)])

    def pack(self, modality: str, inputs: dict[str, Any], projected: list[Tensor]) -> list[Tensor]:
        """Tiles [t, N, D] of each picture, packed by the model itself: [n, D] each."""
        return self._packed(projected, inputs["image_sizes"].cpu(), self.inner.image_newline, inputs)

    def _packed(
        self, views: list[Tensor], sizes: Tensor, newline: Tensor | None, inputs: dict[str, Any]
    ) -> list[Tensor]:
        """Tiles [t, N, C] of pictures of these sizes [n, 2], packed by the model itself; for a fixed grid as if each
        picture filled it, which leaves nothing to cut away, and without a newline.
        """
        packer = self.inner
        if self.lays_out:
            config = copy.copy(self.module.config)
            config.image_grid_pinpoints = self.pinpoints
            packer = SimpleNamespace(config=config)
            sizes, newline = torch.tensor(self.pinpoints).expand(len(sizes), 2), None
        pack = type(self.inner).pack_image_features
        return pack(packer, views, sizes, image_newline=newline, **self.packing(inputs))[0]


class _WithVideos(LlavaNext):
    """Videos of pooled frames, each frame a tile."""

    newlines = 0  # structural rows after a video

    def pooled(self) -> tuple[int, Tensor]:
        """Tokens in a row of a frame, and the patches each token is made of [N, m]."""
        raise NotImplementedError

    def pictures(self, modality: str, inputs: dict[str, Any], ids: Tensor) -> list[PictureRows]:
        """The rows of a video are those of its frames, one frame after the other."""
        if modality != "video":
            return super().pictures(modality, inputs, ids)
        tokens, newline_rows = len(self.pooled()[1]), torch.full((self.newlines,), -1)
        pictures = []
        for frames in inputs["pixel_values_videos"]:
            rows = whole_tiles(len(frames), tokens)
            tile, token = torch.cat((rows.tile, newline_rows)), torch.cat((rows.token, newline_rows))
            pictures.append(PictureRows(tile, token, len(frames)))
        return pictures

    def encode(
        self, attachment: Attachment, modality: str, inputs: dict[str, Any], pictures: list[PictureRows]
    ) -> Features:
        """Frames have a grid and members of their own."""
        if modality != "video":
            return super().encode(attachment, modality, inputs, pictures)
        if attachment.method.acts_inside:
            raise OptionError(
                f"{type(attachment.method).__name__} acts inside the vision tower, and this model pools the patches of "
                "a video after it: take a method that acts after the tower"
            )
        features = super().encode(attachment, modality, inputs, pictures)
        return features._replace(tiles=self.frames(features.tiles))

    def frames(self, tiles: list[Tiles]) -> list[Tiles]:
        """The tiles of videos with the grid of a pooled frame."""
        side, members = self.pooled()
        return [video._replace(side=side, members=members) for video in tiles]


class LlavaNextVideo(_WithVideos):
    """Frames pooled before the projector, no newline."""

    def pooled(self) -> tuple[int, Tensor]:
        """Squares of `spatial_pool_stride` patches."""
        side, stride = self.tower.side, self.module.config.spatial_pool_stride
        return side // stride, cells(side, side, stride)


class LlavaOnevision(_WithVideos):
    """A SigLIP tower; frames are resized to half after the projector, and one newline ends a video."""

    offer = Offer(PATCHES | {Need.PROJECTOR}, LlavaTower.inside, blocks=26, feature_block=25)
    tensors = frozenset({"video"})
    tiled_alone = True
    newlines = 1

    def counts(self, inputs: dict[str, Any]) -> list[int]:
        """Pictures are tiled only where a prompt has a single one."""
        picture_counts = inputs.get("batch_num_images")
        counts = super().counts(inputs)
        if picture_counts is None:
            return counts
        tiled = [int(count) == 1 for count in picture_counts for _ in range(int(count))]
        return [count if is_tiled else 1 for count, is_tiled in zip(counts, tiled, strict=True)]

    def packing(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Kwargs of packing: pictures of more tiles than the ratio names are resized."""
        return {"vision_aspect_ratio": inputs.get("vision_aspect_ratio") or self.module.config.vision_aspect_ratio}

    def pack(self, modality: str, inputs: dict[str, Any], projected: list[Tensor]) -> list[Tensor]:
        """Packs tiles as the model does. But where it resizes the map of a large picture, which would mix the tokens
        that a method has left, each place gets the token of the patch in its middle.
        """
        inputs = {**inputs, "image_sizes": inputs["image_sizes"].cpu()}
        packed = super().pack(modality, inputs, projected)
        pictures = self.pictures(modality, inputs, torch.empty(0))
        for rows, tiles, out in zip(pictures, projected, packed, strict=True):
            real = (rows.token >= 0).nonzero()[:, 0]
            place, tile, token = (part.to(out.device) for part in (real, rows.tile[real], rows.token[real]))
            out[place] = tiles[tile, token]
        return packed

    def pooled(self) -> tuple[int, Tensor]:
        """The four patches that bilinear resizing looks at."""
        side = self.tower.side
        width = (side + 1) // 2
        middle = ((torch.arange(width) + 0.5) * side / width - 0.5).clamp_min(0)
        first = middle.long()
        pair = torch.stack((first, (first + 1).clamp_max(side - 1)), -1)  # [width, 2]
        members = pair[:, None, :, None] * side + pair[None, :, None, :]
        return width, members.reshape(width**2, 4)
