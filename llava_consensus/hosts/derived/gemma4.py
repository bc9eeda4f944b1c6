"""Gemma 4: derived as any family without a file, and `resize` as its own lever, a lower `max_soft_tokens`."""

from typing import Any

import torch
from torch import Tensor

from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.base import Offer
from llava_consensus.hosts.derived.model import DerivedModel
from llava_consensus.hosts.derived.record import Fields
from llava_consensus.hosts.derived.rows import Mapped
from llava_consensus.hosts.hf.rows import Features, PictureRows
from llava_consensus.hosts.hf.towers import MERGER, PATCHES
from llava_consensus.hosts.tower_hooks import TokenGrid, shrink, shrunk
from llava_consensus.reduction.method import Place


class Gemma4(DerivedModel):
    """Adapter for Gemma 4."""

    offer = Offer(PATCHES, inside=MERGER)

    def pictures(self, modality: str, inputs: dict[str, Any], ids: Tensor) -> list[PictureRows]:
        """The rows of every picture, with the width of its grid, which the places of its patches tell."""
        found = super().pictures(modality, inputs, ids)
        stride = self.module.config.vision_config.pooling_kernel_size
        for rows, places in zip(found, inputs["image_position_ids"], strict=True):
            assert isinstance(rows, Mapped)
            rows.side = (int(places[:, 0].max()) + 1) // stride
        return found

    def encode(
        self, attachment: Attachment, modality: str, inputs: dict[str, Any], pictures: list[PictureRows]
    ) -> Features:
        """Encodes as every derived family does; for `resize` smaller pictures, padded to the room of the full ones."""
        if attachment.method.place is not Place.PICTURE:
            return super().encode(attachment, modality, inputs, pictures)
        vision = self.module.config.vision_config
        side, patch, pixels = vision.pooling_kernel_size, vision.patch_size, inputs["pixel_values"]
        room, places = torch.zeros_like(pixels), torch.full_like(inputs["image_position_ids"], -1)
        sizes = (inputs["image_position_ids"].amax(1) + 1).tolist()  # columns and rows of patches
        small = shrunk(attachment, [TokenGrid(1, rows // side, columns // side) for columns, rows in sizes])
        for number, ((columns, rows), (less,)) in enumerate(zip(sizes, small.small, strict=True)):
            new_rows, new_columns = side * less[0], side * less[1]
            image = pixels[number, : rows * columns].view(rows, columns, patch, patch, -1)
            image = image.permute(4, 0, 2, 1, 3).reshape(1, -1, rows * patch, columns * patch)
            if (new_rows, new_columns) != (rows, columns):  # a processor resizes colours, which end at 0 and 1
                image = shrink(image, new_rows * patch, new_columns * patch).clamp(0, 1)
            image = image.view(-1, new_rows, patch, new_columns, patch).permute(1, 3, 2, 4, 0)
            room[number, : new_rows * new_columns] = image.reshape(new_rows * new_columns, -1).to(pixels.dtype)
            row, column = torch.meshgrid(torch.arange(new_rows), torch.arange(new_columns), indexing="ij")
            places[number, : new_rows * new_columns] = torch.stack((column.flatten(), row.flatten()), -1).to(places)
        output = self.inner.get_image_features(pixel_values=room, image_position_ids=places, return_dict=True)
        fields = Fields(output, sum(rows * columns for own in small.small for rows, columns in own))
        tiles, index = small.tiles(fields.flat()[0])
        fields = fields.taken(index, [len(one.token) for one in pictures])
        tokens, *planes = fields.flat()
        return Features(tiles, tokens, tuple(planes), fields)
