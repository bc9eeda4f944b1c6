"""Views of models whose hosts derive how pictures become rows from a loaded model: a server must know it before."""

from functools import cached_property
from typing import Any

from torch import Tensor

from llava_consensus.hosts.hf.model import HfModel
from llava_consensus.hosts.hf.qwen_vl import QwenVL
from llava_consensus.hosts.hf.rows import PictureRows, whole_tiles
from llava_consensus.hosts.hf.towers import TapTower


class GemmaRows(HfModel):
    """Gemma 4: a row for each square of patches of a picture, which is padded."""

    around = (1, 1)

    @cached_property
    def tower(self) -> TapTower:
        """The vision side."""
        return TapTower(self.inner.vision_tower, self.decoder.reach)

    def pictures(self, modality: str, inputs: dict[str, Any], ids: Tensor) -> list[PictureRows]:
        """The rows of every picture, by the places of its patches."""
        merged = self.module.config.vision_config.pooling_kernel_size**2
        return [whole_tiles(1, int((one[:, 0] >= 0).sum()) // merged) for one in inputs["pixel_position_ids"]]


VIEWS = {"qwen3_5": QwenVL, "gemma4": GemmaRows}  # rows of Qwen3.5 are those of Qwen3-VL
