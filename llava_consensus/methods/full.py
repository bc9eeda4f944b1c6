"""Full: every visual token, the reference each budget is compared with."""

from dataclasses import dataclass
from typing import ClassVar

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method


@dataclass(frozen=True, kw_only=True)
class Full(Method):
    """No reduction: the unpatched model, bit for bit, whatever the budget says."""

    reduces: ClassVar[bool] = False
    multiplies_nothing: ClassVar[bool] = True

    def entering(self, budget: Budget, available: int, layers: int) -> list[int]:
        """All tokens, in every layer."""
        return [available] * layers
