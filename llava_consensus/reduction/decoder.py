"""Base of the methods that cut inside the language model: when they cut, their view there, their result.

A host runs the decoder's layers and stops before each layer a `Cut` names; the method chooses among the visual
tokens still there, from the attention of a few query rows. Letters as in `tokens.py`: P images at one cut, v their
visual tokens still there, n the ones they began with, L query rows, W length of the current sequence. Torch only.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method, Place, Shape
from llava_consensus.reduction.saliency import head_rows
from llava_consensus.reduction.tokens import Stopwatch, TextProbe, VisualTokens, ensure_finite

PUBLISHED_DEPTH = 32  # decoder layers of the models the methods were published on


class Cut(NamedTuple):
    """One cut of one image."""

    layer: int  # the first decoder layer, from 0, that sees the shortened sequence
    kept: int  # visual tokens that stay
    merged: int = 0  # tokens made of dropped ones, put after the image

    @property
    def left(self) -> int:
        return self.kept + self.merged


class DecoderView(NamedTuple):
    """P images at one cut, all of them with v visual tokens left of n."""

    tokens: int  # T of the budget
    cut: Cut
    hidden: Tensor  # [P, v, D] visual tokens as they enter the layer
    asked: Tensor  # [P, L, D] the asked rows as they enter the layer
    columns: Tensor  # [P, v] their places in the current sequence
    probe: TextProbe  # queries of the asked rows [P, H, L, d], keys of the current sequence [P, H_kv, W, d]
    visual_inputs: Tensor  # [P, n, D] the image's tokens as they entered layer 0
    text_inputs: Tensor  # [P, L, D] the asked rows as they entered layer 0
    norm: Callable[[Tensor], Tensor]  # the decoder's final norm
    tower: VisualTokens | None = None  # tensors of the vision tower that the method `needs`, of the image's n tokens
    memo: dict[str, Tensor] | None = None  # tensors that the method keeps for its later cuts of these images


class Chosen(NamedTuple):
    """Result of one cut. Indices count the v tokens of the view."""

    kept: Tensor  # [P, K] ascending
    merged: Tensor | None = None  # [P, M, D] hidden states of new tokens, in output order
    centres: Tensor | None = None  # [P, M] the dropped token each of them represents
    measures: Mapping[str, Tensor] = MappingProxyType({})  # [P, ...] numbers about this choice, for the record
    joined: Tensor | None = None  # [P, v] which of the M each token went into, -1 for none
    in_place: bool = False  # whether new tokens take the places of their centres; else after the image

    def sizes(self) -> Tensor:
        """Number of tokens each new one was made of, float32 [P, M]; 1 if `joined` does not say."""
        assert self.centres is not None
        if self.joined is None:
            return torch.ones_like(self.centres, dtype=torch.float32)
        none = torch.zeros(len(self.joined), self.centres.shape[1] + 1, device=self.joined.device)
        return none.scatter_add(1, self.joined + 1, torch.ones_like(self.joined, dtype=none.dtype))[:, 1:]


@dataclass(frozen=True, kw_only=True)
class InDecoder(Method, ABC):
    """Base of the methods that act between decoder layers. `tokens` is T of one image, whatever its tiles.

    A method says in `plan` where it cuts and how much, and in `select` which tokens stay. Newlines of tiled images
    are no candidates.

    Args:
        positions: `keep` leaves rotary positions as they were, and decoding continues at the position after the full
            prompt in every layer; `renumber` closes the gaps, and each layer continues after its own cache.
        answer_rows: whether rows with labels, the answer in training, count among the text rows that are asked.
    """

    positions: Literal["renumber", "keep"] = "renumber"
    answer_rows: bool = False

    place: ClassVar[Place] = Place.DECODER
    asks: ClassVar[str] = "last"  # whose queries `probe` has: last (row of the prompt) | text (rows after the image)
    # which layer's `probe` has: previous | own (that is cut before) | none; values: of the previous one its values in
    # place of queries [P, H_kv, L, d] and keys, and the angles of the layer that is cut before, mean over axes
    attention: ClassVar[str] = "previous"

    @property
    def tile_budget(self) -> str:
        return "global"

    @property
    def reads_prompt(self) -> bool:
        return True

    @property
    def renumbers(self) -> bool:
        return self.positions == "renumber"

    @property
    def calibrates(self) -> bool:
        """True if attention after a cut is calibrated by distance and size (`calibration.py`)."""
        return False

    def closes_gaps(self, layer: int) -> bool:
        """True if position ids have no gaps from this layer on, before which there is a cut."""
        return self.renumbers

    @abstractmethod
    def plan(self, tokens: int, available: int, layers: int) -> list[Cut]:
        """Cuts of an image of `available` tokens, more than T, by ascending layer."""

    @abstractmethod
    def select(self, view: DecoderView, watch: Stopwatch) -> Chosen:
        """Choose the tokens of the v that stay."""

    def entering(self, budget: Budget, available: int, layers: int) -> list[int]:
        """Visual tokens of one image of `available` that enter each of the `layers` decoder layers."""
        counts = [available] * layers
        for cut in self.cuts(budget, available, layers):
            counts[cut.layer :] = [cut.left] * (layers - cut.layer)
        return counts

    def cuts(self, budget: Budget, available: int, layers: int) -> list[Cut]:
        """The plan; empty if the budget is not below the number of tokens.

        Raises:
            OptionError: for a model of one layer, if there is no place to cut.
        """
        if budget.tokens >= available:
            return []
        if layers < 2:
            raise OptionError(f"{type(self).__name__} cuts between decoder layers: this model has only {layers}")
        unique = {cut.layer: cut for cut in self.plan(budget.tokens, available, layers)}  # the last one counts
        return [unique[layer] for layer in sorted(unique)]

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Attention of the asked rows at every cut, without softmax; all text is taken to follow the image."""
        rows = 1 if self.asks == "last" else shape.text
        left, spent = shape.patches, 0.0
        for cut in self.cuts(budget, shape.patches, shape.layers):
            spent += 2.0 * shape.heads * shape.head_width * rows * (left + shape.text)
            if self.attention == "own":
                spent += 2.0 * shape.width * shape.head_width * (shape.heads * rows)
                spent += 2.0 * shape.width * shape.head_width * shape.kv_heads * (left + shape.text)
            left = cut.left
        return spent


