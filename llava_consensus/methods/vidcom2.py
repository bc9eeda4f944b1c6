"""VidCom2: frames that differ from their video get more of the budget, and keep the tokens that differ most (Liu et
al., "Video Compression Commander", EMNLP 2025; official code 944a17d).

Of the projected tokens the half of the channels that vary least is read. A token's likeness to its video and to its
frame is the sum over five widths of a Gaussian of its distance to their mean. A frame's share is base x (1 + p - mean
p), base being T / N and p a softmax, at temperature 0.01, of how unlike the video its tokens are on average. In a frame
the tokens stay whose sum of likenesses is smallest. The tiles of a video are its frames; an image of several tiles is
read in the same way, one of a single tile as a video of one frame. Differences: shares come to exactly T (largest
remainders, where theirs are rounded), and ties go to the lower index. Nothing depends on the depth of a model.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.merging import directions
from llava_consensus.reduction.method import Selected, Selector, Shape
from llava_consensus.reduction.options import Positive
from llava_consensus.reduction.selection import pick, rank, seated, topped_up
from llava_consensus.reduction.tokens import VisualTokens, ensure_finite

WIDTHS = tuple(2.0**power for power in range(-3, 2))  # of the Gaussians


@dataclass(frozen=True, kw_only=True)
class VidCom2(Selector):
    """Share the budget out over the frames of a video by how unlike it they are, and keep their most unlike tokens.

    Args:
        temperature: of the softmax over the frames, above 0.
    """

    temperature: Positive = 0.01

    title: ClassVar[str] = "VidCom2"

    @property
    def tile_budget(self) -> str:
        return "global"

    def flops(self, shape: Shape, budget: Budget) -> float:
        """The means of the frames."""
        if budget.tokens >= shape.available:
            return 0.0
        return 2.0 * shape.tiles * shape.available * (shape.width // 2)

    def choose(self, tokens: VisualTokens, count: int) -> Selected:
        """The most unlike tokens of each frame; `fused` is how unlike video and frame a token is."""
        frame = tokens.tile - tokens.tile.amin(1, keepdim=True)
        member = one_hot(frame, tokens.tiles_per_unit).float()  # [B, N, F]
        video, local = likeness(still(ensure_finite("projected tokens", tokens.projected).float()), frame, member)
        sizes = member.sum(1)
        share = shares((video[..., None] * member).sum(1) / sizes, self.temperature) * (count / frame.shape[1])
        exact = share.clamp_max(1.0) * sizes
        seats = topped_up(exact.floor().long(), exact - exact.floor(), count).clamp_min(1)
        unlike = -(video + local)
        return Selected(seated(rank(unlike), frame, seats, count), fused=unlike)


def still(tokens: Tensor) -> Tensor:
    """The half of the channels that vary least over a unit: [B, N, D] -> [B, N, D // 2], at least one."""
    kept = rank(-tokens.var(dim=1, unbiased=False))[:, : max(tokens.shape[2] // 2, 1)]
    return tokens.gather(2, kept[:, None].expand(-1, tokens.shape[1], -1))


def likeness(tokens: Tensor, frame: Tensor, member: Tensor) -> tuple[Tensor, Tensor]:
    """Likeness of each token to its video and to its frame: [B, N, C], [B, N], [B, N, F] -> [B, N] twice."""
    points = directions(tokens)
    frames = member.transpose(1, 2) @ points / member.sum(1)[..., None]  # [B, F, C]

    def like(centre: Tensor) -> Tensor:
        apart = (points - centre).square().sum(2)
        return torch.stack([torch.exp(-apart / (2 * width)) for width in WIDTHS]).sum(0)

    return like(points.mean(1, keepdim=True)), like(pick(frames, frame))


def shares(likeness: Tensor, temperature: float) -> Tensor:
    """Around 1, more for frames that are less like their video: [B, F] -> [B, F]."""
    part = torch.softmax(-likeness / temperature, dim=1)
    return 1 + part - part.mean(1, keepdim=True)
