"""Takes from a host's modules what a method reads, with hooks that change nothing: query, key and output of one vision
block, and the
queries and keys of the language model's first layer. The host keeps its attention kernels; no attention map is ever
asked for.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from llava_consensus.errors import OptionError


def vision_blocks(tower: nn.Module) -> nn.ModuleList:
    """The transformer blocks of a CLIP-like tower, wherever this version of transformers keeps them."""
    inner: Any = getattr(tower, "vision_model", tower)
    blocks: nn.ModuleList = inner.encoder.layers
    return blocks


def feature_block(blocks: nn.ModuleList, select_layer: int, option: int | None) -> int:
    """Index of the block whose output is `hidden_states[select_layer]`, or the one the option names.

    Raises:
        OptionError: for an index the tower does not have.
    """
    chosen = option if option is not None else (select_layer if select_layer < 0 else select_layer - 1)
    if option is None and select_layer < 0:
        chosen = select_layer + len(blocks)  # hidden_states has one entry more than there are blocks
    index = chosen + len(blocks) if chosen < 0 else chosen
    if not 0 <= index < len(blocks):
        raise OptionError(
            f"vision_layer={chosen} must be in {-len(blocks)}..{len(blocks) - 1}: the tower has {len(blocks)} blocks"
        )
    return index


def attending_block(blocks: nn.ModuleList, features: int, ahead: int) -> nn.Module:
    """The block whose attention is read: `ahead` blocks behind the one that gives the features.

    Raises:
        OptionError: for a tower that ends before it.
    """
    if features + ahead >= len(blocks):
        raise OptionError(
            f"this method reads the attention of the block after the features' own, which is the last of "
            f"{len(blocks)}: give vision_layer={len(blocks) - 1 - ahead}, or use a model with "
            "mm_vision_select_layer=-2"
        )
    return blocks[features + ahead]


@contextmanager
def tapped(block: nn.Module, attending: nn.Module, wanted: frozenset[str]) -> Iterator[dict[str, Tensor]]:
    """Collects `output` [T, n, D_v] of a block, and `query` and `key` [T, n, H d] of one that may be another, while
    the body runs the tower once.
    """
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if name in found:
                raise RuntimeError(
                    "the vision tower ran twice for one set of pictures: multi-scale (S2) towers are not adapted"
                )
            found[name] = (output[0] if isinstance(output, tuple) else output).detach()

        return hook

    modules: dict[str, nn.Module] = {}
    if "attention" in wanted:
        own: Any = attending.self_attn
        modules |= {"query": own.q_proj, "key": own.k_proj}
    if wanted & {"features", "class_feature"}:
        modules["output"] = block
    handles = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def split_heads(states: Tensor, heads: int) -> Tensor:
    """[T, n, H d] -> [T, H, n, d]."""
    return states.unflatten(-1, (heads, -1)).transpose(1, 2)


def fingerprint(values: Tensor) -> Tensor:
    """A number for each row of a tensor [T, ...], from its bits: the same in every batch and on every device. int64
    [T].
    """
    if values.is_floating_point():
        values = values.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
    flat = values.flatten(1).long()
    weight = torch.arange(flat.shape[1], device=flat.device) * 0x9E3779B97F4A7C1 | 1
    return (flat * weight).sum(1)  # int64 arithmetic wraps


@torch.no_grad()
def probe_first_layer(decoder: Any, embeds: Tensor, positions: Tensor, rows: Tensor, batch: Tensor) -> dict[str, Any]:
    """Queries of the text rows and keys of the whole sequence in decoder layer 0, by the layer's own modules
    (method.md 3).

    Args:
        decoder: the language model's inner model (`layers`, and `rotary_emb` there or in layer 0).
        embeds: [R, S, D] full input sequences.
        positions: [R, S] position ids.
        rows: [I, L] places of the text rows of each probed prompt.
        batch: [I] which of the R sequences a probed prompt is.
    Returns:
        The fields `query`, `key`, `cos`, `sin`, `scale` of a TextProbe.
    """
    layer = decoder.layers[0]
    attention = layer.self_attn
    hidden = layer.input_layernorm(embeds)
    at_rows = hidden[batch[:, None], rows]  # [I, L, D]
    width = attention.head_dim
    query = split_heads(attention.q_proj(at_rows), attention.q_proj.out_features // width)
    key = split_heads(attention.k_proj(hidden), attention.k_proj.out_features // width)
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    cos, sin = _rotary(decoder, attention, hidden, positions)
    whole = len(batch) == len(embeds) and len(batch) == 1
    key, cos, sin = (key, cos, sin) if whole else (key[batch], cos[batch], sin[batch])
    return {"query": query, "key": key, "cos": cos, "sin": sin, "scale": width**-0.5}


def _rotary(decoder: Any, attention: Any, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [R, S, d] of the host's rotary embedding, on transformers 5 and on 4.37."""
    if hasattr(decoder, "rotary_emb"):
        return decoder.rotary_emb(hidden, positions)
    rotary = attention.rotary_emb
    if "position_ids" in inspect.signature(rotary.forward).parameters:
        return rotary(hidden, positions)
    cos, sin = rotary(hidden, seq_len=positions.shape[1])
    return cos[positions], sin[positions]
