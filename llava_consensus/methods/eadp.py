"""EADP: keep the tokens that represent the patches the question's most telling words are about (ECCV 2026; official
code e1a0880, its pruner for Qwen2.5-VL and Qwen3-VL).

A word is telling when few tokens are like it: its likeness to all tokens, as a softmax, has a low entropy. The fifth of
the words with the lowest entropy are mixed by a softmax of the negated entropy so sharp that in effect the first one
counts, and this is weighed against the mean of all words. The result, brought to 0..1 and smoothed over the grid,
weighs a facility location: each step keeps the token that adds most to the weighted sum of every token's likeness to
the kept one it is most like. As in the authors' code likeness to words enters NEGATED, on this model too, where it
points toward the content of a patch.

Differences: the words are the rows that follow the image in the prompt, the template's among them; on LLaVA the
authors compare in CLIP's space with all 77 rows of its text tower, of which a text tower's output keeps one, so there
too the language model's embeddings are read here. They measure Qwen with plain positions and without DeepStack, which
their own code around `generate` loses; here both stay. Prompts without words after their image weigh all tokens
alike; without a whole grid nothing is smoothed; cosines are in float32; ties go to the lower index.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from llava_consensus.methods.scope import cover
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.merging import directions
from llava_consensus.reduction.method import Selected, Selector, Shape, Tiled
from llava_consensus.reduction.options import NotNegative, Ratio
from llava_consensus.reduction.tokens import Need, VisualTokens, ensure_finite

SHARPNESS, TEMPERATURE, EPSILON = 100.0, 0.01, 1e-6  # of the softmax over tokens, of that over words


@dataclass(frozen=True, kw_only=True)
class EADP(Selector, Tiled):
    """Keep T tokens that cover all others, weighted by the likeness to the words of lowest entropy.

    Args:
        alpha: weight of the mean of all words, in [0, 1]; the rest is that of the telling ones.
        telling: share of the words that are telling, in [0, 1]; at least one is.
        beta: exponent of the weights; the authors tune it for each task on Qwen.
    """

    alpha: Ratio = 0.5
    telling: Ratio = 0.2
    beta: NotNegative = 1.0

    title: ClassVar[str] = "EADP"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.WORDS})

    def flops(self, shape: Shape, budget: Budget) -> float:
        """The cosines of all pairs of tokens, and of tokens with words and their mean, and the mixture of words."""
        sizes = [size for _, size in self.losing(shape, budget)]
        words = shape.known("question") if sizes else 0
        return sum(2.0 * size * ((size + words + 1) * shape.width + words) for size in sizes)

    def choose(self, tokens: VisualTokens, count: int) -> Selected:
        words = tokens.needed(Need.WORDS)
        points = directions(ensure_finite("projected tokens", tokens.projected).float())  # [B, N, D]
        weight = self.weight(points, words.text.float(), words.real)
        if tokens.side and tokens.tiles_per_unit == 1 and points.shape[1] % tokens.side == 0:
            weight = smooth(weight, tokens.side)
        weight = weight**self.beta
        similarity = (points @ points.transpose(1, 2) + 1) / 2
        return Selected(cover(similarity * weight[:, None], None, count), cross=weight)

    def weight(self, points: Tensor, text: Tensor, real: Tensor) -> Tensor:
        """Weight of each token by the words: [B, N, D], [B, M, D], [B, M] -> [B, N] in 0..1."""
        count = real.sum(1, keepdim=True)
        mean = (text * real[..., None]).sum(1, keepdim=True) / count[..., None].clamp_min(1)
        overall = -(points @ directions(mean).transpose(1, 2))[..., 0]  # [B, N]
        each = -(points @ directions(text).transpose(1, 2))  # [B, N, M]
        shares = torch.softmax(SHARPNESS * each, dim=1)
        entropy = (-(shares * (shares + 1e-12).log()).sum(1)).masked_fill(~real, torch.inf)  # [B, M]
        place = entropy.argsort(dim=1, stable=True).argsort(dim=1)
        telling = real & (place < (count * self.telling).floor().clamp_min(1))
        mixture = torch.softmax((-entropy / TEMPERATURE).masked_fill(~telling, -torch.inf), dim=1).nan_to_num()
        found = self.alpha * overall + (1 - self.alpha) * (each @ mixture[..., None])[..., 0]
        low, high = found.amin(1, keepdim=True), found.amax(1, keepdim=True)
        return (found - low + EPSILON) / (high - low + EPSILON)


def smooth(values: Tensor, columns: int) -> Tensor:
    """Values of a grid [B, N] under a Gaussian of 3 x 3 cells, its border reflected; a grid of one row stays."""
    grid = values.view(len(values), 1, -1, columns)
    if min(grid.shape[2:]) < 2:
        return values
    return conv2d(pad(grid, (1, 1, 1, 1), mode="reflect"), gaussian(values.device)).flatten(1)


@lru_cache(maxsize=8)
def gaussian(device: torch.device) -> Tensor:
    """Weights of 3 x 3 cells [1, 1, 3, 3] with sum 1. Never write to it."""
    with torch.inference_mode(False):  # a tensor made in inference mode could not be saved for a backward pass
        line = torch.tensor([-1.0, 0.0, 1.0], device=device)
        kernel = torch.exp(-(line[:, None] ** 2 + line**2) / 2)
        return (kernel / kernel.sum())[None, None]
