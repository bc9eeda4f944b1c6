"""`Mistral3ForConditionalGeneration` (Mistral Small 3.1 and later, Ministral 3), and Pixtral, which is a LLaVA in
transformers: a tower that reads pictures of any size one after the other in one row, and in Mistral 3 a merger that
makes one token of a square of patches. The processor puts a break after each row of tokens; breaks and the end are
words of the prompt here, which stay.
"""

import copy
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Offer, Tap
from llava_consensus.hosts.hf.model import HfModel, joined, picture_tiles, run_encoder
from llava_consensus.hosts.hf.rows import Features, PictureRows, whole_tiles
from llava_consensus.hosts.hf.towers import MERGER, PATCHES, TapTower
from llava_consensus.hosts.old_attachment import Attachment
from llava_consensus.hosts.tower_hooks import TokenGrid, shrink, shrunk
from llava_consensus.hosts.towers import BlockParts, ClipBlocks, fingerprint, split_heads
from llava_consensus.reduction.merging import group_means
from llava_consensus.reduction.method import Place
from llava_consensus.reduction.tokens import Need


class PixtralTower(TapTower):
    """A tower whose blocks can merge patches, picture by picture.

    Args:
        inner: the model without its head.
        merged: patches of a token.
        most: the most tokens a picture can have.
        layer: of the hidden states that feed the projector.
        inside: where methods can act before the projector.
    """

    embeddings = None  # the host makes pictures smaller

    def __init__(self, inner: Any, merged: int, most: int, layer: int, inside: Mapping[Place, str]) -> None:
        super().__init__(inner.vision_tower, most, merged=merged, layer=layer, inside=inside)
        self.module, self.layer, self._project = inner.vision_tower, layer, inner.multi_modal_projector
        self.kernel: str = getattr(self.module.config, "_attn_implementation", "eager")

    def of_picture(self, rows: int, columns: int) -> "PixtralTower":
        """A copy of this tower for pictures of `rows` x `columns` patches."""
        tower = copy.copy(self)
        tower.tokens, tower.side = rows * columns, columns
        return tower

    def encode(self, pixels: Tensor) -> Tensor:
        """A picture [1, 3, h, w] through tower and projector, where each patch is a token: [1, N, D]."""
        states = self.module(pixels, output_hidden_states=True, return_dict=True).hidden_states[self.layer]
        return self._project(states)

    def parts(self, block: int) -> BlockParts:
        """The parts of a block."""
        one = self.blocks[block]
        return BlockParts(one.attention_norm, one.attention, one.ffn_norm, one.feed_forward)

    def key_tap(self, block: int) -> Tap:
        """Tap of the keys [1, H, t, d] of a block, before rotation."""
        attention = self.blocks[block].attention
        return Tap(attention.k_proj, lambda output: {"key": split_heads(output, attention.num_heads)})

    def angles(self, hidden: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, t, d] of the tokens [1, t, D_v] of a picture, given which of them each patch is in
        [1, N]: by the tower's own frequencies, at the mean row and column of a token's patches.
        """
        patch = torch.arange(self.tokens, device=hidden.device)
        grid = torch.stack((patch // self.side, patch % self.side), -1)[None].float()
        with torch.autocast(hidden.device.type, enabled=False):  # positions in half precision would be others
            means = group_means(grid, place, hidden.shape[1])[0]
        cos, sin = self.module.patch_positional_embedding(hidden, means)
        return cos[None], sin[None]

    def result(self, states: Tensor) -> Tensor:
        """States as a block returns them."""
        return states


class Mistral3(HfModel):
    """Adapter for Mistral 3. Every picture is one tile."""

    offer = Offer(PATCHES, inside=MERGER)
    around = (0, 1)  # the end; breaks stand within

    @cached_property
    def tower(self) -> PixtralTower:
        """The vision side. OptionError for a tower of another kind, or features of several layers."""
        config = self.module.config
        kind, layer = config.vision_config.model_type, config.vision_feature_layer
        if kind != "pixtral" or not isinstance(layer, int):
            raise OptionError(
                f"vision tower {kind!r}, vision_feature_layer={layer}: adapted is Pixtral with features of one layer"
            )
        most = (config.vision_config.image_size // self._pixels) ** 2
        return PixtralTower(self.inner, self._side**2, most, layer, self.offer.inside)

    @property
    def _side(self) -> int:
        """Patches in a row of the square that makes a token."""
        return getattr(self.module.config, "spatial_merge_size", 1)

    @property
    def _pixels(self) -> int:
        """Height and width of a token in pixels."""
        return self.module.config.vision_config.patch_size * self._side

    def pictures(self, modality: str, inputs: dict[str, Any], ids: Tensor) -> list[PictureRows]:
        """The rows of tokens of every picture."""
        sizes = (torch.as_tensor(inputs["image_sizes"]).cpu() // self._pixels).tolist()
        return [whole_tiles(1, height * width) for height, width in sizes]

    def encode(
        self, attachment: Attachment, modality: str, inputs: dict[str, Any], pictures: list[PictureRows]
    ) -> Features:
        """The model's own encoder; what was read of the tower is split by picture."""
        if attachment.method.place is Place.PICTURE:
            return self.smaller(attachment, modality, inputs)
        output, parts = run_encoder(self, attachment, modality, inputs)
        tokens, patch = joined(output.pooler_output), self.module.config.vision_config.patch_size
        sizes = torch.as_tensor(inputs["image_sizes"]).tolist()
        grids = [[1, height // patch, width // patch] for height, width in sizes]
        tiles = picture_tiles(tokens.detach(), parts, grids, self._side, raster=True)
        if Need.FINGERPRINT in attachment.needs:
            for one, pixels, (height, width) in zip(tiles, inputs["pixel_values"], sizes, strict=True):
                one.parts["fingerprint"] = fingerprint(pixels[None, :, :height, :width])
        return Features(tiles, tokens)

    def smaller(self, attachment: Attachment, modality: str, inputs: dict[str, Any]) -> Features:
        """Smaller pictures through the model's own encoder."""
        sizes, pixels, new = torch.as_tensor(inputs["image_sizes"]).tolist(), inputs["pixel_values"].clone(), []
        small = shrunk(attachment, [TokenGrid(1, *(length // self._pixels for length in size)) for size in sizes])
        for picture, (height, width), grid, (less,) in zip(pixels, sizes, small.grids, small.small, strict=True):
            new.append([height, width] if less == grid[1:] else [self._pixels * length for length in less])
            if new[-1] != [height, width]:
                resized = shrink(picture[None, :, :height, :width], *new[-1])[0].to(picture.dtype)
                picture[:, : new[-1][0], : new[-1][1]] = resized
        inputs = {**inputs, "pixel_values": pixels, "image_sizes": torch.tensor(new)}
        output, _ = run_encoder(self, attachment, modality, inputs)
        tokens = joined(output.pooler_output)
        tiles, index = small.tiles(tokens)
        return Features(tiles, tokens[index])


class Pixtral(Mistral3):
    """Each patch is a token, so that methods can merge them inside the tower, picture by picture."""

    offer = Offer(PATCHES, inside=ClipBlocks.inside)

    def encode(
        self, attachment: Attachment, modality: str, inputs: dict[str, Any], pictures: list[PictureRows]
    ) -> Features:
        """Encodes as Mistral 3 does; pictures that are merged go through tower and projector one by one."""
        if attachment.method.place is not Place.TOWER:
            return super().encode(attachment, modality, inputs, pictures)
        sizes, tiles = torch.as_tensor(inputs["image_sizes"]).tolist(), []
        for picture, (height, width) in zip(inputs["pixel_values"], sizes, strict=True):
            tower = self.tower.of_picture(height // self._pixels, width // self._pixels)
            (one,) = attachment.encode(picture[None, :, :height, :width], [1], tower)
            tiles.append(one._replace(side=tower.side))
        return Features(tiles, joined(one.projected for one in tiles))
