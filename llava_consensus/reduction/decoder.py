"""What methods that cut inside the language model share: when they cut, what they see there, and what they hand back.

A host runs the decoder's layers and stops before each layer a `Stage` names; the method chooses among the visual
tokens still there, from the attention of a few query rows. Letters as in `tokens.py`: P pictures at one cut, v their
visual tokens still there, n the ones they began with, L query rows, W length of the current sequence. Torch only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Placement
from llava_consensus.reduction.scap import rotate
from llava_consensus.reduction.shape import Shape
from llava_consensus.reduction.stopwatch import Stopwatch
from llava_consensus.reduction.tokens import Reduction, TextProbe, VisualTokens

PUBLISHED_DEPTH = 32  # decoder layers of the models the methods were published on


class Stage(NamedTuple):
    """One cut of one picture."""

    layer: int  # the first decoder layer, from 0, that sees the shortened sequence
    kept: int  # visual tokens that stay
    merged: int = 0  # tokens made of dropped ones, put behind the picture

    @property
    def left(self) -> int:
        """Visual tokens after the cut."""
        return self.kept + self.merged


class DecoderView(NamedTuple):
    """P pictures at one cut, all of them with v visual tokens left of n."""

    tokens: int  # T of the budget
    stage: Stage
    hidden: Tensor  # [P, v, D] visual tokens as they enter the layer
    asked: Tensor  # [P, L, D] the asked rows as they enter the layer
    columns: Tensor  # [P, v] their places in the current sequence
    probe: TextProbe  # queries of the asked rows [P, H, L, d], keys of the current sequence [P, H_kv, W, d]
    visual_inputs: Tensor  # [P, n, D] the picture's tokens as they entered layer 0
    text_inputs: Tensor  # [P, L, D] the asked rows as they entered layer 0
    norm: Callable[[Tensor], Tensor]  # the decoder's final norm


class Cut(NamedTuple):
    """What a method hands back. Indices count the v tokens of the view."""

    kept: Tensor  # [P, K] ascending
    merged: Tensor | None = None  # [P, M, D] hidden states of new tokens, in output order
    centres: Tensor | None = None  # [P, M] the dropped token each of them stands for


@dataclass(frozen=True, kw_only=True)
class DecoderMethod(Placement):
    """Base of the methods that act between decoder layers. `tokens` is T of one picture, whatever its tiles.

    A method says in `plan` where it cuts and how much, and in `select` which tokens stay. Newlines of tiled pictures
    are no candidates. `positions=keep` leaves rotary positions as they were, and decoding goes on at the position
    after the full prompt in every layer; `renumber` closes the gaps, and each layer goes on after its own cache.
    """

    tile_budget: str = "global"

    seam: ClassVar[str] = "decoder"
    rows: ClassVar[str] = "last"  # which rows `probe` has queries of: last (of the prompt) | text (after the picture)
    looks: ClassVar[str] = "previous"  # whose queries and keys: previous | own (of the layer that is cut before)

    @property
    def alone(self) -> bool:
        """Whether pictures must come one by one, because the count is read from the data."""
        return False

    @property
    def renumbers(self) -> bool:
        """Whether position ids close the gaps after a cut."""
        return self.positions == "renumber"

    def plan(self, tokens: int, available: int, layers: int) -> list[Stage]:
        """Cuts of a picture of `available` tokens, more than T, by ascending layer."""
        raise NotImplementedError

    def select(self, view: DecoderView, stages: Stopwatch) -> Cut:
        """Which of the v tokens stay."""
        raise NotImplementedError

    def reduce(self, tokens: VisualTokens, budget: Budget) -> Reduction:
        """Not for these methods: what they keep is chosen while the language model runs."""
        raise OptionError(f"{type(self).__name__} acts between decoder layers, and this host has no seam there")

    def entering(self, budget: Budget, available: int, layers: int) -> list[int]:
        """Visual tokens of one picture of `available` that enter each of the `layers` decoder layers."""
        counts = [available] * layers
        for stage in self.stages(budget, available, layers):
            counts[stage.layer :] = [stage.left] * (layers - stage.layer)
        return counts

    def stages(self, budget: Budget, available: int, layers: int) -> list[Stage]:
        """The plan; none where the budget is not below what there is.

        Raises:
            OptionError: for a model of one layer, where there is no place to cut.
        """
        if budget.tokens >= available:
            return []
        if layers < 2:
            raise OptionError(f"{type(self).__name__} cuts between decoder layers: this model has only {layers}")
        unique = {stage.layer: stage for stage in self.plan(budget.tokens, available, layers)}  # the last one counts
        return [unique[layer] for layer in sorted(unique)]

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Attention of the asked rows at every cut, queries times keys, softmax not counted. All text of the shape is
        taken to stand after the picture.
        """
        rows = 1 if self.rows == "last" else shape.text
        left, spent = shape.patches, 0.0
        for stage in self.stages(budget, shape.patches, shape.layers):
            spent += 2.0 * shape.heads * shape.head_width * rows * (left + shape.text)
            if self.looks == "own":
                spent += 2.0 * shape.width * shape.head_width * (shape.heads * rows)
                spent += 2.0 * shape.width * shape.head_width * shape.kv_heads * (left + shape.text)
            left = stage.left
        return spent


def scaled(cuts: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """Layers to cut before in a model of `layers`: as published from 32 on; in a shallower model in proportion,
    rounded, each at least one layer after the one before it, and cuts that no longer fit fall together on the last.
    """
    if layers >= PUBLISHED_DEPTH:
        return cuts
    found: list[int] = []
    for cut in cuts:
        nearest = (2 * cut * layers + PUBLISHED_DEPTH) // (2 * PUBLISHED_DEPTH)
        found.append(min(max(nearest, found[-1] + 1 if found else 1), layers - 1))
    return tuple(found)


def attention_rows(probe: TextProbe) -> Tensor:
    """Causal attention of the asked rows over the current sequence, head by head, in float32: [P, H, L, W]."""
    cos, sin = probe.cos.float(), probe.sin.float()
    at_rows = probe.rows[..., None].expand(*probe.rows.shape, cos.shape[-1])
    query = rotate(probe.query.float(), cos.gather(1, at_rows), sin.gather(1, at_rows))
    key = rotate(probe.key.float(), cos, sin)
    query = query.unflatten(1, (key.shape[1], -1))  # [P, H_kv, groups, L, d]
    logits = (query @ key.unsqueeze(2).transpose(-1, -2) * probe.scale).flatten(1, 2)  # [P, H, L, W]
    place = torch.arange(key.shape[2], device=key.device)
    seen = ((place <= probe.rows[..., None]) & probe.key_mask[:, None]) | ~probe.row_mask[..., None]
    return torch.softmax(logits.masked_fill(~seen[:, None], float("-inf")), dim=-1)


def at_columns(rows: Tensor, columns: Tensor) -> Tensor:
    """Attention of the visual tokens alone: [P, H, L, W], [P, v] -> [P, H, L, v]."""
    return rows.gather(3, columns[:, None, None].expand(-1, rows.shape[1], rows.shape[2], -1))
