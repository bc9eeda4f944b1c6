"""GLM-4.1V, GLM-4.5V and GLM-4.6V: the tower of Qwen2-VL without windows, a merger that makes one token of four patches
that stand one after the other, positions of three axes, and a language model that rotates a part of a head's channels.

The placeholder of a video's tokens is that of pictures, each temporal patch between words of its own; the model itself
cannot tell them apart, so that a call has pictures or videos.
"""

from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from llava_consensus.hosts.decoders import LlamaDecoder, MRopeDecoder
from llava_consensus.hosts.hf.qwen_vl import QwenVL

NEIGHBOURS = (
    "glm4v_text"  # the language model in which the pairs are neighbours; they are the halves in that of experts
)


class GlmDecoder(MRopeDecoder):
    """The first channels of a head are rotated and the others stay. Here the first ones of all pairs stand before the
    second ones, those that stay as pairs that turn by nothing, which changes no product.
    """

    def rotary(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, S, d] of heads in that order."""
        cos, sin = super().rotary(hidden, positions)
        rest = self.layers[0].self_attn.head_dim - cos.shape[-1]
        return self._paired(pad(cos, (0, rest), value=1.0)), self._paired(pad(sin, (0, rest)))

    def arguments(self, hidden: Tensor, positions: Tensor, mask: Tensor | None) -> dict[str, Any]:
        """The layers rotate in their own order."""
        return {**super().arguments(hidden, positions, mask), "position_embeddings": super().rotary(hidden, positions)}

    def _heads(self, attention: Any, states: Tensor, norm: str) -> Tensor:  # type: ignore[override]
        return self._paired(LlamaDecoder._heads(attention, states, norm))

    def _paired(self, values: Tensor) -> Tensor:
        """Channels of heads as they are, [..., d], in the order of this view."""
        turned = 2 * len(self.module.rotary_emb.inv_freq)
        pairs, rest = values[..., :turned], values[..., turned:].chunk(2, dim=-1)
        neighbours = self.module.config.model_type == NEIGHBOURS
        first, second = (pairs[..., ::2], pairs[..., 1::2]) if neighbours else pairs.chunk(2, dim=-1)
        return torch.cat((first, *rest[:1], second, *rest[1:]), dim=-1)


class Glm4v(QwenVL):
    """Adapter for the models of this file."""

    handed = MappingProxyType({"video": "image"})  # `generate` counts the placeholders of a modality

    @cached_property
    def decoder(self) -> GlmDecoder:
        """The language side."""
        return GlmDecoder(self.inner.language_model)

    def placeholder(self, modality: str) -> int:
        """The placeholder, one for pictures and videos."""
        return super().placeholder("image")

    def types(self, inputs: dict[str, Any], ids: Tensor) -> Tensor:
        """Type of every row: token of a picture (1) or of a video (2): [R, S]."""
        return (ids == self.placeholder("image")).int() * (2 if inputs.get("video_grid_thw") is not None else 1)
