"""`SmolVLMForConditionalGeneration` and `Idefics3ForConditionalGeneration`: tiles with text between them, no class
token, and a shuffle that makes one token of s x s patches.

A processor puts a tag in front of every tile, and the whole view of a picture, with a tag of its own, after its tiles.
So a picture ends with every tile whose tag is that of the last tile of the prompt.
"""

import math
from typing import Any

from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.hf.internvl import Shuffled
from llava_consensus.hosts.hf.rows import PictureRows, tagged

MOST_TILES = 17  # 4 x 4 and the whole view, where no processor says another number


class SmolVLM(Shuffled):
    """A SigLIP-like tower with a mask of patches."""

    around = (2, 1)
    placed = staticmethod(tagged)
    merge = "scale_factor"

    @property
    def vision(self) -> Any:
        """The vision model."""
        return self.inner.vision_model

    def joined(self, squares: Tensor) -> Tensor:
        """The connector."""
        return self.inner.connector(squares)

    @property
    def most_tiles(self) -> int:
        """Number of tiles of the largest grid its processor makes, and the whole view."""
        processor = self.image_processor
        if processor is None:
            return MOST_TILES
        grid = math.ceil(processor.size["longest_edge"] / processor.max_image_size["longest_edge"])
        return 1 + grid**2 if processor.do_image_splitting else 1

    def tiles(self, inputs: dict[str, Any]) -> Tensor:
        """Tiles that are no padding."""
        pixels: Tensor = inputs["pixel_values"].flatten(0, 1)
        return pixels[(pixels != 0).flatten(1).any(1)]

    def pictures(self, modality: str, inputs: dict[str, Any], ids: Tensor) -> list[PictureRows]:
        """The rows of every picture. OptionError for pictures that fill a tile in part."""
        mask = inputs.get("pixel_attention_mask")
        if mask is not None:
            patch_mask = mask.flatten(0, 1).flatten(1).bool()
            if bool((patch_mask.any(1) & ~patch_mask.all(1)).any()):
                raise OptionError(
                    "pixel_attention_mask: pictures that fill a tile in part are not adapted, since the tower's "
                    "attention masks patches. Let the processor resize or split pictures"
                )
        return super().pictures(modality, inputs, ids)
