"""Uniform grid: keep T tokens at even distances, whatever the image shows. The floor that looks at nothing and is
still hard to beat (UniPruneBench, arXiv 2511.02650, asks for it beside `random`): it covers the whole image, which
saliency does not. The centres of the cells of `grid.py`; exactly T tokens for any T; nothing is drawn at random.
"""

from dataclasses import dataclass
from typing import ClassVar

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.grid import divide
from llava_consensus.reduction.method import AfterTower
from llava_consensus.reduction.selection import assemble
from llava_consensus.reduction.tokens import Reduction, VisualTokens


@dataclass(frozen=True, kw_only=True)
class UniformGrid(AfterTower):
    """Keep the patch in the middle of each of T equal cells of the image, without looking at it."""

    title: ClassVar[str] = "uniform grid"
    by_grid: ClassVar[bool] = True
    multiplies_nothing: ClassVar[bool] = True

    def reduce(self, tokens: VisualTokens, budget: Budget) -> Reduction:
        count = min(budget.tokens, tokens.projected.shape[1])
        return assemble(tokens.projected, divide(tokens, count).centre, self.order)
