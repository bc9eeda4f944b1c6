"""FlashVID: in each frame of a video tokens are kept that are looked at and unlike each other, and the others merge
along time, then within their frame (ICLR 2026; official code 1d37422, its `flashvid_compression`).

A video is cut into segments where the means of two frames differ (cosine below 0.9), and where they differ most until
there are 8. Of the b tokens of a frame, T over the frames rounded up, 0.7 b are kept by farthest-point sampling; the
distance to a token counts by its attention and by its likeness to the frames of its segment. Each other token joins
the one most like it in the frame before, where their cosine is above 0.8; trees of them become sums, the last frame
first, and the remaining tokens of a frame are clustered by density peaks. A cluster's mean is at its centre.

T is the number of tokens the language model gets, 1.25 times the authors' share; their cut to three tenths before layer
20 is `flashvid:tokens=N+fastv:layer=20`. As in theirs, numbers of clusters are rounded up frame by frame, so that a few
more than T may come, and a sum is divided by one more than its own children, which makes no mean of a deep tree.
Differences: no noise on the density (theirs, 1e-6, decides where a frame has few clusters); in a segment of one frame
theirs clusters kept tokens once more, so that a place may come twice; ties go to the lower index. An image is a video
of one frame.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from llava_consensus.methods.hiprune import looked_at
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.merging import Folded, directions
from llava_consensus.reduction.method import AfterTower, Order, Shape
from llava_consensus.reduction.options import Ratio
from llava_consensus.reduction.selection import arrange, cosines, greedy, left_over, pick, rank
from llava_consensus.reduction.tokens import Need, Reduction, VisualTokens, ensure_finite

SCALE, NEIGHBOURS = 1e6, 7  # of attention, as in the authors' code; of a token's density


class Trees(NamedTuple):
    """Tokens of a segment of f frames after they were merged along time."""

    values: Tensor  # [f, n, D]
    root: Tensor  # [f, n] which of the f n tokens each went into
    left: Tensor  # [f, n] true if a token stays, and is not among the kept


@dataclass(frozen=True, kw_only=True)
class FlashVID(AfterTower):
    """Keep the salient, diverse tokens of each frame, and merge the others along time and within their frame.

    Args:
        alpha: share of a frame's tokens that are kept; the others are merged ones.
        likeness: cosine above which a token joins one of the frame before.
        cut: cosine of frames below which a segment ends.
        segments: least number of segments.
        relevance: whether likeness to the frames of its segment counts for a token too.
        vision_layer: the block that is read, from 0, or from the end if negative; None is the one that feeds the
            projector.
    """

    order: Order = "raster"
    alpha: Ratio = 0.7
    likeness: Ratio = 0.8
    cut: Ratio = 0.9
    segments: int = 8
    relevance: bool = True
    vision_layer: int | None = None

    title: ClassVar[str] = "FlashVID"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.ATTENTION})

    @property
    def tile_budget(self) -> str:
        return "global"

    @property
    def adaptive(self) -> bool:
        """True: numbers of clusters are rounded up in each frame."""
        return True

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Attention of one block, likeness to frames, and the pairs within a frame and with the one before. At most:
        how many tokens are clustered follows from the video.
        """
        if budget.tokens >= shape.available:
            return 0.0
        frames, size = shape.tiles, shape.patches
        pairs = (3 * frames - 1) * size * size + self.relevance * frames * frames * size
        return 2.0 * (pairs * shape.width + frames * (size + shape.classes) ** 2 * shape.vision_width)

    def reduce(self, tokens: VisualTokens, budget: Budget) -> Reduction:
        """Kept and merged tokens in the order of the video, of units that are left with equal numbers of them."""
        size, frames = tokens.projected.shape[1], tokens.tiles_per_unit
        frame = tokens.tile - tokens.tile.amin(1, keepdim=True)
        even = torch.arange(frames, device=frame.device).repeat_interleave(-(-size // frames))[:size]
        frames = frames if size % frames == 0 and torch.equal(frame[0], even) else 1  # rows of tiles that are mixed
        videos = ensure_finite("projected tokens", tokens.projected).unflatten(1, (frames, -1)).float()
        saliency = tokens.of_tiles(looked_at(tokens.needed(Need.ATTENTION))).unflatten(1, (frames, -1))
        each = math.ceil(budget.tokens / frames)
        found = [self.compressed(*unit, each) for unit in zip(videos, saliency, strict=True)]
        chosen, merged, anchors, group = (torch.stack(parts) for parts in zip(*found, strict=True))
        folded = None
        if merged.shape[1]:
            rest = left_over(chosen, size)
            folded = Folded(merged.to(tokens.projected.dtype), anchors, rest, group.gather(1, rest))
        return arrange(pick(tokens.projected, chosen), chosen, size, self.order, folded, ascending=True)

    def compressed(self, video: Tensor, saliency: Tensor, each: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The remaining tokens of a video.

        Args:
            video: [F, n, D] its tokens.
            saliency: [F, n] attention of each.
            each: tokens that are left of a frame.
        Returns:
            Kept tokens [K]; merged ones [M, D], their places [M], and which of the M each of the F n tokens is in.
        """
        count, size, first, total = math.ceil(each * self.alpha), video.shape[1], 0, 0
        kept, merged, anchors, group = list[Tensor](), [video[0, :0]], list[Tensor](), list[Tensor]()
        for length in lengths(video.detach().mean(1), self.cut, self.segments):
            part, start = video[first : first + length], first * size
            own = diverse(part.detach(), saliency[first : first + length], count, self.relevance)  # [f, A]
            kept.append((own + torch.arange(length, device=own.device)[:, None] * size).flatten() + start)
            values, centres, joined = self._merged(part, own, each)
            merged.append(values)
            anchors.append(centres + start)
            group.append(joined + total)
            first, total = first + length, total + len(values)
        return torch.cat(kept), torch.cat(merged), torch.cat(anchors), torch.cat(group)

    def _merged(self, part: Tensor, own: Tensor, each: int) -> tuple[Tensor, Tensor, Tensor]:
        """Merged tokens [M, D] of a segment, the tokens [M] they are at, and which of the M each of its tokens is in.

        Args:
            part: [f, n, D] the segment.
            own: [f, A] its kept tokens.
            each: tokens of a frame.
        """
        length, size = part.shape[:2]
        if each == own.shape[1]:
            none = own.new_empty(0)
            return part[0, :0], none, own.new_zeros(length * size)
        free = torch.ones(length, size, dtype=torch.bool, device=part.device).scatter(1, own, False)
        every = torch.arange(length * size, device=part.device).view(length, size)
        trees = Trees(part, every, free)
        if length > 1:
            trees = merged_along_time(part, free, self.likeness, each * length)
        wanted = (each - own.shape[1]) * length / int(trees.left.sum().clamp_min(1))
        values, centres, joined = list[Tensor](), list[Tensor](), torch.zeros_like(every).flatten()
        for number in range(length):
            left = trees.left[number].nonzero()[:, 0]
            points, group, peaks = trees.values[number, left], torch.arange(len(left), device=left.device), None
            if wanted < 1 and (clusters := math.ceil(len(left) * wanted)):
                peaks, group = density_peaks(points.detach(), clusters)
                member = one_hot(group, clusters).T.to(points.dtype)
                points = member @ points / member.sum(1, keepdim=True)
            joined[every[number, left]] = group + sum(map(len, values))
            values.append(points)
            centres.append(every[number, left if peaks is None else left[peaks]])
        return torch.cat(values), torch.cat(centres), joined[trees.root.flatten()]


def lengths(means: Tensor, cut: float, least: int) -> list[int]:
    """Frames of each segment, given the means of the frames [F, D]. Waits for the device."""
    points = directions(means)
    likeness = (points[:-1] * points[1:]).sum(1)
    ends = (likeness < cut).nonzero()[:, 0]
    if len(ends) + 1 < least:
        more = rank(-likeness.masked_fill(likeness < cut, 1.0)[None])[0, : least - 1 - len(ends)]
        ends = torch.cat((ends, more)).sort().values
    places = [-1, *ends.tolist(), len(means) - 1]
    return [end - start for start, end in pairwise(places) if end > start]


def diverse(frames: Tensor, saliency: Tensor, count: int, relevance: bool) -> Tensor:
    """Tokens of each frame, ascending: the next is farthest from those that are kept, distances to a token times its
    weight: [f, n, D], [f, n] -> [f, count].
    """
    points, weight = directions(frames), saliency.float() * SCALE
    if relevance:
        weight = weight * torch.einsum("fnd,gd->fgn", frames, frames.mean(1)).mean(1)
    table = cosines(points)
    loss = table[:, :-1].sub_(1).mul_(weight[:, None])  # [f, n, n]
    first = loss.topk(2, dim=1).values[:, 1].argmin(1, keepdim=True)  # farthest from its nearest neighbour
    return greedy(table, count, first=first).sort(1).values


def merged_along_time(frames: Tensor, free: Tensor, likeness: float, least: int) -> Trees:
    """The segment with each token that is free to in the most like one of the frame before, where their cosine is above
    `likeness`, or less of them where fewer than `least` would stay: [f, n, D], [f, n].
    """
    length, size = free.shape
    points = directions(frames.detach())
    cosine = torch.einsum("fnd,fmd->fnm", points[1:], points[:-1])
    cosine = cosine.masked_fill(~free[1:, :, None], -1.0).masked_fill(~free[:-1, None], -1.0)
    most, parent = (torch.nn.functional.pad(one, (0, 0, 1, 0), value=-1) for one in cosine.max(2))
    linked = most > likeness
    if int((~linked).sum()) < least:
        linked = most > max(float(most.flatten().topk(length * size - least).values[-1]), -1 + 1e-6)
    values, above, children = [], torch.zeros_like(frames[0]), torch.zeros_like(frames[0, :, 0])
    for number in range(length - 1, -1, -1):
        added, own = frames[number] + above, linked[number]
        values.append(torch.where(own[:, None], added, added / (1 + children)[:, None]))
        member = (one_hot(parent[number].clamp_min(0), size) * own[:, None]).T.to(frames.dtype)  # [n, n]
        above, children = member @ added, member.sum(1)
    root = [torch.arange(size, device=free.device)]
    for number in range(1, length):
        root.append(torch.where(linked[number], root[-1][parent[number]], number * size + root[0]))
    return Trees(torch.stack(values[::-1]), torch.stack(root), ~linked & free)


def density_peaks(points: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Centres of clusters [count], the best first, and which of them each token is in: [m, D] -> [m]."""
    apart = torch.cdist(points, points) / points.shape[1] ** 0.5
    near = apart.topk(min(count, NEIGHBOURS), dim=1, largest=False).values
    density = torch.exp(-near.square().mean(1))
    higher = density[None] > density[:, None]
    score = torch.where(higher, apart, apart.max()).amin(1) * density
    centres = rank(score[None])[0, :count]
    group = apart[:, centres].argmin(1)
    return centres, group.scatter(0, centres, torch.arange(count, device=group.device))