def scaled(cuts: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """Layers to cut before in a model of `layers`: as published from 32 on; in a shallower model in proportion,
    rounded, each at least one layer after the one before it, and cuts that no longer fit fall together on the last.
    """
    if layers >= PUBLISHED_DEPTH:
        return cuts
    fitted: list[int] = []
    for cut in cuts:
        nearest = (2 * cut * layers + PUBLISHED_DEPTH) // (2 * PUBLISHED_DEPTH)
        fitted.append(min(max(nearest, fitted[-1] + 1 if fitted else 1), layers - 1))
    return tuple(fitted)


def only_cut(layer: int | None, published: int, layers: int) -> int:
    """The layer of a method that cuts once: as the user says, or the published one.

    Raises:
        OptionError: for a layer the model does not have.
    """
    cut = scaled((published,), layers)[0] if layer is None else layer
    if not 1 <= cut < layers:
        raise OptionError(f"layer={cut} must be in 1..{layers - 1}: the model has {layers} decoder layers")
    return cut


def last_row_saliency(view: DecoderView, method: str) -> Tensor:
    """Head-mean attention of the last prompt row over the visual tokens: [P, v]. `method` is its name in errors."""
    rows = at_columns(head_rows(view.probe), view.columns)  # [P, H, 1, v]
    return ensure_finite(f"{method}'s attention row", rows.mean((1, 2)))


def at_columns(rows: Tensor, columns: Tensor) -> Tensor:
    """Attention of the visual tokens only: [P, H, L, W], [P, v] -> [P, H, L, v]."""
    return rows.gather(3, columns[:, None, None].expand(-1, rows.shape[1], rows.shape[2], -1))
