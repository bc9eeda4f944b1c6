"""`AyaVisionForConditionalGeneration` and `Cohere2VisionForConditionalGeneration` (Command A Vision): tiles under a
SigLIP tower, a shuffle that makes one token of 2 x 2 patches, and a language model that rotates neighbouring channels,
in three of four layers.

Aya's processor puts a tag in front of every tile and the whole view last, as SmolVLM's; Command A's ends each tile with
a break, so that the tiles of a picture are runs of placeholders with one row between them.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from llava_consensus.hosts.base import Offer
from llava_consensus.hosts.derived.decoder import TapDecoder
from llava_consensus.hosts.hf.internvl import InternVL
from llava_consensus.hosts.hf.rows import PictureRows, runs, whole_tiles
from llava_consensus.hosts.hf.smolvlm import tagged
from llava_consensus.hosts.hf.towers import PATCHES, ShuffledTower
from llava_consensus.hosts.towers import hidden_state_block


class AyaVision(InternVL):
    """Tiles with tags."""

    offer = Offer(PATCHES, inside=ShuffledTower.inside)
    around = (2, 1)

    @cached_property
    def tower(self) -> ShuffledTower:
        """The blocks, and the patches that the projector's own shuffle puts together."""
        config, inner = self.module.config, self.inner
        side = config.vision_config.image_size // config.vision_config.patch_size
        place = torch.arange(side**2).view(1, -1, 1)
        members = inner.multi_modal_projector.pixel_shuffle(place).flatten(0, 2)
        module = inner.vision_tower
        blocks = list(getattr(module, "vision_model", module).encoder.layers)
        tower = ShuffledTower(blocks, members, 0, "self_attn", ("q_proj", "k_proj"))
        tower.feature_block = hidden_state_block(getattr(config, "vision_feature_layer", -1), len(blocks))
        return tower

    def patches(self, pixels: Tensor) -> Tensor:
        """Runs the tower with interpolated position embeddings."""
        layer = getattr(self.module.config, "vision_feature_layer", None)
        more = {} if layer is None else {"output_hidden_states": True}
        output = self.inner.vision_tower(pixels, interpolate_pos_encoding=True, **more)
        states: Tensor = output.last_hidden_state if layer is None else output.hidden_states[layer]
        return states

    def joined(self, squares: Tensor) -> Tensor:
        """The projector."""
        tokens: Tensor = self.inner.multi_modal_projector(squares)
        return tokens

    @cached_property
    def decoder(self) -> TapDecoder:
        """The language side, of whose layers those that see everything rotate nothing."""
        return TapDecoder(self.inner.language_model, unturned="full_attention")

    def pictures(self, modality: str, inputs: dict[str, Any], ids: Tensor) -> list[PictureRows]:
        """A picture is its tiles, the last of which shows the whole of it."""
        return self.matching(inputs, tagged(ids, self.placeholder(modality), self.tower.tokens))


class Cohere2Vision(AyaVision):
    """Tiles with breaks."""

    around = (1, 2)

    def pictures(self, modality: str, inputs: dict[str, Any], ids: Tensor) -> list[PictureRows]:
        """A picture is the tiles that have one row between them."""
        return self.matching(inputs, spaced(ids, self.placeholder(modality), self.tower.tokens))


def spaced(ids: Tensor, placeholder: int, tokens: int) -> list[PictureRows]:
    """Pictures of prompts [R, S] whose tiles are runs of `tokens` placeholders, one row between them."""
    tiles: list[int] = []
    follows = (-1, -1)  # row of the batch and place where the next tile of the same picture begins
    for row, start, length in runs(ids, placeholder):
        tiles = [*tiles[:-1], tiles[-1] + 1] if (row, start) == follows else [*tiles, 1]
        follows = row, start + length + 1
    return [whole_tiles(count, tokens) for count in tiles]
