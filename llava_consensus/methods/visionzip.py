"""VisionZip: keep the class token and the patches it attends to, and fold the rest into a few contextual tokens (Yang
et al., VisionZip, CVPR 2025; official code 3151f6d).

Of D + M = T tokens, D are dominant: the class token itself and the D - 1 patches with the largest class attention; M
of the others, equally spaced, are targets, every other token joins the target with the nearest key, and a contextual
token is the target plus the mean of those that joined, before the projector. M is 5/32 of T, which gives the published
splits (54 + 10 at 64). The class token is passed to the language model, as the official code does, and counts as one
of the T; at T >= N this host leaves the model as it is, so there is then no class token and nothing is merged.
Differences: M = 0 works (it divided by zero), only the class token and the contextual tokens are projected again, and a
image ranked over all its tiles (`tile_budget=global`) has the class token of its first.

A model whose projector takes several patches at a time, or whose tower has no class token, is reduced as the authors do
it on Qwen2.5-VL (their 68993a3): of T = D + M tokens D are those that receive most attention in the tower, a token's
being the mean of its patches' (they sum over rows, which ranks the same), keys are averaged over its patches too, and
contextual tokens are made after the projector and are at their targets' places. Their M is 5 % of all tokens, here
5/32 of T unless `merged` says another. Their code is for one image in a prompt and for no video; here each image,
and each frame, is ranked by itself. On all models but Qwen2.5-VL this is our reading; if a tower has a class token
beside such a projector (InternVL), the attention of that token ranks.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from llava_consensus.reduction import merging
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import OfficialOrder, ReadsTower, Shape
from llava_consensus.reduction.saliency import class_saliency
from llava_consensus.reduction.selection import Folded, arrange, counting, pick, split_best, zones
from llava_consensus.reduction.tokens import AFTER, AHEAD, BEHIND, PLACE, Need, Reduction, VisualTokens, ensure_finite


@dataclass(frozen=True, kw_only=True)
class VisionZip(ReadsTower):
    """Dominant tokens by class attention, the class token among them, and contextual tokens by key similarity.

    Args:
        class_token: whether the class token is one of the dominant tokens (the official code), or a patch more is;
            without meaning where the projector takes no class token.
        contextual: `sum` (the official code: target + mean of the tokens that joined it) | `mean` (the paper's words:
            the mean of target and joined tokens).
        order: `official` (class token, dominant, contextual; of several tiles mixed in one raster, class tokens and
            then contextual tokens after the image; after the projector, `raster`) | `top_then_merged` | `raster`,
            both with the class token ahead.
    """

    class_token: bool = True
    contextual: Literal["sum", "mean"] = "sum"
    order: OfficialOrder = "official"  # type: ignore[assignment]

    title: ClassVar[str] = "VisionZip"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.ATTENTION, Need.FEATURES, Need.CLASS_FEATURE, Need.PROJECTOR})
    instead: ClassVar[frozenset[Need]] = frozenset({Need.ATTENTION})

    def counts(self, budget: Budget, available: int) -> tuple[int, int, int]:
        """Class tokens, kept patches and contextual tokens of one unit of `available` patches."""
        dominant, merged = budget.split(available + self.class_token)
        first = min(int(self.class_token), dominant)
        return first, dominant - first, merged

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Class row, key similarities of the rest to the targets, merge and projection (two layers) of the merged.
        After the projector: the class row, or all rows if there is none, the similarities, and the merge.
        """
        if budget.tokens >= shape.patches:
            return 0.0
        if not (shape.single and shape.classes):
            kept, merged = budget.split(shape.patches)
            joined = (shape.patches - kept) * merged * (shape.vision_width // shape.vision_heads + shape.width)
            rows = shape.patches * shape.merged
            return 2.0 * ((1 if shape.classes else rows) * (rows + shape.classes) * shape.vision_width + joined)
        first, kept, merged = self.counts(budget, shape.patches)
        joined = (shape.patches - kept) * merged * (shape.vision_width // shape.vision_heads + shape.vision_width)
        project = (first + merged) * (shape.vision_width + shape.width) * shape.width
        return 2.0 * ((shape.patches + 1) * shape.vision_width + joined + project)

    def reduce(self, tokens: VisualTokens, budget: Budget) -> Reduction:
        """Class token, dominant patches and contextual tokens of each unit; no class token after the projector."""
        size = tokens.projected.shape[1]
        first, count, merged = (0, *budget.split(size)) if tokens.project is None else self.counts(budget, size)
        with torch.no_grad():
            saliency = tokens.of_tiles(class_saliency(tokens.needed(Need.ATTENTION), own=True))
            kept, rest = split_best(saliency, count)  # [B, K], [B, R]
            places, group = self._groups(tokens, rest, merged)
        targets = equally_spaced(rest, merged)
        if tokens.project is None:
            contextual = self._contextual(pick(tokens.projected, rest).float(), places, group)
            folded = Folded(contextual.to(tokens.projected.dtype), targets, rest, group) if merged else None
            order = "raster" if self.order == "official" else self.order
            result = arrange(pick(tokens.projected, kept), kept, size, order, folded, ascending=True)
            zone = torch.full_like(result.source, PLACE) if order == "raster" else None
            return result._replace(vision=saliency, zone=zone)
        with torch.no_grad():
            features = pick(tokens.of_tiles(tokens.needed(Need.FEATURES).float()), rest)  # [B, R, D_v]
            ensure_finite("features of the vision tower", features)
            contextual = self._contextual(features, places, group)
            leading = tokens.needed(Need.CLASS_FEATURE)[tokens.tile[:, :first]].float()  # [B, 0 or 1, D_v]
        before = torch.cat((leading, contextual), dim=1).to(tokens.projected.dtype)
        projected = tokens.needed(Need.PROJECTOR)(before)
        folded = Folded(projected[:, first:], targets, rest, group) if merged else None
        result = arrange(
            pick(tokens.projected, kept), kept, size, self.order, folded, ascending=True, ahead=projected[:, :first]
        )
        behind = {"official": AFTER, "top_then_merged": BEHIND, "raster": PLACE}[self.order]
        zone = zones((AHEAD, first), (PLACE, count), (behind, merged), device=kept.device).expand_as(result.source)
        return result._replace(vision=saliency, zone=zone)

    def _groups(self, tokens: VisualTokens, rest: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Places of the targets among the `rest` [B, R]: [B, M], and the target each of the rest joins [B, R]."""
        if not count:
            return rest[:, :0], torch.zeros_like(rest)
        places = equally_spaced(counting(rest.shape[1], rest.device).expand_as(rest), count)
        keys = tokens.of_tiles(tokens.needed(Need.ATTENTION).patch_keys())
        return places, merging.nearest(pick(keys, rest), places)

    def _contextual(self, values: Tensor, places: Tensor, group: Tensor) -> Tensor:
        """The contextual tokens [B, M, D] of values [B, R, D] of the rest."""
        count = places.shape[1]
        if not count:
            return values[:, :0]
        joined = values.new_zeros(len(values), count, values.shape[1])  # [B, M, R] less the targets
        joined.scatter_(1, group[:, None], 1.0).index_fill_(2, places[0], 0.0)
        joined_count, targets = joined.sum(-1, keepdim=True), equally_spaced(values, count)
        if self.contextual == "mean":
            return (targets + joined @ values) / (1 + joined_count)
        return targets + joined @ values / joined_count.clamp_min(1)


def equally_spaced(values: Tensor, count: int) -> Tensor:
    """A view of `count` of the rows [B, R, ...], from the first on: [B, count, ...]."""
    return values[:, :: max(1, values.shape[1] // max(count, 1))][:, :count]
