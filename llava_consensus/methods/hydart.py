"""HyDART: HiPrune's anchors with their neighbours, and around them tokens that a middle block of the vision tower looks
at and that differ from each other (prune-visualizer; code f12b738).

Anchors are the most looked at in the earlier block, as in `hiprune`. The places that are left go, one by one, to the
largest attention in that block, scaled to 0..1 over the unit, less 0.1 times the largest cosine with anchors and
neighbours and 0.5 times that with the tokens picked since; the cosines are of projected tokens and never negative.
Differences: where anchors and neighbours are more than T, the lowest of them stay (the code refuses), and ties go to
the lower index. The earlier block is the ninth of CLIP's 24 in their code, elsewhere the one at 9/24 of the depth.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import pad

from llava_consensus.methods.hiprune import BESIDE, HiPrune, beside, looked_at
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.merging import directions
from llava_consensus.reduction.method import Selected, Shape
from llava_consensus.reduction.options import NotNegative
from llava_consensus.reduction.selection import cosines, counting, greedy, indices, pick, top
from llava_consensus.reduction.tokens import Need, VisualTokens, ensure_finite


@dataclass(frozen=True, kw_only=True)
class HyDART(HiPrune):
    """Keep tokens that a middle vision block attends to with their neighbours, and attended tokens unlike them.

    Args:
        near: weight of the likeness to anchors and neighbours.
        picked: weight of the likeness to the other kept tokens.
    """

    near: NotNegative = 0.1
    picked: NotNegative = 0.5

    title: ClassVar[str] = "HyDART"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.EARLIER})

    def flops(self, shape: Shape, budget: Budget) -> float:
        """The attention of one block, and the cosines of all pairs of tokens."""
        units = self.losing(shape, budget)
        rows = shape.patches + shape.classes
        compared = sum(2.0 * size**2 * shape.width for _, size in units)
        return compared + 2.0 * shape.tiles * rows**2 * shape.vision_width if units else 0.0

    def choose(self, tokens: VisualTokens, count: int) -> Selected:
        """Anchors, their neighbours, and tokens that are looked at and unlike those kept before."""
        middle = tokens.by_token(looked_at(tokens.needed(Need.EARLIER)))  # [U, N_tile]
        saliency, anchors = middle[tokens.tile, tokens.patch], self.anchors(count)  # [B, N]
        near = beside(tokens, top(saliency, anchors), middle.shape[1])
        low, high = saliency.amin(1, keepdim=True), saliency.amax(1, keepdim=True)
        score = (saliency - low) / (high - low).clamp_min(1e-12)
        points = directions(ensure_finite("projected tokens", tokens.projected).float())
        table = cosines(points)
        loss = table[:, :-1]  # [B, N, N]
        seeds = indices(near, min(BESIDE * anchors, near.shape[1]))
        likeness = pick(loss, seeds) * near.gather(1, seeds)[..., None]  # [B, S, N], 0 for seeds that are none
        score = score - self.near * pad(likeness, (0, 0, 1, 0)).amax(1).clamp_max(1.0)
        loss.clamp_(0.0, 1.0).mul_(self.picked).sub_(score[:, None])
        # anchors and neighbours are kept before all others, and are never picked
        start = torch.where(near, torch.inf, -score)
        picked = greedy(table, count - anchors, start=start)
        step = torch.where(near, 0.0, torch.inf)
        steps = counting(count - anchors + 1, step.device)[1:].float().expand_as(picked)
        return Selected(top(step.scatter_reduce_(1, picked, steps, "amin").neg_(), count), vision=saliency)
