"""A method that keeps every other token, whatever it is asked, and remembers what a host handed to it."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import AfterTower
from llava_consensus.reduction.selection import assemble
from llava_consensus.reduction.tokens import Need, Reduction, VisualTokens


@dataclass(frozen=True, kw_only=True)
class Witness(AfterTower):
    """Keep tokens at equal distances: the same ones for every picture and prompt."""

    needs: ClassVar[frozenset[Need]] = frozenset({Need.PROBE})
    seen: list[VisualTokens] = field(default_factory=list, compare=False, repr=False)

    def reduce(self, tokens: VisualTokens, budget: Budget) -> Reduction:
        """The tokens at equal distances."""
        self.seen.append(tokens)
        units, size = tokens.projected.shape[:2]
        places = torch.arange(budget.tokens, device=tokens.projected.device) * size // budget.tokens
        return assemble(tokens.projected, places.expand(units, -1), self.order)


@dataclass(frozen=True, kw_only=True)
class TowerWitness(Witness):
    """The same, handed the attention of the vision tower too."""

    needs: ClassVar[frozenset[Need]] = frozenset({Need.PROBE, Need.ATTENTION})
