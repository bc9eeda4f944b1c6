"""The nouns of the reduction, with their shapes: what a host hands to a method and what it gets back.

Letters used everywhere: B units reduced together (a unit is one image, or one tile of it), N visual tokens of a unit,
U distinct tiles seen by the
vision tower, I prompts-with-image that were probed, L text rows, S length of the full input sequence, H heads, D
width. Torch only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from llava_consensus.errors import ConsensusError, OptionError
from llava_consensus.stages import Stages


class NonFiniteError(ConsensusError, FloatingPointError):
    """A stage of the reduction produced NaN or infinity; a ranking of such numbers would mean nothing."""


@dataclass(frozen=True)
class Budget:
    """Visual tokens handed to the language model for one image: `tokens` = T = K kept + M merged (method.md 7).

    Args:
        tokens: T >= 1, in absolute tokens. T >= N means the unpatched model.
        merged: M in 0..T; None means floor(20 T / 128 + 1/2), the split of the paper.
    Raises:
        OptionError: for a T below 1 or an M outside 0..T.
    """

    tokens: int
    merged: int | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "merged"):
            value = getattr(self, name)
            if not (value is None and name == "merged") and (not isinstance(value, int) or isinstance(value, bool)):
                raise OptionError(f"{name}={value!r} must be a whole number")
        if self.tokens < 1:
            raise OptionError(
                f"tokens={self.tokens} must be at least 1: a budget counts the visual tokens of one image"
            )
        if self.merged is not None and not 0 <= self.merged <= self.tokens:
            raise OptionError(
                f"merged={self.merged} must be in 0..{self.tokens}: merged tokens are part of tokens={self.tokens}"
            )

    def split(self, available: int) -> tuple[int, int]:
        """K and M for a unit of `available` tokens; M is clamped to what is left after K, K to what there is."""
        merged = (40 * self.tokens + 128) // 256 if self.merged is None else self.merged
        kept = min(self.tokens - merged, available)
        return kept, min(merged, available - kept)

    def share(self, parts: int) -> list["Budget"]:
        """The budget divided equally over `parts` tiles; the first tiles take what does not divide."""
        tokens = [self.tokens // parts + (i < self.tokens % parts) for i in range(parts)]
        if min(tokens) < 1:
            raise OptionError(
                f"tokens={self.tokens} is less than one token for each of {parts} tiles: "
                f"give at least {parts}, or tile_budget=global"
            )
        merged = [
            None if self.merged is None else self.merged // parts + (i < self.merged % parts) for i in range(parts)
        ]
        return [Budget(t, m) for t, m in zip(tokens, merged, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Options every method shares: where its tokens go in the sequence and how tiles share the budget (method.md 6, 7).

    Args:
        order: `top_then_merged` | `raster` (a merged token stands at its anchor's place among the kept), and for
            some methods `official` (as their authors order the tokens).
        positions: `renumber` (0..S'-1) | `keep` (original positions; a merged token takes its anchor's).
        tile_budget: `per_tile` | `global` (one ranking over all tiles of a picture).
        vision_layer: block that gives saliency, features and keys; None is the block whose output feeds the projector.
    Raises:
        OptionError: for a value that is none of these.
    """

    order: str = "top_then_merged"
    positions: str = "renumber"
    tile_budget: str = "per_tile"
    vision_layer: int | None = None

    needs: ClassVar[frozenset[str]] = frozenset()
    reduces: ClassVar[bool] = True
    seam: ClassVar[str] = "assembled"
    orders: ClassVar[tuple[str, ...]] = ("top_then_merged", "raster")
    attention_ahead: ClassVar[int] = 0

    @property
    def adaptive(self) -> bool:
        """Whether the number of tokens depends on the picture: such units are reduced one by one."""
        return False

    def entering(self, budget: "Budget", available: int, layers: int) -> list[int]:
        """Visual tokens of one picture of `available` that enter each of the `layers` decoder layers."""
        return [min(budget.tokens, available)] * layers

    def vision_tokens(self, budget: "Budget", shape: "Shape") -> list[int]:
        """Patches of one tile that enter each vision block; fewer where a method merges between attention and MLP."""
        return [shape.patches] * shape.blocks

    def flops(self, shape: "Shape", budget: "Budget") -> float:
        """FLOPs of the method's own work for one picture, two for each multiply-add; none where there is none."""
        return 0.0

    def units(self, shape: "Shape", budget: "Budget") -> list[tuple["Budget", int]]:
        """Budget and size of each unit of one picture: its tiles, or all of it as one."""
        if shape.tiles == 1 or self.tile_budget == "global":
            return [(budget, shape.available)]
        return [(share, shape.patches) for share in budget.share(shape.tiles)]

    def __post_init__(self) -> None:
        choose("order", self.order, self.orders)
        choose("positions", self.positions, ("renumber", "keep"))
        choose("tile_budget", self.tile_budget, ("per_tile", "global"))
        if self.vision_layer is not None and (
            not isinstance(self.vision_layer, int) or isinstance(self.vision_layer, bool)
        ):
            raise OptionError(
                f"vision_layer={self.vision_layer!r} must be the whole number of a vision block, or left out"
            )


