"""Language models as methods read them: Llama-like ones (Llama, Mistral, Qwen2, ...) in transformers 4.37 and 5, with
separate projections of queries and keys, norms of them where a model has some, and rotary positions; and those of
Qwen2.5-VL and Qwen3-VL, whose positions have three axes (M-RoPE).
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llava_consensus.hosts import call as calls
from llava_consensus.hosts.base import Tap
from llava_consensus.hosts.towers import split_heads

LENGTHWISE = ("dynamic", "longrope")  # types of rotary embeddings


class LlamaDecoder:
    """A view of an inner language model with `layers`, `norm` and a rotary embedding there or in every layer."""

    def __init__(self, module: Any) -> None:
        self.module: Any = module
        self.layers: Sequence[Any] = module.layers
        self.kernel: str = getattr(module.config, "_attn_implementation", "eager")
        self.reach: int = module.config.max_position_embeddings
        self.window: int | None = getattr(module.config, "sliding_window", None)
        self.follows_length = _follows_length(module.config)

    def norm(self, hidden: Tensor) -> Tensor:
        """The norm after the last layer."""
        normed: Tensor = self.module.norm(hidden)
        return normed

    def normed(self, layer: int, hidden: Tensor) -> Tensor:
        """States as the attention of a layer reads them."""
        normed: Tensor = self.layers[layer].input_layernorm(hidden)
        return normed

    def query(self, layer: int, normed: Tensor) -> Tensor:
        """Queries before rotation, by the layer's own modules: [R, L, D] -> [R, H, L, d]."""
        attention = self.layers[layer].self_attn
        return self._heads(attention, attention.q_proj(normed), "q_norm")

    def key(self, layer: int, normed: Tensor) -> Tensor:
        """Keys before rotation: [R, S, D] -> [R, H_kv, S, d]."""
        attention = self.layers[layer].self_attn
        return self._heads(attention, attention.k_proj(normed), "k_norm")

    def scale(self, layer: int) -> float:
        """One over the square root of the width of a head."""
        scale: float = self.layers[layer].self_attn.head_dim ** -0.5
        return scale

    def rotary(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, S, d] of the model's rotary embedding, for positions [R, S]."""
        if hasattr(self.module, "rotary_emb"):
            cos, sin = self.module.rotary_emb(hidden, positions)
            return cos, sin
        rotary = self.layers[0].self_attn.rotary_emb
        if "position_ids" in inspect.signature(rotary.forward).parameters:
            cos, sin = rotary(hidden, positions)
            return cos, sin
        cos, sin = rotary(hidden, seq_len=max(self.reach, hidden.shape[1]))
        return cos[positions], sin[positions]

    def positions(self, layer_arguments: dict[str, Any], rows: int, outer: Mapping[str, Any]) -> Tensor:
        """Position ids [rows, S] that a layer was given."""
        positions: Tensor = layer_arguments["position_ids"]
        return positions.expand(rows, -1)

    def taps(self, layer: int) -> list[Tap]:
        """Where queries and keys of a layer are read while it runs."""
        attention = self.layers[layer].self_attn
        return [
            Tap(attention.q_proj, lambda output: {"query": self._heads(attention, output, "q_norm")}),
            Tap(attention.k_proj, lambda output: {"key": self._heads(attention, output, "k_norm")}),
        ]

    def arguments(self, hidden: Tensor, positions: Tensor, mask: Tensor | None) -> dict[str, Any]:
        """What a layer's forward must be given for these positions [R, W] and this mask [R, 1, q, W] (true: seen)."""
        if mask is not None and self.kernel == "eager":
            mask = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill(~mask, torch.finfo(hidden.dtype).min)
        changes = {"position_ids": positions, "attention_mask": mask}
        if hasattr(self.module, "rotary_emb"):
            return {**changes, "position_embeddings": self.rotary(hidden, positions)}
        return changes

    def tables(self) -> Sequence[nn.Module]:
        """Rotary modules that look positions up in a table as long as their own cache; none on current versions."""
        if hasattr(self.module, "rotary_emb"):
            return []
        return [layer.self_attn.rotary_emb for layer in self.layers]

    @staticmethod
    def _heads(attention: Any, states: Tensor, norm: str) -> Tensor:
        heads = split_heads(states, states.shape[-1] // attention.head_dim)
        norm_module = getattr(attention, norm, None)
        return heads if norm_module is None else norm_module(heads)


def _follows_length(config: Any) -> bool:
    """Whether rotary angles depend on how long the sequences are that were read, as with dynamic scaling."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [given, *(value for value in given.values() if isinstance(value, Mapping))]  # one for each type of layer
    return any(kind.get("rope_type", kind.get("type")) in LENGTHWISE for kind in kinds)


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
    """Takes the place of Qwen3-VL's `_deepstack_process`, which adds features [visual tokens, D] to visual rows: after
    a cut, to those that are left.
    """
    call, module = calls.current(attachment), attachment.here.decoder.module
    state = call.state.get("cuts") if call is not None else None
    rows = getattr(state.forward, "rows", None) if state is not None else None
    if rows is None or hidden.shape[1] == visual_pos_masks.shape[1]:
        run = plain or type(module)._deepstack_process.__get__(module)
        states: Tensor = run(hidden, visual_pos_masks, visual_embeds)
        return states
    plane = hidden.new_zeros(len(hidden), rows.size + 1, hidden.shape[2])
    plane[:, :-1][visual_pos_masks.to(hidden.device)] = visual_embeds.to(hidden.device, hidden.dtype)
    return hidden + plane.gather(1, rows.origin[..., None].expand_as(hidden))
