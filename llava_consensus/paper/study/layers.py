"""SCAP beside the true attention of every decoder layer, and where in the picture it looks whatever is there.

SCAP is the attention of the words behind the picture in the first layer, computed before the language model runs
(`reduction/saliency.py`). This method drops nothing: it stops before every layer, computes that layer's attention of
the same words from the layer's own queries and keys, and records how its ranking of the visual tokens compares with
SCAP's.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from llava_consensus.paper.study.format import STRETCHES
from llava_consensus.reduction.decoder import Chosen, Cut, DecoderView, InDecoder
from llava_consensus.reduction.saliency import AGGREGATES, cross_saliency, text_attention
from llava_consensus.reduction.selection import agreement, rank
from llava_consensus.reduction.tokens import Stopwatch


@dataclass(frozen=True, kw_only=True)
class LayerProbe(InDecoder):
    """Drop nothing, and record how every layer's attention ranks the visual tokens beside SCAP. T is the number of
    best tokens whose overlap is counted.
    """

    positions: str = "keep"

    title: ClassVar[str] = "Attention of every layer"
    asks: ClassVar[str] = "text"
    attention: ClassVar[str] = "own"

    def plan(self, tokens: int, available: int, layers: int) -> list[Cut]:
        """A stop before every layer, at which all tokens stay."""
        return [Cut(layer, available) for layer in range(layers)]

    def select(self, view: DecoderView, watch: Stopwatch) -> Chosen:
        """All tokens. Records `correlation_...` and `overlap_...` with SCAP for each way to aggregate the rows, and in
        the first layer where SCAP looks with rotation (`rotated`) and without (`plain`).
        """
        with watch.time("saliency"), torch.no_grad():
            own = saliencies(view, rope=True)
            memory = view.memory if view.memory is not None else {}
            first = memory or own
            measures = {}
            for aggregate, saliency in own.items():
                measures[f"correlation_{aggregate}"] = rank_correlation(first[aggregate], saliency)
                measures[f"overlap_{aggregate}"] = agreement(first[aggregate], saliency, view.tokens)
            if not memory:
                memory.update(own)
                measures["rotated"] = by_position(own["all"])
                measures["plain"] = by_position(saliencies(view, rope=False)["all"])
        everything = torch.arange(view.cut.kept, device=view.columns.device).expand_as(view.columns)
        return Chosen(everything, measures=measures)


def saliencies(view: DecoderView, rope: bool) -> dict[str, Tensor]:
    """The attention of the text rows over the visual tokens, [P, v], for each way to aggregate the rows."""
    attention = text_attention(view.probe, rope)
    return {
        aggregate: cross_saliency(attention, view.probe.row_mask, view.columns, aggregate) for aggregate in AGGREGATES
    }


def rank_correlation(first: Tensor, second: Tensor) -> Tensor:
    """Spearman's rank correlation of two saliencies [P, v], equal values ordered by index: [P]."""
    size = first.shape[1]
    places = (rank(saliency).argsort(dim=1).double() for saliency in (first, second))
    distance = (next(places) - next(places)).square().sum(1)
    return 1 - 6 * distance / max(size * (size * size - 1), 1)


def by_position(saliency: Tensor) -> Tensor:
    """Mean saliency of equal stretches of the visual tokens, as a multiple of what each would have if all had the same:
    [P, v] -> [P, STRETCHES].
    """
    even = saliency.mean(1, keepdim=True).clamp_min(torch.finfo(saliency.dtype).tiny)
    return torch.nn.functional.adaptive_avg_pool1d((saliency / even)[:, None], STRETCHES)[:, 0]
