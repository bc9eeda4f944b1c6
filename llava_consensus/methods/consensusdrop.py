"""ConsensusDrop: keep the tokens on which the vision tower and the question agree, merge the rest (paper section 3).

The vision tower says how salient each patch is to itself, a probe of the language model's first layer (SCAP) how much
the question's words look at it (`saliency.py`). A fuser makes one saliency of both (`selection.py`); the best K tokens
stay as they are, and the others are folded into M (EGTM, `merging.py`). A prompt without text after its image asks
nothing, so only the vision side decides.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.reduction import merging, saliency, selection
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import ReadsTower, Shape
from llava_consensus.reduction.options import NotNegative, Positive, Ratio
from llava_consensus.reduction.selection import Folded, assemble, diverse, left_over, split_best
from llava_consensus.reduction.tokens import Need, Reduction, Stopwatch, TextProbe, VisualTokens

FUSED = (("select", "diverse"), ("fps_start", "salient"))


class Saliencies(NamedTuple):
    """The saliencies of the units, [B, N] each."""

    vision: Tensor
    cross: Tensor | None  # None for prompts without text after the image
    fused: Tensor | None  # sums to 1; None in the recovery fuser, which ranks by each side in turn


@dataclass(frozen=True, kw_only=True)
class ConsensusDrop(ReadsTower):
    """Fuse vision-encoder saliency with query-aware saliency (SCAP), keep the best K tokens, merge the rest into M
    (EGTM).

    Args:
        vision_score: `class` (attention of the class token) | `tokens` (attention received from the other patches).
        aggregate: how SCAP's text rows become one saliency: their mean, the last of them, or their maximum.
        scap_rope: whether SCAP rotates queries and keys as the host does.
        fuser: `convex` (one saliency, a weighted sum of both) | `recovery` (the student's ranking, then the teacher's).
        alpha: weight of the vision side in the convex fuser; 1 is vision-only, 0 is cross-only.
        student: whose ranking comes first in the recovery fuser.
        rate: share of the kept tokens the teacher adds in the recovery fuser.
        tau_vision, tau_cross: softmax temperature of the vision and of the cross saliency.
        fps_start: where EGTM's sampling starts: at the first token, the most salient one, or the one farthest from the
            mean feature.
        select: `top` (the paper) | `diverse`, which weighs the fused saliency with the distance to the kept tokens.
        quality: exponent of the saliency in diverse selection.
        answer_rows: whether rows with labels, the answer in training, count among the text rows that are asked.
    Raises:
        OptionError: for options that need a fused saliency together with `fuser=recovery`, which has none.
    """

    vision_score: Literal["class", "tokens"] = "class"
    aggregate: saliency.Aggregate = "all"
    scap_rope: bool = True
    fuser: Literal["convex", "recovery"] = "convex"
    alpha: Ratio = 0.7
    student: Literal["vision", "cross"] = "vision"
    rate: Ratio = 0.1
    tau_vision: Positive = 1.0
    tau_cross: Positive = 1.0
    fps_start: merging.Start = "first"
    select: Literal["top", "diverse"] = "top"
    quality: NotNegative = 1.0
    answer_rows: bool = False

    needs: ClassVar[frozenset[Need]] = frozenset({Need.ATTENTION, Need.FEATURES, Need.PROBE})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in FUSED:
            if getattr(self, name) == value and self.fuser == "recovery":
                raise OptionError(
                    f"{name}={value!r} needs a fused saliency, which fuser='recovery' has not: take fuser='convex'"
                )

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Saliency, SCAP with layer 0's two projections, selection, sampling, assignment and merge, for one image.

        Raises:
            OptionError: for a shape that does not say how many text rows follow the image.
        """
        if budget.tokens >= shape.available:
            return 0.0
        head, rows = shape.heads * shape.head_width, shape.known("question")
        sequence = shape.images * shape.available + shape.text  # keys of the whole prompt, once for all its images
        keys = sequence * shape.width * shape.kv_heads * shape.head_width / shape.images
        probe = keys + rows * head * (shape.width + sequence)
        queries = 1 if self.vision_score == "class" and shape.classes else shape.patches
        saliency = shape.tiles * queries * (shape.patches + shape.classes) * shape.vision_width
        merging = 0
        for share, size in self.units(shape, budget):
            kept, merged = share.split(size)
            key = shape.vision_width // shape.vision_heads
            merging += merged * (size - kept) * (shape.vision_width + key + shape.width)  # anchors, assignment, average
            merging += size * size * shape.vision_width if self.select == "diverse" else 0
        return 2.0 * (probe + saliency + merging)

    def reduce(self, tokens: VisualTokens, budget: Budget) -> Reduction:
        """K kept and M merged tokens of each unit. Gradients flow to the projected tokens only."""
        watch = Stopwatch(tokens.projected.device)
        available = tokens.projected.shape[1]
        count, merged = budget.split(available)
        with torch.no_grad():
            saliencies = self.saliencies(tokens, watch)
            with watch.time("fusion"):
                kept, rest = self._choose(tokens, saliencies, count)  # [B, K], [B, N - K]
        with watch.time("merge"):
            folded = self._fold(tokens, saliencies.fused, rest, merged) if merged else None
        with watch.time("output"):
            result = assemble(tokens.projected, kept, self.order, folded)
        return result._replace(vision=saliencies.vision, cross=saliencies.cross, fused=saliencies.fused, watch=watch)

    def saliencies(self, tokens: VisualTokens, watch: Stopwatch) -> Saliencies:
        with watch.time("saliency"):
            vision = self._vision(tokens)
        with watch.time("scap"):
            cross = self._cross(tokens)
        if self.fuser == "recovery":
            return Saliencies(vision, cross, None)
        with watch.time("fusion"):
            if cross is None:
                fused = selection.temperature(vision, self.tau_vision)
            elif self.tau_vision == self.tau_cross:  # both sides in one tensor, [2, B, N]
                sides = selection.temperature(torch.stack((vision, cross)), self.tau_vision)
                fused = selection.convex(sides[0], sides[1], self.alpha)
            else:
                side_v = selection.temperature(vision, self.tau_vision)
                fused = selection.convex(side_v, selection.temperature(cross, self.tau_cross), self.alpha)
        return Saliencies(vision, cross, fused)

    def _vision(self, tokens: VisualTokens) -> Tensor:
        """Saliency by the vision tower, on one scale for all tiles of a unit: [B, N]."""
        score = saliency.class_saliency if self.vision_score == "class" else saliency.received_saliency
        vision = tokens.of_tiles(score(tokens.needed(Need.ATTENTION)))
        if tokens.tiles_per_unit > 1:
            vision = saliency.pool_tiles(vision, tokens.tile, tokens.tiles_per_unit)
        return vision

    def _cross(self, tokens: VisualTokens) -> Tensor | None:
        """Saliency by the question: [B, N]; None if no text follows the images."""
        probe: TextProbe = tokens.needed(Need.PROBE)
        if not probe.rows.shape[1]:
            return None
        assert tokens.prompt is not None and tokens.columns is not None  # they come with the probe
        return saliency.text_saliency(
            probe, tokens.prompt, tokens.columns, tokens.asking, self.aggregate, self.scap_rope
        )

    def _choose(self, tokens: VisualTokens, saliencies: Saliencies, count: int) -> tuple[Tensor, Tensor]:
        """The K kept tokens and the others, both in ascending index order: [B, K], [B, N - K]."""
        vision, cross, fused = saliencies
        if fused is not None and self.select == "diverse":
            kept = diverse(fused, tokens.of_tiles(tokens.needed(Need.FEATURES)), count, self.quality)
        elif fused is None and cross is not None:  # the student's best, with those that the teacher would miss
            student, teacher = (vision, cross) if self.student == "vision" else (cross, vision)
            kept = selection.recover(student, teacher, count, self.rate)
        else:
            return split_best(vision if fused is None else fused, count)
        return kept, left_over(kept, vision.shape[1])

    def _fold(self, tokens: VisualTokens, fused: Tensor | None, rest: Tensor, count: int) -> Folded | None:
        """The `rest` [B, R] of each unit folded into `count` tokens."""
        with torch.no_grad():
            others = tokens.only(rest)
            left = fused.gather(1, rest) if self.fps_start == "salient" and fused is not None else None
            keys = others.of_tiles(tokens.needed(Need.ATTENTION).patch_keys())
            features = others.of_tiles(tokens.needed(Need.FEATURES))
            anchors, group = merging.group(features, keys, count, self.fps_start, left)
        return merging.fold(tokens.projected, rest, anchors, group)
