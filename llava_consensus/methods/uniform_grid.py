"""Uniform grid: keep T tokens at even distances, whatever the picture shows. The floor that looks at nothing and is
still hard to beat (UniPruneBench, arXiv 2511.02650, asks for it beside `random`): it covers the whole picture, which
saliency does not. The centres of the cells of `grid.py`; exactly T tokens for any T; nothing is drawn at random.
"""

from dataclasses import dataclass
from typing import ClassVar

from llava_consensus.reduction.grid import divide
from llava_consensus.reduction.method import Selected, Selector
from llava_consensus.reduction.tokens import VisualTokens


@dataclass(frozen=True, kw_only=True)
class UniformGrid(Selector):
    """Keep the patch in the middle of each of T equal cells of the picture, without looking at it."""

    title: ClassVar[str] = "uniform grid"
    multiplies_nothing: ClassVar[bool] = True

    def choose(self, tokens: VisualTokens, count: int) -> Selected:
        """The `count` centres."""
        return Selected(divide(tokens, count).centre)
