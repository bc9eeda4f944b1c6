"""ConsensusDrop+: ConsensusDrop whose tokens keep the positions they had among all tokens of their image.

The paper closes positions up after the reduction, as LLaVA does, and a model that reads by place then finds the places
gone. Of all options this is the one that was better at every budget (docs/positions.md).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from llava_consensus.methods.consensusdrop import ConsensusDrop


@dataclass(frozen=True, kw_only=True)
class ConsensusDropPlus(ConsensusDrop):
    """ConsensusDrop with kept positions: a token stands where it stood among all tokens, a merged one where its anchor
    stood. Everything else, and every option, is ConsensusDrop's.
    """

    positions: Literal["renumber", "keep", "mean"] = "keep"

    title: ClassVar[str] = "ConsensusDrop+"
