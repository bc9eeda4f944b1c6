"""GLM-4.1V, GLM-4.5V and GLM-4.6V: the tower of Qwen2-VL without windows, a merger that makes one token of four patches
that stand one after the other, and
positions of three axes.

The placeholder of a video's tokens is that of pictures, each temporal patch between words of its own; the model itself
cannot tell them apart, so that a call has pictures or videos.
"""

from types import MappingProxyType
from typing import Any

from torch import Tensor

from llava_consensus.hosts.hf.qwen_vl import QwenVL


class Glm4v(QwenVL):
    """Adapter for the models of this file."""

    handed = MappingProxyType({"video": "image"})  # `generate` counts the placeholders of a modality

    def placeholder(self, modality: str) -> int:
        """The placeholder, one for pictures and videos."""
        return super().placeholder("image")

    def types(self, inputs: dict[str, Any], ids: Tensor) -> Tensor:
        """Type of every row: token of a picture (1) or of a video (2): [R, S]."""
        return (ids == self.placeholder("image")).int() * (2 if inputs.get("video_grid_thw") is not None else 1)
