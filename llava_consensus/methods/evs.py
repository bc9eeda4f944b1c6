"""EVS, efficient video sampling: keep the first frame and the changes after it (NVIDIA, arXiv 2510.14624; as vLLM has
it in `vllm/multimodal/evs.py`, and SGLang from there).

A token of a later frame is ranked by 1 less its cosine with the token at the same place in the frame before; the first
frame comes before all of them, whole. The tiles of a video are its frames; an image of one tile is a video of one
frame, in which nothing changes. Differences: T is exact. Where it is less than a frame, vLLM keeps the whole first
frame; here T tokens of it at even distances stay, so an image is thinned out evenly. Tokens keep their positions, as
theirs do. Nothing depends on the depth of a model.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from llava_consensus.reduction.merging import directions
from llava_consensus.reduction.method import Positions, Selected, Selector
from llava_consensus.reduction.selection import pick, top
from llava_consensus.reduction.tokens import VisualTokens, ensure_finite

FIRST = 3.0  # above any cosine distance


@dataclass(frozen=True, kw_only=True)
class EVS(Selector):
    """Keep the first frame of a video and, of the others, the tokens that changed most since the frame before."""

    positions: Positions = "keep"

    title: ClassVar[str] = "EVS"
    multiplies_nothing: ClassVar[bool] = True

    @property
    def tile_budget(self) -> str:
        return "global"

    def choose(self, tokens: VisualTokens, count: int) -> Selected:
        """The tokens that changed most; `fused` is how much each changed."""
        points = directions(ensure_finite("projected tokens", tokens.projected).float())
        frame = tokens.tile - tokens.tile.amin(1, keepdim=True)
        before = previous(frame, tokens.patch, tokens.tiles_per_unit)
        changed = 1 - (points * pick(points, before.clamp_min(0))).sum(2)
        first = before < 0
        changed = torch.where(first, FIRST + _even(first, count), changed)
        return Selected(top(changed, count), fused=changed)


def previous(frame: Tensor, patch: Tensor, frames: int) -> Tensor:
    """The token at the same place one frame before: [B, N], [B, N] -> [B, N], -1 if there is none."""
    size = frame.shape[1]  # no frame has more places than the video has tokens
    place = frame * size + patch
    table = torch.full((len(frame), (frames + 1) * size), -1, device=frame.device)
    table.scatter_(1, place + size, torch.arange(size, device=frame.device).expand_as(place))
    return table.gather(1, place)


def _even(first: Tensor, count: int) -> Tensor:
    """1 for `count` of the marked tokens at even distances, or for all of them, and 0 for the others: [B, N]."""
    place, size = first.cumsum(1), first.sum(1, keepdim=True)
    return (place * count // size > (place - 1) * count // size).float()
