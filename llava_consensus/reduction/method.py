"""Bases of the reduction methods. A method is a frozen dataclass of its options that derives from one of the bases
below, one for each place where a method can act.

    AtImage      on the image: the vision tower sees fewer patches
    AtCells      on its cells: the vision tower sees some of the patches
    InTower      inside the vision tower: patches are merged between its blocks
    AfterTower   after the tower: the language model gets fewer tokens
    InDecoder    between the layers of the language model (`decoder.py`)

Of those after the tower, a `Ranker` writes one function, the saliency of each token, and a `Selector` the choice of
tokens. A method has only the options that act where it acts. `needs` names the inputs that a host collects.
Torch only.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.merging import Bag
from llava_consensus.reduction.options import check_options
from llava_consensus.reduction.selection import assemble, rank, regroup
from llava_consensus.reduction.tokens import Need, Reduction, VisualTokens, ensure_finite

Order = Literal["top_then_merged", "raster"]
Positions = Literal["renumber", "keep", "mean", "spread"]
OfficialOrder = Literal["official", "top_then_merged", "raster"]


class Shape(NamedTuple):
    """Sizes of a model and of one prompt that decide the cost of a prefill."""

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
    patches: int  # visual tokens of one tile, each one patch of the tower unless `merged` says more
    patch_values: int  # numbers in the pixels of one patch
    text: int  # rows that are not visual tokens
    question: int | None = None  # of these, rows after the last image; None if it is not known
    tiles: int = 1  # of one image: the most it can have
    images: int = 1  # of the prompt
    classes: int = 1  # class tokens of the vision tower
    projector: int = 0  # weights of the projector, multiply-adds for one patch
    number_bytes: int = 2  # of one number in the cache
    feature_blocks: int = 0  # vision blocks up to the one that feeds the projector; 0: all but the last, as in LLaVA
    joint: int = 768  # width of the space that CLIP's images and texts share; of ViT-L, as the next
    merged: int = 1  # patches of the tower that make one visual token
    varies: bool = False  # whether the number of tokens depends on the size of the image; `patches` are then the most
    text_tower: float = 2.0 * 77 * 12 * 12 * 768**2  # FLOPs of CLIP's text tower for a segment; 0 if there is none
    single: bool = True  # whether the projector takes the patches one by one

    @property
    def available(self) -> int:
        """N, visual tokens of one image."""
        return self.patches * self.tiles

    def known(self, name: str) -> int:
        """A size that may be missing. OptionError if it is."""
        value: int | None = getattr(self, name)
        if value is None:
            raise OptionError(f"shape: {name} is not known, and the cost depends on it. Give Shape(..., {name}=...)")
        return value


class Place(Enum):
    """Stage of the model at which a method acts."""

    IMAGE = "the image"
    CELLS = "the cells of the image"
    TOWER = "inside the vision tower"
    TOKENS = "after the vision tower"
    DECODER = "between decoder layers"


@dataclass(frozen=True, kw_only=True)
class Method:
    """Interface of every method for hosts and the harness. The properties are options where a base makes them fields.

    Raises:
        OptionError: for an option that its annotation does not allow (`options.py`), when the method is made.
    """

    answer_version: ClassVar[int] = 1  # raised by hand where the same options come to choose other tokens
    title: ClassVar[str] = ""  # in tables, as its paper writes it; empty: the name it is registered under
    place: ClassVar[Place] = Place.TOKENS
    needs: ClassVar[frozenset[Need]] = frozenset()
    instead: ClassVar[frozenset[Need] | None] = None  # its needs on a tower that does not give all of `needs`
    reduces: ClassVar[bool] = True
    by_grid: ClassVar[bool] = False  # whether it chooses tokens by their places in the image
    multiplies_nothing: ClassVar[bool] = False  # whether its own work has no matrix product, so that `flops` is 0
    asked = frozenset[str]()  # options given explicitly, even at their defaults; set by `make`
    blocks_ahead: ClassVar[int] = 0  # from the vision block whose output is read to the one whose attention is read
    early: ClassVar[float] = 0.0  # share of the vision blocks that ends with the one of EARLIER

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def order(self) -> str:
        """Order of the reduced tokens in the sequence."""
        return "raster"

    @property
    def positions(self) -> str:
        """`renumber` (0..S'-1), `keep` (original positions; a merged token takes its anchor's) or `mean` (likewise, but
        a merged token takes the mean of its members', rounded).
        """
        return "renumber"

    @property
    def newlines(self) -> str:
        """`keep` or `drop` the newlines of a tiled image that is reduced."""
        return "keep"

    @property
    def tile_budget(self) -> str:
        """`per_tile`, `most_tiles` or `global` (one ranking over all tiles of an image), see `Tiled`."""
        return "per_tile"

    @property
    def vision_layer(self) -> int | None:
        """Vision block that is read; None is the one whose output feeds the projector."""
        return None

    @property
    def early_layer(self) -> int | None:
        """Vision block whose attention is read as EARLIER; None is the one that `early` says."""
        return None

    @property
    def answer_rows(self) -> bool:
        """True if rows with labels, the answer in training, count among the text rows that are asked."""
        return False

    @property
    def adaptive(self) -> bool:
        """True if the number of tokens depends on the image: such units are reduced one by one."""
        return False

    @property
    def width(self) -> int | None:
        """Width of the projected tokens that it was trained for; None if it takes any."""
        return None

    @property
    def recorded(self) -> dict[str, str]:
        """Options that a run records otherwise than as they were given: files, with a checksum of their content."""
        return {}

    @property
    def reads_prompt(self) -> bool:
        """True if the choice of tokens depends on the question asked about the image."""
        return bool(self.needs & {Need.PROBE, Need.FINGERPRINT, Need.QUESTION, Need.WORDS})

    @property
    def acts_inside(self) -> bool:
        return self.place in (Place.IMAGE, Place.CELLS, Place.TOWER)

    def query(self, question: str) -> str:
        """The part of a prompt's text that counts as the question, for methods that read it themselves."""
        return question

    def entering(self, budget: Budget, available: int, layers: int) -> list[int]:
        """Visual tokens of one image of `available` that enter each of the `layers` decoder layers."""
        return [min(budget.tokens, available)] * layers

    def vision_tokens(self, budget: Budget, shape: Shape) -> list[int]:
        """Patches of one tile that enter each vision block; fewer where a method merges between attention and MLP."""
        return [shape.patches] * shape.blocks

    def flops(self, shape: Shape, budget: Budget) -> float | None:
        """FLOPs of the method's own work for one image, two for each multiply-add; None if they are unknown."""
        return 0.0 if self.multiplies_nothing else None

    def units(self, shape: Shape, budget: Budget) -> list[tuple[Budget, int]]:
        """Budget and size of each unit of one image: its tiles, or all of it as one."""
        if (
            shape.tiles == 1
            or self.tile_budget == "global"
            or (isinstance(self, Tiled) and budget.tokens < shape.tiles)
        ):
            return [(budget, shape.available)]
        return [(share, shape.patches) for share in budget.share(shape.tiles)]

    def losing(self, shape: Shape, budget: Budget) -> list[tuple[int, int]]:
        """Tokens that stay, and size, of each unit of one image that loses some."""
        return [(share.tokens, size) for share, size in self.units(shape, budget) if share.tokens < size]

    def reduce(self, tokens: VisualTokens, budget: Budget) -> Reduction:
        """The tokens that replace the N of each unit. Methods that act between decoder layers have no such step."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Placed(Method):
    """Base of the methods that act before the language model: where their tokens are in its sequence.

    Args:
        order: `top_then_merged` | `raster` (a merged token is at its anchor's place among the kept), and for some
            methods `official` (as their authors order the tokens).
        positions: `renumber` (0..S'-1) | `keep` (original positions; a merged token takes its anchor's) | `mean` (like
            `keep`, but a merged token takes the mean of its members' positions, rounded) | `spread` (evenly over the
            span of the image, in the order of the tokens).
        newlines: of a tiled image that is reduced: `keep` (outside the budget) | `drop`. Those of an image that
            stays as it is, and of videos, always stay.
    """

    order: Order = "top_then_merged"
    positions: Positions = "renumber"
    newlines: Literal["keep", "drop"] = "keep"


@dataclass(frozen=True, kw_only=True)
class AfterTower(Placed, ABC):
    """Base of the methods that act after the vision tower: they write `reduce`."""

    @abstractmethod
    def reduce(self, tokens: VisualTokens, budget: Budget) -> Reduction:
        """The tokens that replace the N of each unit."""


class Selected(NamedTuple):
    """The tokens that a `Selector` keeps, and the saliencies that it used."""

    kept: Tensor  # [B, K] in any order
    vision: Tensor | None = None  # [B, N] saliencies for the record, as in `Reduction`
    cross: Tensor | None = None
    fused: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Selector(AfterTower, ABC):
    """Base of the methods after the tower that keep tokens as they are and merge none: they write `choose`."""

    @abstractmethod
    def choose(self, tokens: VisualTokens, count: int) -> Selected:
        """`count` of the N tokens of each unit, none twice. Runs without gradients."""

    def reduce(self, tokens: VisualTokens, budget: Budget) -> Reduction:
        """T tokens of each unit, none merged. Gradients flow to the projected tokens only."""
        with torch.no_grad():
            kept, vision, cross, fused = self.choose(tokens, min(budget.tokens, tokens.projected.shape[1]))
            kept = kept.sort(dim=1).values
        return assemble(tokens.projected, kept, self.order)._replace(vision=vision, cross=cross, fused=fused)


@dataclass(frozen=True, kw_only=True)
class Ranker(Selector, ABC):
    """Base of the methods after the tower that keep the T tokens of the largest saliency: they write `saliency`."""

    @abstractmethod
    def saliency(self, tokens: VisualTokens) -> Tensor:
        """Saliency of each token, [B, N], from the inputs in `needs`. Ties go to the lower index."""

    def choose(self, tokens: VisualTokens, count: int) -> Selected:
        """The most salient tokens."""
        saliency = ensure_finite("saliency", self.saliency(tokens))
        return Selected(rank(saliency)[:, :count], fused=saliency)


@dataclass(frozen=True, kw_only=True)
class Tiled(AfterTower):
    """Base of the methods after the tower that rank tokens, within a tile or over all tiles of an image.

    Args:
        tile_budget: `per_tile` (the budget shared over the image's own tiles) | `global` (one ranking over all of
            them) | `most_tiles` (a tile gets 1/n of the budget, n the most tiles an image of this model can have: the
            rule of LLaVA-NeXT's tables, by which images of fewer tiles keep fewer tokens).
    """

    tile_budget: Literal["per_tile", "global", "most_tiles"] = "per_tile"


@dataclass(frozen=True, kw_only=True)
class ReadsTower(Tiled):
    """Base of the methods after the tower that read attention or features of one of its blocks.

    Args:
        vision_layer: the block that is read, from 0, or from the end if negative; None is the one that feeds the
            projector.
    """

    vision_layer: int | None = None


@dataclass(frozen=True, kw_only=True)
class ReadsBlocks(ReadsTower):
    """Base of the methods after the tower that read the attention of an earlier block too.

    Args:
        early_layer: the earlier block, from 0, or from the end if negative; None is the one at the depth where the
            authors read it, or where its attention stays within windows, the nearest that looks at everything.
    """

    early_layer: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Spread(Placed):
    """Base of methods before the projector: T tokens are left, spread over the patches they came from."""

    order: Order = "raster"

    def left(self, budget: Budget, available: int, side: int = 0) -> int:
        """Tokens the tower leaves of a tile of `available`, `side` in a row; 0 of a square."""
        return min(budget.tokens, available)

    def reduce(self, tokens: VisualTokens, budget: Budget) -> Reduction:
        """One row for each token that the tower has left."""
        if tokens.slot is None:
            raise LookupError(f"{type(self).__name__} acts before the projector: the host did not let it")
        count = self.left(budget, tokens.slot.shape[1], tokens.side)
        return regroup(tokens.projected, tokens.slot[tokens.tile, tokens.patch], count)


@dataclass(frozen=True, kw_only=True)
class InTower(_Spread, ABC):
    """Base of the methods that merge tokens inside the vision tower, between attention and MLP of each block."""

    place: ClassVar[Place] = Place.TOWER

    @property
    def masks(self) -> bool:
        """True if `bias` is used, which needs an attention kernel that takes an additive mask."""
        return False

    @abstractmethod
    def schedule(self, tokens: int, patches: int, blocks: int) -> list[int]:
        """Patches to merge away in each block, `patches - tokens` in all. OptionError if that cannot be."""

    def bias(self, bag: Bag) -> Tensor | None:
        """Added to the logits of each key before the softmax: [U, t], or None."""
        return None

    @abstractmethod
    def fold(self, bag: Bag, key: Tensor, count: int, protected: bool) -> Bag:
        """The bag with `count` tokens fewer. `key`: [U, H, t, d]; `protected`: token 0 is a class token and stays."""


@dataclass(frozen=True, kw_only=True)
class AtImage(_Spread, ABC):
    """Base of the methods that make the image smaller before the vision tower sees it."""

    place: ClassVar[Place] = Place.IMAGE

    @abstractmethod
    def image_size(self, tokens: int, rows: int = 1, columns: int = 1) -> tuple[int, int]:
        """Rows and columns of tokens that a tile of rows x columns is shrunk to by this budget; 1 x 1 is any square."""


@dataclass(frozen=True, kw_only=True)
class AtCells(_Spread, ABC):
    """Base of the methods by which the vision tower sees some cells of an image, the squares of patches that make a
    token. The count depends on the image, so images run one at a time with one GPU sync each.
    """

    place: ClassVar[Place] = Place.CELLS

    @property
    def adaptive(self) -> bool:
        """True: the image decides how many tokens stay."""
        return True

    @abstractmethod
    def stand_ins(self, cells: Tensor) -> Tensor:
        """Place of the cell that represents each, its own for one that stays: pixels [rows, columns, V] -> [rows,
        columns]. No cell is represented by a later one.
        """

    def reduce(self, tokens: VisualTokens, budget: Budget) -> Reduction:
        """One row for each cell that the tower has seen."""
        if tokens.slot is None:
            raise LookupError(f"{type(self).__name__} acts before the tower: the host did not let it")
        slot = tokens.slot[tokens.tile, tokens.patch]
        return regroup(tokens.projected, slot, int(slot.max()) + 1)
