"""Random: T tokens drawn without looking, the floor every method must clear."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from llava_consensus.reduction.method import Ranker, Tiled
from llava_consensus.reduction.tokens import Need, VisualTokens


@dataclass(frozen=True, kw_only=True)
class Random(Ranker, Tiled):
    """T of N tokens drawn at random, none merged; the same for image, prompt and `seed` in every batch.

    Args:
        seed: whole number that makes another draw.
    """

    seed: int = 0

    needs: ClassVar[frozenset[Need]] = frozenset({Need.FINGERPRINT})
    multiplies_nothing: ClassVar[bool] = True

    def saliency(self, tokens: VisualTokens) -> Tensor:
        return draw(tokens.needed(Need.FINGERPRINT) + self.seed * 0x5851F42D4C957F, tokens.projected.shape[1])


def draw(seeds: Tensor, count: int) -> Tensor:
    """`count` uniform numbers in [0, 1) for each int64 seed [B], by hashing a counter: the same on every device."""
    counter = torch.arange(1, count + 1, device=seeds.device)
    state = seeds[:, None] * 0x2545F4914F6CDD1D + counter * 0x9E3779B97F4A7C1  # int64 arithmetic wraps
    for multiplier in (0x7F51AFD7ED558CCD, 0x44CEB9FE1A85EC53):
        state = (state ^ (state >> 31)) * multiplier
    return ((state >> 20) & 0xFFFFFF).float() / 2**24
