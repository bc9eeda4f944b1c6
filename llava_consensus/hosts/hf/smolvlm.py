"""`SmolVLMForConditionalGeneration` and `Idefics3ForConditionalGeneration`: tiles with text between them, no class
token, and a shuffle that makes one token of s x s patches.

A processor puts a tag in front of every tile, and the whole view of a picture, with a tag of its own, after its tiles.
So a picture ends with every tile whose tag is that of the last tile of the prompt.
"""

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Offer
from llava_consensus.hosts.hf.internvl import Shuffled
from llava_consensus.hosts.hf.rows import PictureRows, runs, whole_tiles
from llava_consensus.hosts.hf.towers import PATCHES, ShuffledTower

MOST_TILES = 17  # 4 x 4 and the whole view, where no processor says another number


class SmolVLM(Shuffled):
    """A SigLIP-like tower with a mask of patches."""

    offer = Offer(PATCHES, inside=ShuffledTower.inside)
    around = (2, 1)

    @cached_property
    def tower(self) -> ShuffledTower:
        """The blocks, and the patches that the connector's shuffle puts together."""
        inner, config = self.inner, self.module.config
        side = config.vision_config.image_size // config.vision_config.patch_size
        place = torch.arange(side**2).view(1, -1, 1)
        members = inner.connector.pixel_shuffle(place, config.scale_factor)[0]
        blocks = list(inner.vision_model.encoder.layers)
        return ShuffledTower(blocks, members, 0, "self_attn", ("q_proj", "k_proj"))

    def patches(self, pixels: Tensor) -> Tensor:
        """The tower spreads its positions over fewer patches by itself."""
        states: Tensor = self.inner.vision_model(pixel_values=pixels.to(self.inner.dtype)).last_hidden_state
        return states

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