class Shape(NamedTuple):
    """Sizes of a model and of one prompt that decide what a prefill costs."""

    layers: int  # decoder layers
    width: int  # D
    heads: int
    kv_heads: int
    head_width: int
    inner: int  # of the gated MLP
    vocabulary: int
    blocks: int  # vision blocks that are run
    vision_width: int  # D_v
    vision_heads: int
    vision_inner: int
    patches: int  # of one tile
    patch_values: int  # numbers in the pixels of one patch
    text: int  # rows that are not visual tokens
    question: int | None = None  # of these, rows after the last picture; None where nobody knows
    tiles: int = 1  # of one picture: the most it can have
    pictures: int = 1  # of the prompt
    classes: int = 1  # class tokens of the vision tower
    projector: int = 0  # weights of the projector, multiply-adds for one patch
    number_bytes: int = 2  # of one number in the cache
    feature_blocks: int = 0  # vision blocks up to the one that feeds the projector; 0: all but the last, as in LLaVA
    joint: int = 768  # width of the space that CLIP's pictures and texts share; of ViT-L, as the next
    text_tower: float = 2.0 * 77 * 12 * 12 * 768**2  # FLOPs of CLIP's text tower for one segment of a question

    @property
    def available(self) -> int:
        """N, visual tokens of one picture."""
        return self.patches * self.tiles

    def known(self, name: str) -> int:
        """A size that may be missing. OptionError where it is."""
        value: int | None = getattr(self, name)
        if value is None:
            raise OptionError(f"shape: {name} is not known, and the cost depends on it. Give Shape(..., {name}=...)")
        return value


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
    stages: Stages | None = None
    zone: Tensor | None = None  # [B, K + M] where each slot stands: AHEAD, PLACE, AFTER, BEHIND; None goes by `order`


AHEAD, PLACE, AFTER, BEHIND = range(4)  # of its unit, where its source is, right after its unit, behind the picture


class Method(Protocol):
    """A reduction method: a frozen dataclass of its options that declares what a host must collect for it."""

    needs: ClassVar[frozenset[str]]
    reduces: ClassVar[bool]

    seam: ClassVar[str]  # where it acts: picture | vision | assembled | decoder
    attention_ahead: ClassVar[int]  # blocks between the one that gives the features and the one whose attention is read

    @property
    def order(self) -> str: ...
    @property
    def positions(self) -> str: ...
    @property
    def tile_budget(self) -> str: ...
    @property
    def vision_layer(self) -> int | None: ...
    @property
    def adaptive(self) -> bool: ...
    def entering(self, budget: Budget, available: int, layers: int) -> list[int]: ...
    def vision_tokens(self, budget: Budget, shape: Shape) -> list[int]: ...
    def flops(self, shape: Shape, budget: Budget) -> float: ...
    def reduce(self, tokens: VisualTokens, budget: Budget) -> Reduction:
        """The `budget.tokens` tokens that replace the N of each unit."""
        ...


def choose(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises OptionError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise OptionError(f"{name}={value!r} must be one of {', '.join(allowed)}")


def within(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    """Raises OptionError unless `value` is a number in [low, high], or (low, high] with `open_low`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (low < value if open_low else low <= value) or not value <= high:  # type: ignore[operator]
        bound = f"above {low:g}" if high == float("inf") else f"in {'(' if open_low else '['}{low:g}, {high:g}]"
        raise OptionError(f"{name}={value!r} must be a number {bound}")


def ensure_finite(stage: str, values: Tensor) -> Tensor:
    """`values`, or NonFiniteError naming the stage. On an accelerator the check is queued, so nothing waits for it."""
    fine = torch.isfinite(values).all()
    message = f"{stage}: NaN or infinite values. Check the weights, or use bfloat16 where float16 overflows"
    if values.device.type == "cpu":
        if not fine:
            raise NonFiniteError(message)
    else:
        torch._assert_async(fine, message)
    return values


def rank(saliency: Tensor) -> Tensor:
    """Indices by (saliency descending, index ascending): [..., N] -> [..., N]. Stable, so ties never depend on the
    device.
    """
    return torch.sort(saliency, dim=-1, descending=True, stable=True).indices


def indices(mask: Tensor, count: int) -> Tensor:
    """The first `count` true places of each row, ascending, where each row has so many: [B, N] -> [B, count]."""
    return torch.sort(mask.to(torch.uint8), dim=-1, descending=True, stable=True).indices[..., :count]


def membership(index: Tensor, size: int) -> Tensor:
    """Which of `size` places an index [B, K] names: bool [B, size]."""
    return torch.zeros(index.shape[0], size, dtype=torch.bool, device=index.device).scatter_(1, index, True)
