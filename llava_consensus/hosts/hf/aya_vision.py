"""`AyaVisionForConditionalGeneration` and `Cohere2VisionForConditionalGeneration` (Command A Vision): tiles under a
SigLIP tower, a shuffle that makes one token of 2 x 2 patches, and a language model that rotates neighbouring channels,
in three of four layers.

Aya's processor puts a tag in front of every tile and the whole view last, as SmolVLM's; Command A's ends each tile with
a break, so that the tiles of a picture are runs of placeholders with one row between them.
"""

from types import MappingProxyType

from torch import Tensor

from llava_consensus.hosts.hf.internvl import Shuffled
from llava_consensus.hosts.hf.rows import spaced, tagged


class AyaVision(Shuffled):
    """Tiles with tags."""

    around = (2, 1)
    decoding = MappingProxyType({"unturned": "full_attention"})  # layers that see everything rotate nothing
    placed = staticmethod(tagged)
    tensors = frozenset({"image"})
    merge = "downsample_factor"

    def joined(self, squares: Tensor) -> Tensor:
        """The projector."""
        return self.inner.multi_modal_projector(squares)


class Cohere2Vision(AyaVision):
    """Tiles with breaks."""

    around = (1, 2)
    placed = staticmethod(spaced)
