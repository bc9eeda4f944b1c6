"""`AyaVisionForConditionalGeneration` and `Cohere2VisionForConditionalGeneration` (Command A Vision): tiles under a
SigLIP tower, a shuffle that makes one token of 2 x 2 patches, and a language model that rotates neighbouring channels,
in three of four layers.

Aya's processor puts a tag in front of every tile and the whole view last, as SmolVLM's; Command A's ends each tile with
a break, so that the tiles of a picture are runs of placeholders with one row between them.
"""

from functools import cached_property
from typing import Any

from torch import Tensor

from llava_consensus.hosts.derived.decoder import TapDecoder
from llava_consensus.hosts.hf.internvl import Shuffled
from llava_consensus.hosts.hf.rows import PictureRows, runs, whole_tiles
from llava_consensus.hosts.hf.smolvlm import tagged


class AyaVision(Shuffled):
    """Tiles with tags."""

    around = (2, 1)
    tensors = frozenset({"image"})
    merge = "downsample_factor"

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
