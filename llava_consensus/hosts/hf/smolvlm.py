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
from llava_consensus.hosts.hf.rows import PictureRows, runs, whole_tiles

MOST_TILES = 17  # 4 x 4 and the whole view, where no processor says another number


class SmolVLM(Shuffled):
    """A SigLIP-like tower with a mask of patches."""

    around = (2, 1)
    merge = "scale_factor"

    @property
    def vision(self) -> Any:
        """The vision model."""
        return self.inner.vision_model

    def joined(self, squares: Tensor) -> Tensor:
        """The connector."""
        tokens: Tensor = self.inner.connector(squares)
        return tokens

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
        """A picture is its tiles, the last of which shows the whole of it."""
        mask = inputs.get("pixel_attention_mask")
        if mask is not None:
            patch_mask = mask.flatten(0, 1).flatten(1).bool()
            if bool((patch_mask.any(1) & ~patch_mask.all(1)).any()):
                raise OptionError(
                    "pixel_attention_mask: pictures that fill a tile in part are not adapted, since the tower's "
                    "attention masks patches. Let the processor resize or split pictures"
                )
        return self.matching(inputs, tagged(ids, self.placeholder(modality), self.tower.tokens))


def tagged(ids: Tensor, placeholder: int, size: int) -> list[PictureRows]:
    """The pictures of prompts whose tiles of `size` tokens have a tag in front, that of the last tile ending a picture.

    Raises:
        OptionError: for a run of placeholders of another length.
    """
    tile_runs, pictures, waiting = runs(ids, placeholder), [], 0
    last = {row: int(ids[row, start - 1]) for row, start, _ in tile_runs}
    for row, start, length in tile_runs:
        if length != size:
            raise OptionError(
                f"prompt {row} has {length} placeholders from row {start} on, and a tile is {size} tokens: pass "
                "input_ids and pixels of one call of the model's own processor, and truncate nothing"
            )
        waiting += 1
        if int(ids[row, start - 1]) == last[row]:
            pictures.append(whole_tiles(waiting, size))
            waiting = 0
    return pictures
