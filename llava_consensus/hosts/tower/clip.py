"""A CLIP vision tower, in every place where transformers has kept its parts, and what methods inside a tower need of
one: the parts of a block, and the embeddings of a smaller picture.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import transformers
from torch import Tensor, nn

from llava_consensus.hosts.base import Tap
from llava_consensus.hosts.tower.taps import split_heads
from llava_consensus.reduction.tokens import Need

RETURNS_TENSOR = int(transformers.__version__.split(".")[0]) >= 5  # a block's result; a tuple before


class BlockParts(NamedTuple):
    """The parts of one vision block, for methods that merge between its attention and its MLP."""

    before_attention: nn.Module
    attention: nn.Module
    before_mlp: nn.Module
    mlp: nn.Module


class ClipBlocks:
    """Blocks, embeddings and attention of a CLIP vision model.

    Args:
        module: `CLIPVisionModel`, of transformers 4.37 or 5.
        feature_block: index of the block whose output feeds the projector.
    """

    classes = 1
    class_is_token = False  # whether the class token is a token, the first one, whose features are read too
    members: Tensor | None = None
    offers = frozenset({Need.ATTENTION, Need.FEATURES, Need.CLASS_FEATURE, Need.PROJECTOR})

    def __init__(self, module: Any, feature_block: int) -> None:
        self.module, self.feature_block = module, feature_block
        inner = getattr(module, "vision_model", module)
        self.blocks: Sequence[Any] = list(inner.encoder.layers)
        self.last_norm = inner.post_layernorm
        self.embeddings, self.kernel = inner.embeddings, getattr(module.config, "_attn_implementation", "eager")

    def scale(self, block: int) -> float:
        """What the products of queries and keys of a block are multiplied with."""
        module: Any = self.blocks[block]
        scale: float = module.self_attn.scale
        return scale

    def taps(self, needs: frozenset[Need], features: int, attention: int) -> list[Tap]:
        """Projections of queries and keys of one block, and the output of another."""
        attending: Any = self.blocks[attention]
        heads, taps = attending.self_attn.num_heads, []
        if Need.ATTENTION in needs:
            taps.append(Tap(attending.self_attn.q_proj, lambda output: {"query": split_heads(output, heads)}))
            taps.append(self.key_tap(attention))
        if Need.FEATURES in needs:
            first = 0 if self.class_is_token else self.classes
            taps.append(Tap(self.blocks[features], lambda output: {"features": states_of(output)[:, first:]}))
        if Need.CLASS_FEATURE in needs:
            taps.append(Tap(self.blocks[features], lambda output: {"class_feature": states_of(output)[:, 0]}))
        return taps

    def parts(self, block: int) -> BlockParts:
        """The parts of a block."""
        module: Any = self.blocks[block]
        return BlockParts(module.layer_norm1, module.self_attn, module.layer_norm2, module.mlp)

    def key_tap(self, block: int) -> Tap:
        """Where the keys [T, H, t, d] of a block are read."""
        module: Any = self.blocks[block]
        heads = module.self_attn.num_heads
        return Tap(module.self_attn.k_proj, lambda output: {"key": split_heads(output, heads)})

    def attend(self, block: int, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """Output of a block's own attention on normed states [T, t, D_v], with `bias` [T, t] added to the logits of
        each key.
        """
        mask = None if bias is None else bias.to(hidden.dtype)[:, None, None].expand(-1, 1, hidden.shape[1], -1)
        attended: Tensor = self.parts(block).attention(hidden, attention_mask=mask)[0]
        return attended

    def result(self, states: Tensor) -> Any:
        """States in the form a block returns them."""
        return states if RETURNS_TENSOR else (states,)


def states_of(output: Any) -> Tensor:
    """States in what a block returned, on any version."""
    states: Tensor = output[0] if isinstance(output, tuple) else output
    return states


def hidden_state_block(select_layer: int, blocks: int) -> int:
    """Index of the block whose output is `hidden_states[select_layer]`, which has one entry more than blocks."""
    return select_layer + blocks if select_layer < 0 else select_layer - 1
