"""PruMerge: keep the patches the class token attends to far more than to the rest, and add to each of them its
nearest neighbours (Shang et al., LLaVA-PruMerge, arXiv 2403.15388, ICCV 2025; official code 097c041).

Outliers of the class attention are kept, each grows by its 32 nearest patches in key space weighted with their
attention, and one extra token sums up everything that was pruned; all of it before the projector. Differences: the
published method lets the image decide how many tokens stay (`budget=adaptive`); a table needs T, so by default the
T - 1 most attended patches stay, which is the official code's own non-adaptive path, and the extra token is the T-th.
One batched product replaces the loops over images and tokens. Where nothing was pruned there is no extra token (the
official code projects a row of zeros).

The authors' code is for LLaVA. A model whose projector takes several patches at a time, or whose tower has no class
token and ends with the features, is our reading: the tokens are those after the projector, in the place of features
too; a token's attention is that of its patches together, received from all rows if there is no class token, in the
last block; its key is the mean of its patches'; tokens stay in raster order.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import OfficialOrder, ReadsTower, Shape
from llava_consensus.reduction.options import Bounds
from llava_consensus.reduction.saliency import received_saliency
from llava_consensus.reduction.selection import Folded, arrange, left_over, pick, rank
from llava_consensus.reduction.tokens import AHEAD, PLACE, Need, Reduction, VisionAttention, VisualTokens, ensure_finite


@dataclass(frozen=True, kw_only=True)
class PruMerge(ReadsTower):
    """The most attended patches, each with its neighbours added, and one token for the pruned ones.

    Args:
        budget: `fixed` (T tokens, the extra one among them) | `adaptive` (as published: the number of outliers plus
            one; T then only says whether to reduce at all).
        weights: `raw` (the official code: neighbours are weighted by class attention) | `mean` (the paper: those
            weights divided by their sum).
        neighbours: patches added to each kept one, at least 0.
        order: `official` (by attention, descending, the extra token last; after the projector, `raster`) |
            `top_then_merged` | `raster`.
    """

    budget: Literal["fixed", "adaptive"] = "fixed"
    weights: Literal["raw", "mean"] = "raw"
    neighbours: Annotated[int, Bounds(0)] = 32
    order: OfficialOrder = "official"  # type: ignore[assignment]

    title: ClassVar[str] = "PruMerge"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.ATTENTION, Need.FEATURES, Need.PROJECTOR})
    instead: ClassVar[frozenset[Need]] = frozenset({Need.ATTENTION})
    blocks_ahead: ClassVar[int] = 1  # queries and keys of the block that reads the features

    @property
    def adaptive(self) -> bool:
        return self.budget == "adaptive"

    def most(self, available: int) -> int:
        """The most tokens `adaptive` can leave: no more than a quarter of any numbers lie above the fence."""
        return available // 4 + 1

    def entering(self, budget: Budget, available: int, layers: int) -> list[int]:
        """T, or where the image decides the most it can be; a run's records have the true number."""
        reduced = self.most(available) if self.adaptive else budget.tokens
        return [available if budget.tokens >= available else min(reduced, available)] * layers

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Class row, key similarities, merge and the projection (two layers) of the merged tokens. After the projector:
        the class row, or all rows if there is none, similarities and merge.
        """
        if budget.tokens >= shape.patches:
            return 0.0
        slots = self.entering(budget, shape.patches, 1)[0]
        if not (shape.single and (shape.classes or (shape.feature_blocks or shape.blocks - 1) < shape.blocks)):
            rows = shape.patches * shape.merged
            attended = (1 if shape.classes else rows) * (rows + shape.classes) * shape.vision_width
            return 2.0 * (attended + shape.patches * ((slots - 1) * shape.vision_width + slots * shape.width))
        merge = (2 * slots - 1) * shape.patches * shape.vision_width
        project = slots * (shape.vision_width + shape.width) * shape.width
        return 2.0 * ((shape.patches + 1) * shape.vision_width + merge + project)

    def reduce(self, tokens: VisualTokens, budget: Budget) -> Reduction:
        """The kept tokens in order of attention and the extra one, projected again. An adaptive reduction waits once
        for the device, because its length is not known before.

        Raises:
            ValueError: for several units at once in the adaptive mode, whose lengths differ.
        """
        if self.adaptive and len(tokens.projected) > 1:
            raise ValueError("budget=adaptive leaves another number of tokens in every unit: reduce them one by one")
        after = tokens.project is None
        order = "raster" if after and self.order == "official" else self.order
        with torch.no_grad():
            shares, keys = headless(tokens.needed(Need.ATTENTION))  # of patches
            saliency, keys = tokens.of_tiles(shares), tokens.of_tiles(keys)
            if after:
                saliency = saliency * (shares.shape[1] / tokens.by_token(shares).shape[1])
            kept = self.select(saliency, min(budget.tokens - 1, saliency.shape[1]))
            kept = kept if order == "official" else kept.sort(dim=1).values
            rest = left_over(kept, saliency.shape[1])
            pruned = saliency.scatter(1, kept, 0)  # [B, N]
            weights = torch.cat((self._weights(saliency, keys, kept), pruned[:, None]), dim=1)
        if after:
            out = _sums(weights, tokens.projected.float(), kept, rest).to(tokens.projected.dtype)
        else:
            with torch.no_grad():
                features = tokens.of_tiles(tokens.needed(Need.FEATURES)).float()
                merged = _sums(weights, ensure_finite("features of the vision tower", features), kept, rest)
            out = tokens.needed(Need.PROJECTOR)(merged.to(tokens.projected.dtype))
        count, extra = kept.shape[1], None
        if rest.shape[1]:  # the extra token represents the most attended of those pruned
            anchor = rest.gather(1, saliency.gather(1, rest).argmax(1, keepdim=True))
            extra = Folded(out[:, count:], anchor, rest, torch.zeros_like(rest))
        result = arrange(out[:, :count], kept, saliency.shape[1], order, extra)
        zones = {"official": AHEAD, "raster": PLACE}
        zone = torch.full_like(result.source, zones[order]) if order in zones else None
        return result._replace(vision=saliency, zone=zone)

    def select(self, saliency: Tensor, count: int) -> Tensor:
        """The kept tokens by descending attention: [B, N] -> [B, K]; K = `count`, or the outliers of the one unit."""
        return rank(saliency)[:, : int(outliers(saliency).sum()) if self.adaptive else count]

    def _weights(self, saliency: Tensor, keys: Tensor, kept: Tensor) -> Tensor:
        """Weight of every token in each kept one: [B, K, N], zero but for the nearest in key space."""
        direction = normalize(keys, dim=-1)
        similarity = pick(direction, kept) @ direction.transpose(1, 2)  # [B, K, N]
        similarity = similarity.scatter(2, kept[..., None], -torch.inf)  # not itself
        index = rank(similarity)[..., : min(self.neighbours, saliency.shape[1] - 1)]
        weights = saliency[:, None].expand_as(similarity).gather(2, index)
        if self.weights == "mean":
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
        return torch.zeros_like(similarity).scatter(2, index, weights)


def _sums(weights: Tensor, values: Tensor, kept: Tensor, rest: Tensor) -> Tensor:
    """The kept tokens with their neighbours added, and the sum of pruned ones, if any: weights [B, K + 1, N] of
    values [B, N, D] -> [B, K + 1, D] or [B, K, D].
    """
    merged = weights @ values
    merged = torch.cat((merged[:, :-1] + pick(values, kept), merged[:, -1:]), dim=1)
    return merged[:, : None if rest.shape[1] else -1]


def headless(attention: VisionAttention) -> tuple[Tensor, Tensor]:
    """Attention of the class token over the full width, as if the block had one head, and the full-width keys:
    [U, N], [U, N, H d]. Without a class token: the mean over all rows.
    """
    classes = attention.classes
    keys = attention.key.float().transpose(1, 2).flatten(2)  # [U, C + N, H d]
    query = attention.query[:, :, : classes or None].float().transpose(1, 2).flatten(2)
    scale = attention.scale * attention.key.shape[1] ** -0.5  # not that of the width: queries may be scaled already
    if not classes:
        saliency = received_saliency(VisionAttention(query[:, None], keys[:, None], scale, 0), own=True)
        return saliency, attention.content.float().transpose(1, 2).flatten(2)
    weights = torch.softmax(query @ keys.transpose(1, 2) * scale, dim=-1)
    return ensure_finite("vision saliency", weights[..., attention.classes :].mean(1)), keys[:, attention.classes :]


def outliers(saliency: Tensor) -> Tensor:
    """Mask of the tokens above the upper fence Q3 + 1.5 (Q3 - Q1) of their unit: bool [B, N]."""
    levels = torch.tensor([0.25, 0.75], dtype=saliency.dtype, device=saliency.device)
    low, high = torch.quantile(saliency, levels, dim=1, keepdim=True)
    return saliency > high + 1.5 * (high - low)
