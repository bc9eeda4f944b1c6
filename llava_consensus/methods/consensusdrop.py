"""ConsensusDrop: keep the tokens on which the vision tower and the question agree, merge the rest (the paper;
settled in method.md).
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.reduction import egtm, fusers, saliency, scap
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.checks import choose, ensure_finite, within
from llava_consensus.reduction.diversity import diverse
from llava_consensus.reduction.method import Placement
from llava_consensus.reduction.output import Folded, assemble, left_over, pick
from llava_consensus.reduction.shape import Shape
from llava_consensus.reduction.stopwatch import Stopwatch
from llava_consensus.reduction.tokens import Reduction, VisualTokens

FUSERS = {"convex": fusers.convex, "product": fusers.product, "rank": fusers.by_rank}


class Saliencies(NamedTuple):
    """The three saliencies of a unit: [B, N] each, of which the fused one sums to 1."""

    vision: Tensor
    cross: Tensor
    fused: Tensor


@dataclass(frozen=True, kw_only=True)
class ConsensusDrop(Placement):
    """Fuse vision-encoder saliency with query-aware saliency (SCAP), keep the best K tokens, merge the rest into M
    (EGTM).

    Args:
        vision_score: `class` (attention of the class token) | `tokens` (attention received from the other patches).
        aggregate: `all` | `last` | `max`, how SCAP's text rows become one saliency.
        scap_rope: whether SCAP rotates queries and keys as the host does.
        fuser: `convex` | `recovery`, and beyond the paper `product` | `rank`.
        alpha: weight of the vision side in every fuser but recovery, in [0, 1]; 1 is vision-only, 0 is cross-only.
        student: `vision` | `cross`, whose ranking comes first in the recovery fuser.
        rate: share of the kept tokens the teacher adds in the recovery fuser, in [0, 1].
        tau_vision, tau_cross: temperatures, above 0.
        fps_start: `first` | `salient` | `mean`, where EGTM's sampling starts.
        select: `top` (the paper) | `diverse`, which weighs the fused saliency with the distance to what is kept.
        quality: exponent of the saliency in diverse selection, at least 0.
        debias: whether SCAP is divided by the pull of positions alone; needs scap_rope.
        anchors: `fps` (the paper) | `salient`, the best of what was not kept.
        weights: `mean` (the paper) | `saliency`, how the members of a merged token count.
    Raises:
        OptionError: for a value outside its bound.
    """

    vision_score: str = "class"
    aggregate: str = "all"
    scap_rope: bool = True
    fuser: str = "convex"
    alpha: float = 0.7
    student: str = "vision"
    rate: float = 0.1
    tau_vision: float = 1.0
    tau_cross: float = 1.0
    fps_start: str = "first"
    select: str = "top"
    quality: float = 1.0
    debias: bool = False
    anchors: str = "fps"
    weights: str = "mean"

    needs: ClassVar[frozenset[str]] = frozenset({"attention", "features", "probe"})

    def __post_init__(self) -> None:
        super().__post_init__()
        choose("vision_score", self.vision_score, ("class", "tokens"))
        choose("aggregate", self.aggregate, scap.AGGREGATES)
        choose("fuser", self.fuser, ("convex", "recovery", "product", "rank"))
        choose("student", self.student, ("vision", "cross"))
        choose("fps_start", self.fps_start, egtm.STARTS)
        choose("select", self.select, ("top", "diverse"))
        choose("anchors", self.anchors, ("fps", "salient"))
        choose("weights", self.weights, ("mean", "saliency"))
        within("quality", self.quality, 0.0, float("inf"))
        if self.select == "diverse" and self.fuser == "recovery":
            raise OptionError(
                "select='diverse' needs a fused saliency, which fuser='recovery' has not: take another fuser"
            )
        if self.debias and not self.scap_rope:
            raise OptionError("debias=True needs scap_rope=True: without rotation SCAP knows no positions")
        within("alpha", self.alpha, 0.0, 1.0)
        within("rate", self.rate, 0.0, 1.0)
        within("tau_vision", self.tau_vision, 0.0, float("inf"), open_low=True)
        within("tau_cross", self.tau_cross, 0.0, float("inf"), open_low=True)

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Saliency, SCAP with layer 0's two projections, selection, sampling, assignment and merge, for one picture.

        Raises:
            OptionError: for a shape that does not say how many text rows follow the picture.
        """
        head, rows = shape.heads * shape.head_width, shape.known("question")
        sequence = shape.pictures * shape.available + shape.text  # keys of the whole prompt, once for all its pictures
        keys = sequence * shape.width * shape.kv_heads * shape.head_width / shape.pictures
        probe = keys + rows * head * (shape.width + sequence)
        queries = 1 if self.vision_score == "class" and shape.classes else shape.patches
        saliency = shape.tiles * queries * (shape.patches + shape.classes) * shape.vision_width
        units = self.units(shape, budget)
        probe += len(units) * rows * head * sequence if self.debias else 0  # the prior is a second look
        sampled = shape.vision_width if self.anchors == "fps" else 0
        merging = 0
        for own, size in units:
            kept, merged = own.split(size)
            key = shape.vision_width // shape.vision_heads
            merging += merged * (size - kept) * (sampled + key + shape.width)  # anchors, assignment, average
            merging += kept * size * shape.vision_width if self.select == "diverse" else 0
        return 2.0 * (probe + saliency + merging)

    def reduce(self, tokens: VisualTokens, budget: Budget) -> Reduction:
        """K kept and M merged tokens of each unit, with the three saliencies. Gradients flow to the projected tokens
        only.
        """
        stages = Stopwatch(tokens.projected.device)
        available = tokens.projected.shape[1]
        count, merged = budget.split(available)
        with torch.no_grad():
            found = self.saliencies(tokens, stages)
            with stages.time("fusion"):
                kept = self._choose(tokens, found, count)  # [B, K]
        with stages.time("merge"):
            folded = self._fold(tokens, found.fused, left_over(kept, available), merged) if merged else None
        with stages.time("output"):
            result = assemble(tokens.projected, kept, self.order, folded)
        return result._replace(vision=found.vision, cross=found.cross, fused=found.fused, stages=stages)

    def saliencies(self, tokens: VisualTokens, stages: Stopwatch) -> Saliencies:
        """Both sides and their fusion. A prompt without text after the image counts on the vision side alone
        (method.md 3.4).
        """
        if tokens.attention is None or tokens.probe is None or tokens.probed is None or tokens.columns is None:
            raise ValueError(
                "ConsensusDrop needs the vision attention and the text probe: the host did not collect them"
            )
        with stages.time("saliency"):
            score = saliency.class_saliency if self.vision_score == "class" else saliency.received_saliency
            vision = tokens.of_tiles(score(tokens.attention))
            if tokens.tiles_per_unit > 1:
                vision = saliency.pool_tiles(vision, tokens.tile, tokens.tiles_per_unit)
        with stages.time("scap"):
            attention = scap.text_attention(tokens.probe, self.scap_rope)
            row_mask = tokens.probe.row_mask
            own, rows = attention[tokens.probed], row_mask[tokens.probed]
            cross = scap.cross_saliency(own, rows, tokens.columns, self.aggregate)
            if self.debias:
                probes = tokens.probe.of_prompts(tokens.probed)
                prior = scap.position_prior(probes, tokens.columns, self.aggregate)
                cross = torch.where(prior > 0, cross / prior.clamp_min(scap.EPSILON), cross)
        with stages.time("fusion"):
            asked = row_mask.any(1)[tokens.probed][:, None]
            side_v = fusers.temperature(vision, self.tau_vision)
            side_c = torch.where(asked, fusers.temperature(cross, self.tau_cross), side_v)
            fuse = FUSERS.get(self.fuser, fusers.convex)
            fused = ensure_finite("fused saliency", fuse(side_v, side_c, self.alpha))
        return Saliencies(vision, torch.where(asked, cross, side_v), fused)

    def _choose(self, tokens: VisualTokens, found: Saliencies, count: int) -> Tensor:
        """The K kept tokens in ascending index order: [B, K]."""
        if self.select == "diverse" and tokens.features is not None:
            return diverse(found.fused, tokens.of_tiles(tokens.features), count, self.quality)
        if self.fuser != "recovery":
            return fusers.top(found.fused, count)
        student, teacher = (found.vision, found.cross) if self.student == "vision" else (found.cross, found.vision)
        return fusers.recover(student, teacher, count, self.rate)

    def _fold(self, tokens: VisualTokens, fused: Tensor, rest: Tensor, count: int) -> Folded:
        """The `rest` [B, R] of each unit folded into `count` tokens."""
        if tokens.features is None or tokens.attention is None:
            raise ValueError("EGTM needs the features and keys of the vision tower: the host did not collect them")
        tile, patch = tokens.tile.gather(1, rest), tokens.patch.gather(1, rest)
        with torch.no_grad():
            left = fused.gather(1, rest)
            if self.anchors == "salient":
                anchors = fusers.top(left, count)
            else:
                anchors = egtm.sample_anchors(tokens.features[tile, patch], count, self.fps_start, left)
            keys = tokens.attention.key[:, :, tokens.attention.classes :].float().mean(1)  # [U, N, d_k]
            group = egtm.assign(keys[tile, patch], anchors)
        weight = left if self.weights == "saliency" else None
        return Folded(
            egtm.merge(pick(tokens.projected, rest), group, count, weight), rest.gather(1, anchors), rest, group
        )
