"""What a reduction method is."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from llava_consensus.errors import OptionError
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.checks import choose
from llava_consensus.reduction.shape import Shape
from llava_consensus.reduction.tokens import Reduction, VisualTokens


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
