"""HoloV: share the budget out over the crops of an image before tokens are ranked (Zou et al., NeurIPS 2025, arXiv
2510.02912; official code 1d2e65e).

A crop is N / 16 tokens in a row, as in the authors' code; their figure draws squares. Its score is the mean of its
class attention and of how much the cosines of a token with the others of its crop vary, times alpha, brought to the
scale of the attention. Crops get seats in proportion to their scores, rounded down, and the best of them one more each
until T are given out; in a crop the most attended tokens are kept. A tower without a class token is read as in the
authors' code for Qwen2.5-VL: int(16 / 9 N / T) crops, at least one, and attention is received from all rows (their code
then writes ones over it, ours does not). An image of several tiles is ranked whole, as theirs is. Differences: seats
that a small crop cannot fill go to the most attended tokens elsewhere, where the authors hand zeros to the language
model, and ties go to the lower index. The weights (alpha, 16 crops of 36 tokens) were set for CLIP ViT-L at 24 x 24
patches; nothing depends on the depth of a model.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.merging import directions
from llava_consensus.reduction.method import OfficialOrder, ReadsTower, Shape
from llava_consensus.reduction.options import Bounds, NotNegative
from llava_consensus.reduction.saliency import class_flops, class_saliency
from llava_consensus.reduction.selection import arrange, pick, rank, seated, topped_up
from llava_consensus.reduction.tokens import AHEAD, Need, Reduction, VisionAttention, VisualTokens, ensure_finite

SCALE, EPSILON = 1e3, 1e-6  # scale of the attention, and guard of divisors


@dataclass(frozen=True, kw_only=True)
class HoloV(ReadsTower):
    """Every crop of the image keeps a number of its most attended tokens, set by its attention and variety.

    Args:
        crops: how many there are; None is 16, or without a class token 16/9 of N / T.
        alpha: weight of the variance of a token's cosines with its crop.
        order: `official` (crop by crop, the most attended first) | `top_then_merged` | `raster`, which are the same.
    """

    crops: Annotated[int, Bounds(1)] | None = None
    alpha: NotNegative = 0.09
    tile_budget: Literal["per_tile", "global"] = "global"
    order: OfficialOrder = "official"  # type: ignore[assignment]

    answer_version: ClassVar[int] = 2
    title: ClassVar[str] = "HoloV"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.ATTENTION, Need.FEATURES})

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Class attention and the cosines inside every crop."""
        units = self.losing(shape, budget)
        counts = [self.count(tokens, size, bool(shape.classes)) for tokens, size in units]
        crops = [(count, -(-size // count)) for count, (_, size) in zip(counts, units, strict=True)]
        return sum(2.0 * count * size**2 * shape.width for count, size in crops) + (class_flops(shape) if units else 0)

    def count(self, tokens: int, size: int, classes: bool) -> int:
        usual = 16 if classes else max(1, int(1024 / 576 * size / tokens))
        return min(usual if self.crops is None else self.crops, size)

    def reduce(self, tokens: VisualTokens, budget: Budget) -> Reduction:
        """`budget.tokens` tokens, none merged."""
        with torch.no_grad():
            attention: VisionAttention = tokens.needed(Need.ATTENTION)
            saliency = tokens.of_tiles(class_saliency(attention, own=True))
            size = saliency.shape[1]
            count = min(budget.tokens, size)
            crops = Crops(size, self.count(count, size, bool(attention.classes)), saliency.device)
            points = directions(ensure_finite("projected tokens", tokens.projected).float())
            weight = crops.scores(saliency, points, self.alpha)
            weight = weight / (weight.sum(1, keepdim=True) + EPSILON)
            seats = topped_up((weight * count).floor().long(), weight, count)
            kept = seated(rank(saliency), crops.crop.expand_as(saliency), seats, count)
            if self.order == "official":  # a crop that is kept whole stays as it was
                crop = crops.crop[kept]
                whole = seats.gather(1, crop) >= crops.sizes[crop]
                place = torch.where(whole, kept, torch.arange(count, device=kept.device))
                kept = kept.gather(1, (crop * size + place).argsort(1))
            else:
                kept = kept.sort(dim=1).values
        result = arrange(pick(tokens.projected, kept), kept, size, self.order)
        zone = torch.full_like(result.source, AHEAD) if self.order == "official" else None
        return result._replace(vision=saliency, zone=zone)


class Crops:
    """`count` crops of `size` tokens in a row; the first ones are longer by one if it does not divide."""

    def __init__(self, size: int, count: int, device: torch.device) -> None:
        short, longer = divmod(size, count)
        token, crop = torch.arange(size, device=device), torch.arange(count, device=device)
        before = longer * (short + 1)  # tokens of the longer crops
        self.crop = torch.where(token < before, token // (short + 1), longer + (token - before) // short)  # [N]
        self.sizes = short + (crop < longer).long()  # [P]
        inside = torch.arange(short + bool(longer), device=device)
        self.real = inside < self.sizes[:, None]  # [P, m]
        self.places = ((self.sizes.cumsum(0) - self.sizes)[:, None] + inside).clamp_max(size - 1)  # [P, m]

    def scores(self, saliency: Tensor, points: Tensor, alpha: float) -> Tensor:
        """The score of each crop: [B, N], [B, N, D] of length 1 -> [B, P]."""
        inside = points[:, self.places]  # [B, P, m, D]
        pair = self.real[:, None] & ~torch.eye(self.real.shape[1], dtype=torch.bool, device=points.device)
        cosine = (inside @ inside.transpose(2, 3)) * pair  # 0 with itself, which the variance then counts
        others = (self.sizes - 1).clamp_min(1)[:, None]
        mean = cosine.sum(3) / others
        variance = ((cosine - mean[..., None]).square() * self.real[:, None]).sum(3) / others
        attention, variance = self._mean(saliency[:, self.places] * SCALE), self._mean(variance)
        # the mean of a rescaled variance is its mean, rescaled
        score = attention + alpha * variance * (attention / (variance + EPSILON))
        return torch.where(self.sizes > 1, score, attention / SCALE)

    def _mean(self, values: Tensor) -> Tensor:
        """Over the tokens of each crop: [B, P, m] -> [B, P]."""
        return (values * self.real).sum(2) / self.sizes
