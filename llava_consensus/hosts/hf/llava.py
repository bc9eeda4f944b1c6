"""`LlavaForConditionalGeneration`: LLaVA 1.5, one square picture to 24 x 24 tokens, no structural tokens."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from llava_consensus.hosts.base import Offer
from llava_consensus.hosts.hf.model import HfModel, run_whole
from llava_consensus.hosts.hf.rows import Features, PictureRows, whole_tiles
from llava_consensus.hosts.hf.towers import LlavaTower
from llava_consensus.hosts.old_attachment import Attachment


class Llava(HfModel):
    """One tile for each picture; the other LLaVA-type families build on it."""

    offer = Offer(LlavaTower.offers, inside=LlavaTower.inside)
    reads_inside = True  # whether it shows the next method of a composition what the tower made of a smaller picture

    @cached_property
    def tower(self) -> LlavaTower:
        """The vision side, a CLIP or a SigLIP tower."""
        return LlavaTower(self.inner, self.inner.vision_tower)

    def pictures(self, modality: str, inputs: dict[str, Any], ids: Tensor) -> list[PictureRows]:
        """Every picture is one tile."""
        return [whole_tiles(1, self.tower.tokens) for _ in inputs["pixel_values"]]

    def pixels(self, modality: str, inputs: dict[str, Any], pictures: list[PictureRows]) -> Tensor:
        """Tiles of all pictures, in order: [T, 3, h, w]."""
        return inputs["pixel_values"]

    def pack(self, modality: str, inputs: dict[str, Any], projected: list[Tensor]) -> list[Tensor]:
        """Tiles [t, N, D] of each picture as the model lays them out: [n, D] each."""
        return [tiles.flatten(0, 1) for tiles in projected]

    def encode(
        self, attachment: Attachment, modality: str, inputs: dict[str, Any], pictures: list[PictureRows]
    ) -> Features:
        """The model's own encoder, or tower and projector alone where a method acts inside of them."""
        counts = [rows.tiles for rows in pictures]
        pixels = self.pixels(modality, inputs, pictures)
        if attachment.method.acts_inside or self.lays_out:
            tiles = attachment.encode(pixels, counts)
            return Features(tiles, torch.cat(self.pack(modality, inputs, [picture.projected for picture in tiles])))
        return run_whole(self, attachment, modality, inputs, pixels, pictures)
