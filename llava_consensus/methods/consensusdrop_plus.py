"""ConsensusDrop+: ConsensusDrop whose tokens keep the positions they had among all tokens of their image.

The paper closes positions up after the reduction, as LLaVA does, and a model that reads by place then finds the places
gone. Of all options this is the one that was better at every budget (docs/positions.md).
"""

from dataclasses import dataclass
from typing import ClassVar

from llava_consensus.methods.consensusdrop import ConsensusDrop
from llava_consensus.reduction.method import Positions


@dataclass(frozen=True, kw_only=True)
class ConsensusDropPlus(ConsensusDrop):
    """ConsensusDrop with kept positions: a token stays at its position among all tokens, a merged one at that of its
    anchor. Everything else, and every option, is ConsensusDrop's.
    """

    positions: Positions = "keep"

    title: ClassVar[str] = "ConsensusDrop+"
