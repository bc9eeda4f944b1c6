"""The methods of the controlled study (the paper's section 3), which no table of methods has.

`Selection` keeps tokens inside the language model, as FastV does after decoder layer 2 (counted from 1), by the
attention of the tower's class token, that of the prompt's last token in that layer (head means), or both, and records
how far the two agree on the K best tokens. `LayerProbe` drops nothing and records where SCAP looks
(`reduction/saliency.py`), with rotation of queries and keys and without.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.reduction import saliency, selection
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.decoder import Chosen, Cut, DecoderView, InDecoder, last_row_saliency, only_cut
from llava_consensus.reduction.method import Shape
from llava_consensus.reduction.options import Ratio
from llava_consensus.reduction.saliency import cross_saliency, rotate, text_attention
from llava_consensus.reduction.tokens import Need, Stopwatch, TextProbe, VisualTokens

Side = Literal["vision", "cross"]
SIDES: tuple[Side, ...] = get_args(Side)
RECOVERY: Literal["recovery"] = "recovery"
PUBLISHED_LAYER = 2
STRETCHES = 24  # of patch indices; the rows of LLaVA-1.5's grid


@dataclass(frozen=True, kw_only=True)
class Selection(InDecoder):
    """Keep the best tokens of one side after a decoder layer, or one side's with the other's corrections.

    Args:
        scores: `vision` | `cross` | `recovery` (the student's best, and among them what the teacher would miss).
        student: `vision` | `cross`, whose ranking comes first in recovery.
        rate: r in [0, 1], share of the kept tokens that the teacher adds in recovery.
        layer: how many decoder layers see everything; None is 2, in models of fewer than 32 layers in proportion.
    Raises:
        OptionError: for a value outside its bound.
    """

    positions: Literal["renumber", "keep"] = "keep"
    scores: Literal["vision", "cross", "recovery"] = RECOVERY
    student: Side = "vision"
    rate: Ratio = 0.1
    layer: int | None = None

    title: ClassVar[str] = "Study"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.ATTENTION})

    def plan(self, tokens: int, available: int, layers: int) -> list[Cut]:
        """One cut, that leaves T."""
        return [Cut(only_cut(self.layer, PUBLISHED_LAYER, layers), tokens)]

    def flops(self, shape: Shape, budget: Budget) -> float:
        """The last row's attention, and that of the class token in each tile."""
        queries = 1 if shape.classes else shape.patches
        tower = 2.0 * shape.tiles * queries * (shape.patches + shape.classes) * shape.vision_width
        return super().flops(shape, budget) + tower

    def select(self, view: DecoderView, watch: Stopwatch) -> Chosen:
        """The K best tokens, with `agreement` and, for recovery, `correction` of each image."""
        count = view.cut.kept
        with watch.time("saliency"), torch.no_grad():
            sides = {"vision": vision_saliency(view.tower), "cross": last_row_saliency(view, "the study")}
        with watch.time("selection"):
            measures = {"agreement": selection.agreement(sides["vision"], sides["cross"], count)}
            if self.scores != RECOVERY:
                return Chosen(selection.top(sides[self.scores], count), measures=measures)
            student = sides.pop(self.student)
            (teacher,) = sides.values()
            measures["correction"] = selection.correction_factor(student, teacher, count, self.rate)
            return Chosen(selection.recover(student, teacher, count, self.rate), measures=measures)


def vision_saliency(tower: VisualTokens | None) -> Tensor:
    """Attention of the class token over the tokens of all tiles: [P, n]. OptionError if the tower does not give it."""
    if tower is None:
        raise OptionError("on this host methods between decoder layers cannot read the vision tower")
    vision = tower.of_tiles(saliency.class_saliency(tower.needed(Need.ATTENTION)))
    return saliency.pool_tiles(vision, tower.tile, tower.tiles_per_unit) if tower.tiles_per_unit > 1 else vision


@dataclass(frozen=True, kw_only=True)
class LayerProbe(InDecoder):
    """Drop nothing, and record by place the saliency of SCAP, the attention of the first decoder layer."""

    positions: Literal["renumber", "keep"] = "keep"

    title: ClassVar[str] = "SCAP by place"
    asks: ClassVar[str] = "text"
    attention: ClassVar[str] = "own"

    def plan(self, tokens: int, available: int, layers: int) -> list[Cut]:
        """A stop before the first layer, at which all tokens stay."""
        return [Cut(0, available)]

    def select(self, view: DecoderView, watch: Stopwatch) -> Chosen:
        """All tokens, with SCAP by place as it is (`rotated`), and without rotation (`plain`)."""
        with watch.time("saliency"), torch.no_grad():
            measures = {}
            for name, probe in (("rotated", view.probe), ("plain", turned_back(view.probe))):
                attention = text_attention(probe, name == "rotated")
                measures[name] = by_position(cross_saliency(attention, probe.row_mask, view.columns, "all"))
        everything = torch.arange(view.cut.kept, device=view.columns.device).expand_as(view.columns)
        return Chosen(everything, measures=measures)


def turned_back(probe: TextProbe) -> TextProbe:
    """A probe whose queries and keys are as they were before rotation."""
    if probe.angles is None:
        return probe
    cos, sin = probe.angles()
    at = probe.rows[..., None].expand(-1, -1, cos.shape[-1])
    query = rotate(probe.query, cos.gather(1, at), -sin.gather(1, at))
    return probe._replace(query=query, key=rotate(probe.key, cos, -sin))


def by_position(saliency: Tensor) -> Tensor:
    """Mean saliency of equal stretches of the tokens, as a multiple of an even one: [P, v] -> [P, STRETCHES]."""
    even = saliency.mean(1, keepdim=True).clamp_min(torch.finfo(saliency.dtype).tiny)
    return torch.nn.functional.adaptive_avg_pool1d((saliency / even)[:, None], STRETCHES)[:, 0]
