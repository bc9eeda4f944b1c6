"""The nouns of the reduction, with their shapes: what a host hands to a method and what it gets back.

Letters used everywhere: B units reduced together (a unit is one image, or one tile of it), N visual tokens of a unit, U
distinct tiles seen by the vision tower, I prompts-with-image that were probed, L text rows, S length of the full input
sequence, H heads, D width. Torch only.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from llava_consensus.reduction.stopwatch import Stopwatch


class VisionAttention(NamedTuple):
    """Inputs to the attention of one vision block, before the scale is applied."""

    query: Tensor  # [U, H, C + N, d]
    key: Tensor  # [U, H, C + N, d]
    scale: float
    classes: int  # C: class tokens in front of the patches, 0 or 1


class TextProbe(NamedTuple):
    """Inputs to the attention of the language model's first layer, for the text rows only, before rotation and
    scale.
    """

    query: Tensor  # [I, H, L, d]
    key: Tensor  # [I, H_kv, S, d]
    cos: Tensor  # [I, S, d]
    sin: Tensor  # [I, S, d]
    scale: float
    rows: Tensor  # [I, L] place of each text row in the sequence, ascending, padded at the end
    row_mask: Tensor  # [I, L] true where the row is real
    key_mask: Tensor  # [I, S] true where the key is not padding

    def of_prompts(self, index: Tensor) -> "TextProbe":
        """The probes of the prompts that `index` [B] names."""
        return TextProbe._make(value[index] if isinstance(value, Tensor) else value for value in self)


class ClipSides(NamedTuple):
    """Patches and question in the embedding space of the vision tower's own CLIP model."""

    patches: Tensor  # [U, N_tile, P]
    text: Tensor  # [B, M, P] segments of the question asked about each unit
    real: Tensor  # [B, M] true where there is a segment


class VisualTokens(NamedTuple):
    """One batch of units to reduce; the optional parts are there when the method's `needs` names them."""

    projected: Tensor  # [B, N, D] what the language model would have received
    tile: Tensor  # [B, N] which of the U tiles each token came from
    patch: Tensor  # [B, N] which patch of that tile
    tiles_per_unit: int = 1
    side: int = 0  # patches in a row of a tile, 0 where they form no grid
    slot: Tensor | None = None  # [U, N_tile] which merged token of its tile a patch is in, for seams in front of here
    attention: VisionAttention | None = None  # needs "attention"
    features: Tensor | None = None  # [U, N_tile, D_v] needs "features"
    class_feature: Tensor | None = None  # [U, D_v] needs "class_feature"
    project: Callable[[Tensor], Tensor] | None = None  # [..., D_v] -> [..., D] the host's projector, needs "project"
    clip: ClipSides | None = None  # needs "question", and "features" with it
    probe: TextProbe | None = None  # needs "probe"
    probed: Tensor | None = None  # [B] which of the I probed prompts a unit belongs to
    columns: Tensor | None = None  # [B, N] place of each token in the full sequence
    fingerprint: Tensor | None = None  # [B] int64 of picture and prompt, the same in every batch

    def of_tiles(self, values: Tensor) -> Tensor:
        """Rows of a per-tile tensor [U, N_tile, ...] for these tokens: [B, N, ...]."""
        return values[self.tile, self.patch]


class Reduction(NamedTuple):
    """The reduced tokens and the bookkeeping of how they came about (method.md 6). Indices count the unit's own
    tokens.
    """

    tokens: Tensor  # [B, K + M, D] in output order, dtype of the projected tokens
    kept: Tensor  # [B, K] ascending
    anchors: Tensor  # [B, M] ascending
    source: Tensor  # [B, K + M] input token of each output slot: itself, a merged token's anchor, -1 for no patch
    owner: Tensor  # [B, N] output slot of every input token, -1 where dropped
    vision: Tensor | None = None  # [B, N] s_v
    cross: Tensor | None = None  # [B, N] s_c
    fused: Tensor | None = None  # [B, N] s
    stages: Stopwatch | None = None
    zone: Tensor | None = None  # [B, K + M] where each slot stands: AHEAD, PLACE, AFTER, BEHIND; None goes by `order`


AHEAD, PLACE, AFTER, BEHIND = range(4)  # of its unit, where its source is, right after its unit, behind the picture
