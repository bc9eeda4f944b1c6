"""PruMerge+: PruMerge with patches sampled evenly over the image beside the attended ones (Shang et al.,
LLaVA-PruMerge, arXiv 2403.15388, ICCV 2025; official code 097c041).

The outliers of the class attention are kept, then every s-th patch, then all of them are merged as in PruMerge.
Differences: the published spacing follows from the number of outliers (`budget=adaptive`); for a fixed T we take the
rule of EffiVLM-Bench's port: outliers, then every (N / K)-th patch until K are found, the rest by attention where it
drew at random. That walk can end before the last rows of the image; `spread=even` spaces the samples so that it never
does. The official code has a path of a fixed ratio too, 1/8 by default: the N/8 most attended patches and every 8th
from the 4th on. It takes a patch that is both twice; `spread=ratio` takes the next one by attention instead. Three
crashes are repaired: no outlier counts as one for the spacing, a spacing is never below one, and images of one batch
do not share their outliers.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from llava_consensus.methods.prumerge import PruMerge, outliers
from llava_consensus.reduction.selection import rank


@dataclass(frozen=True, kw_only=True)
class PruMergePlus(PruMerge):
    """The most attended patches and evenly sampled ones, each with its neighbours added, and one token for the rest.

    Args:
        spread: `walk` (EffiVLM-Bench: every (N / K)-th patch until there are enough) | `even` (the wanted number,
            equally spaced over the whole image) | `ratio` (the official fixed ratio: half of them by attention, half
            equally spaced); for `budget=fixed` only.
    """

    spread: Literal["walk", "even", "ratio"] = "walk"

    title: ClassVar[str] = "PruMerge+"

    def most(self, available: int) -> int:
        """The most tokens `adaptive` can leave: with many outliers every patch is a sample."""
        return available

    def select(self, saliency: Tensor, count: int) -> Tensor:
        """Outliers by descending attention, then samples in ascending order: [B, N] -> [B, K]."""
        size, is_outlier = saliency.shape[1], outliers(saliency)
        places = torch.arange(size, device=saliency.device)
        order = rank(saliency).argsort(dim=1)  # [B, N] each token's place in the ranking
        if self.adaptive:
            ratio = max(int(is_outlier.sum()), 1) / size
            spacing = max(1, int(int(1 / ratio) / 3))
            sampled = (places % spacing == 0) & (places < size - 1)  # the official range ends before the last patch
            count = int((is_outlier | sampled).sum())
        elif self.spread == "walk":
            sampled = places % max(1, size // max(count, 1)) == 0
        elif self.spread == "ratio":
            attended = count // 2
            step = size // max(attended, 1)
            is_outlier, sampled = order < attended, places % step == step // 2
        else:
            sample_count = (count - is_outlier.sum(1, keepdim=True)).clamp_min(0)  # [B, 1]
            sampled = (places * sample_count + size - 1) // size < ((places + 1) * sample_count + size - 1) // size
        priority = torch.where(is_outlier, order, torch.where(sampled, size + places, 2 * size + order))
        return priority.argsort(dim=1)[:, :count]
