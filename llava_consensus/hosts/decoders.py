"""Language models as methods read them: Llama-like ones (Llama, Mistral, Qwen2, ...) in transformers 4.37 and 5, with
separate projections of queries and keys, norms of them where a model has some, and rotary positions; and those of
Qwen2.5-VL and Qwen3-VL, whose positions have three axes (M-RoPE).
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts import call as calls
from llava_consensus.hosts.base import Tap
from llava_consensus.hosts.towers import split_heads
from llava_consensus.reduction.saliency import rotate

LENGTHWISE = ("dynamic", "longrope")  # types of rotary embeddings
TRIED_ROWS, SPREAD = 8, 4.0  # of the check of a layer's attention: rows, and standard deviation of their logits


class LlamaDecoder:
    """A view of an inner language model with `layers`, `norm` and a rotary embedding there or in every layer.

    Raises:
        OptionError: for a language model that has no such parts.
    """

    axes = 1  # of positions

    def __init__(self, module: Any) -> None:
        if not hasattr(module, "layers"):
            raise OptionError(f"language model {type(module).__name__} is not adapted: it has no layers like Llama's")
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
        """One over the square root of the width of a head, where the layer says nothing else."""
        attention = self.layers[layer].self_attn
        scale: float = getattr(attention, "scaling", attention.head_dim**-0.5)
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

    @torch.no_grad()
    def check_attention(self, cut: bool) -> None:
        """Holds the first layer's own attention, on a few rows of noise, against what is read of it here: its norm,
        queries, keys, scale and rotation. Sharded or offloaded weights are taken on trust.

        Args:
            cut: whether rows leave between layers, none of which may then mix rows but by attention.
        Raises:
            OptionError: the language model works in another way.
        """
        mixing = (layer for layer in self.layers if any(isinstance(one, nn.Conv1d) for one in layer.modules()))
        if cut and next(mixing, None) is not None:
            raise self._other("its layers mix rows by a convolution too")
        attention = getattr(self.layers[0], "self_attn", None)
        weights = [] if attention is None else list(attention.parameters())
        if any(weight.is_meta or weight.ndim == 0 or not weight.numel() for weight in weights):
            return
        training = [module for module in self.layers[0].modules() if module.training]
        for module in training:  # dropout would make any two passes differ
            module.training = False
        try:
            difference = self._difference(attention)
        except (AttributeError, TypeError, RuntimeError, ValueError) as error:
            raise self._other(f"its first layer cannot be read ({error})") from error
        finally:
            for module in training:
                module.training = True
        exact = next(iter(self.layers[0].parameters())).dtype in (torch.float32, torch.float64)
        if not difference <= (1e-3 if exact else 0.1):
            raise self._other(f"its attention differs by {difference:.2g} of its size")

    def _difference(self, attention: Any) -> float:
        """Of the output of the first layer's attention from what its queries, keys and values make."""
        like = next(weight for weight in self.layers[0].parameters() if weight.is_floating_point())
        noise = torch.randn(1, TRIED_ROWS, self.module.config.hidden_size, generator=torch.Generator().manual_seed(0))
        states = self.normed(0, noise.to(like))
        places = torch.arange(TRIED_ROWS, device=like.device)
        positions = places[None] if self.axes == 1 else places[None, :, None].expand(1, -1, self.axes)
        seen = (places <= places[:, None])[None, None]
        states = states * (SPREAD / self._logits(states, positions).std()).sqrt().to(states.dtype)
        probability = self._logits(states, positions).masked_fill(~seen, float("-inf")).softmax(-1)
        value = split_heads(attention.v_proj(states), attention.v_proj.out_features // attention.head_dim).float()
        value = value.repeat_interleave(probability.shape[1] // value.shape[1], 1)
        ours = attention.o_proj((probability @ value).transpose(1, 2).flatten(2).to(states.dtype)).float()
        own = attention(states, **self.arguments(states, positions, None if "flash" in self.kernel else seen))[
            0
        ].float()
        return ((ours - own).norm() / own.norm()).item()

    def _logits(self, states: Tensor, positions: Tensor) -> Tensor:
        """Of the first layer, in float32: [1, H, S, S]."""
        angles = self.rotary(states, positions)
        query, key = (rotate(one, *angles).float() for one in (self.query(0, states), self.key(0, states)))
        return query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(-1, -2) * self.scale(0)

    def _other(self, why: str) -> OptionError:
        return OptionError(
            f"language model {type(self.module).__name__} is not adapted to methods that read its attention: {why}. "
            "Take a method that acts after the tower and asks no question of the language model (llava-consensus list)"
        )

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
    axes = AXES

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
