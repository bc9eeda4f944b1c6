"""Language models of official LLaVA as methods read them: Llama and Mistral in transformers 4.37 and 5. Those of
transformers' own models are read by `derived/decoder.py`.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llava_consensus.hosts.base import Tap
from llava_consensus.hosts.towers import split_heads

SLIDING = "sliding_attention"  # type of layers
LENGTHWISE = ("dynamic", "longrope")  # types of rotary embeddings


class LlamaDecoder:
    """A view of an inner language model with `layers`, `norm` and a rotary embedding there or in every layer."""

    axes = 1  # of positions
    kind: str  # of the layers that angles, arguments and window are of; "" where all are of one

    def __init__(self, module: Any) -> None:
        self.module: Any = module
        self.layers: Any = getattr(module, "layers", ())
        self.embedding_scale: float = getattr(module, "embedding_multiplier", 1.0)
        self.reach: int = getattr(module.config, "max_position_embeddings", 0)
        self.kind = _type_of(module.config, 0)
        self.follows_length = _follows_length(module.config)

    @property
    def kernel(self) -> str:
        """Attention implementation: sdpa, eager, ... Users may change it while a method is attached."""
        return getattr(self.module.config, "_attn_implementation", "eager")

    def at(self, layer: int) -> "LlamaDecoder":
        """View whose rotation, arguments and window are those of this layer's type."""
        kind = _type_of(self.module.config, layer)
        if kind == self.kind:
            return self
        view = copy.copy(self)
        view.kind = kind
        return view

    @property
    def window(self) -> int | None:
        """Sliding window of these layers in rows, the row itself included; None for full causal attention."""
        return getattr(self.module.config, "sliding_window", None) if self.kind in ("", SLIDING) else None

    def norm(self, hidden: Tensor) -> Tensor:
        """The norm after the last layer."""
        return self.module.norm(hidden)

    def normed(self, layer: int, hidden: Tensor) -> Tensor:
        """States as the attention of a layer reads them."""
        return self.layers[layer].input_layernorm(hidden)

    def query(self, layer: int, normed: Tensor) -> Tensor:
        """Queries before rotation, by the layer's own modules: [R, L, D] -> [R, H, L, d]."""
        attention = self.layers[layer].self_attn
        return self._heads(attention, attention.q_proj(normed), "q_norm")

    def key(self, layer: int, normed: Tensor) -> Tensor:
        """Keys before rotation: [R, S, D] -> [R, H_kv, S, d]."""
        attention = self.layers[layer].self_attn
        return self._heads(attention, attention.k_proj(normed), "k_norm")

    def scale(self, layer: int) -> float:
        """Scale of the attention logits: of the layer, or 1 / sqrt(head width)."""
        attention = self.layers[layer].self_attn
        return getattr(attention, "scaling", attention.head_dim**-0.5)

    def rotary(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, S, d] of the model's rotary embedding, for positions [R, S]."""
        if hasattr(self.module, "rotary_emb"):
            return self.module.rotary_emb(hidden, positions)
        rotary = self.layers[0].self_attn.rotary_emb
        if "position_ids" in inspect.signature(rotary.forward).parameters:
            return rotary(hidden, positions)
        cos, sin = rotary(hidden, seq_len=max(self.reach, hidden.shape[1]))
        return cos[positions], sin[positions]

    def angles(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, S, d] by which attention is calibrated by distance."""
        return self.rotary(hidden, positions)

    def positions(self, layer_arguments: dict[str, Any], rows: int, outer: Mapping[str, Any]) -> Tensor:
        """Position ids [rows, S] that a layer was given."""
        return layer_arguments["position_ids"].expand(rows, -1)

    def taps(self, layer: int) -> list[Tap]:
        """Taps of the queries and keys of a layer while it runs."""
        attention = self.layers[layer].self_attn
        return [
            Tap(attention.q_proj, lambda output: {"query": self._heads(attention, output, "q_norm")}),
            Tap(attention.k_proj, lambda output: {"key": self._heads(attention, output, "k_norm")}),
        ]

    def value_taps(self, layer: int) -> list[Tap]:
        """Taps of the values of a layer while it runs, in the place of queries and of keys."""
        attention = self.layers[layer].self_attn

        def read(output: Tensor) -> dict[str, Tensor]:
            values = self._heads(attention, output, "v_norm")
            return {"query": values, "key": values}

        return [Tap(attention.v_proj, read)]

    def arguments(self, hidden: Tensor, positions: Tensor, mask: Tensor | None) -> dict[str, Any]:
        """Kwargs of a layer's forward for these positions [R, W] and this mask [R, 1, q, W]: true where a column is
        seen, or additive.
        """
        if mask is not None and mask.dtype == torch.bool and self.kernel == "eager":
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


def _type_of(config: Any, layer: int) -> str:
    """The type of a layer; "" for models whose layers have one."""
    types = getattr(config, "layer_types", None)
    return types[layer] if types else ""


def _follows_length(config: Any) -> bool:
    """True if rotary angles depend on the length of the sequences read so far, as with dynamic scaling."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [given, *(value for value in given.values() if isinstance(value, Mapping))]  # one for each type of layer
    return any(kind.get("rope_type", kind.get("type")) in LENGTHWISE for kind in kinds)
