"""Full: every visual token, the reference each budget is compared with."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Placement
from llava_consensus.reduction.tokens import Reduction, VisualTokens


@dataclass(frozen=True, kw_only=True)
class Full(Placement):
    """No reduction: the unpatched model, bit for bit, whatever the budget says."""

    reduces: ClassVar[bool] = False

    def entering(self, budget: Budget, available: int, layers: int) -> list[int]:
        """All of them, in every layer."""
        return [available] * layers

    def reduce(self, tokens: VisualTokens, budget: Budget) -> Reduction:
        """All N tokens. A host never gets here: `reduces` says that there is nothing to do."""
        places = torch.arange(tokens.projected.shape[1], device=tokens.projected.device).expand(
            tokens.projected.shape[:2]
        )
        return Reduction(tokens.projected, places, places[:, :0], places, places)
