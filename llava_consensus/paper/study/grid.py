"""The runs of the study: ordinary runs of a sweep, so they are resumed, shared out and kept as any other.

cells = grid(full, retentions, rates)   # every selection on every benchmark, and all tokens
cell = probing(config, Share(0.25))     # SCAP beside every layer, on one benchmark
"""

from collections.abc import Sequence

from llava_consensus.evaluation.runs.configuration import RunConfig, prepare
from llava_consensus.evaluation.runs.sweep import Cell, cells
from llava_consensus.paper.study.layers import LayerProbe
from llava_consensus.paper.study.selection import RECOVERY, SIDES, Selection
from llava_consensus.reduction.budget import Share


def selections(rates: Sequence[float], layer: int | None) -> list[Selection]:
    """Both sides alone, then recovery with either student at every rate."""
    alone = [Selection(scores=side, layer=layer) for side in SIDES]
    recovered = [
        Selection(scores=RECOVERY, student=student, rate=rate, layer=layer) for student in SIDES for rate in rates
    ]
    return [*alone, *recovered]


def grid(
    full: Sequence[RunConfig], retentions: Sequence[Share], rates: Sequence[float], layer: int | None = None
) -> list[Cell]:
    """All runs of the study, each checked.

    Args:
        full: the run with all tokens of each benchmark.
        retentions: shares of a picture's tokens that stay.
        rates: of recovery.
        layer: how many decoder layers see everything; None is 2, in shallow models in proportion.
    Raises:
        ConsensusError: for a run that is wrong.
    """
    return cells(full, selections(rates, layer), retentions)


def probing(full: RunConfig, retention: Share) -> Cell:
    """The run that compares SCAP with the attention of every layer, at the overlap of so many best tokens."""
    return Cell(prepare(full).reduced_by(LayerProbe(), retention, "kept"))
