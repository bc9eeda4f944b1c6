"""The language side of Qwen2.5-VL and Qwen3-VL: a Llama-like decoder whose positions have three axes (M-RoPE)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from llava_consensus.hosts import call as calls
from llava_consensus.hosts.decoder.llama import LlamaDecoder

AXES = 3


class MRopeDecoder(LlamaDecoder):
    """Positions are those of the full prompt, whatever a method wants: numbering three axes anew has no meaning."""

    keeps_positions = True

    def rotary(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, S, d] for positions [R, S, 3]."""
        cos, sin = self.module.rotary_emb(hidden, positions.permute(2, 0, 1))
        return cos, sin

    def positions(self, layer_arguments: dict[str, Any], rows: int, outer: Mapping[str, Any]) -> Tensor:
        """Positions [rows, S, 3] that the inner model was given; its layers are given only what rotates by them."""
        positions = outer.get("position_ids")
        if positions is None:
            size = layer_arguments["position_embeddings"][0].shape[-2]
            cache = layer_arguments.get("past_key_values")
            start = 0 if cache is None else cache.get_seq_length()
            positions = torch.arange(start, start + size, device=layer_arguments["position_embeddings"][0].device)[None]
        positions = positions[None] if positions.ndim == 2 else positions[-AXES:]
        return positions.expand(AXES, rows, -1).permute(1, 2, 0)

    def arguments(self, hidden: Tensor, positions: Tensor, mask: Tensor | None) -> dict[str, Any]:
        """Layers need no position ids beside what rotates by them."""
        return {**super().arguments(hidden, positions, mask), "position_ids": None}

    @property
    def replaced(self) -> dict[str, Any]:
        """Functions of the inner model that must know of a shortened sequence, by name."""
        return {"_deepstack_process": add_planes} if hasattr(self.module, "_deepstack_process") else {}


def add_planes(attachment: Any, plain: Any, hidden: Tensor, visual_pos_masks: Tensor, visual_embeds: Tensor) -> Tensor:
    """Takes the place of Qwen3-VL's `_deepstack_process`, which adds features [visual tokens, D] to visual rows: behind
    a cut, to those that are left.
    """
    call, module = calls.current(attachment), attachment.here.decoder.module
    rows = getattr(call.forward, "rows", None) if call is not None else None
    if rows is None or hidden.shape[1] == visual_pos_masks.shape[1]:
        run = plain or type(module)._deepstack_process.__get__(module)
        states: Tensor = run(hidden, visual_pos_masks, visual_embeds)
        return states
    plane = hidden.new_zeros(len(hidden), rows.size + 1, hidden.shape[2])
    plane[:, :-1][visual_pos_masks.to(hidden.device)] = visual_embeds.to(hidden.device, hidden.dtype)
    return hidden + plane.gather(1, rows.origin[..., None].expand_as(hidden))
