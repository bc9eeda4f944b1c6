"""SparseVLM: cut after decoder layers 2, 6 and 15 by the attention of the question's telling words; recycle the rest.

Zhang et al., "SparseVLM", ICML 2025. Text raters are the rows after the image whose share of a softmax of visual
times text embeddings is above uniform. Saliency is their head-mean attention in the layer before the cut; of the
dropped tokens the best 30 % are clustered by density peaks on that layer's output, and each cluster's mean goes after
the image. Version 1.5, the default, keeps published numbers of tokens; 1.0 keeps rank(attention) * scale + bias and
cuts after layer 19 too; 2.0 (SparseVLM+) divides the attention by that of all-ones queries and keys, keeps the 14 heads
with most visual mass, recycles nothing and leaves positions. For other T than the published ones, and other n than 576,
there is one cut after layer 2 with kept + recycled = T. So T is the number left after the only cut there, and the
authors' "equivalent tokens" in the published schedules. Differences: equal densities are ordered by index instead of by
noise; raters and attention rows only, never a map. In models of fewer than 32 layers the cuts are in proportion,
rounded, at least one layer apart.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.decoder import Chosen, Cut, DecoderView, InDecoder, at_columns, scaled
from llava_consensus.reduction.merging import group_means
from llava_consensus.reduction.method import Shape
from llava_consensus.reduction.options import NotNegative
from llava_consensus.reduction.saliency import head_rows, rotate
from llava_consensus.reduction.selection import counting, pick, rank
from llava_consensus.reduction.tokens import Stopwatch, TextProbe, ensure_finite

CUTS = {"1.0": (3, 7, 16, 20), "1.5": (3, 7, 16), "2.0": (3, 7, 16)}  # first layers that see less, of 32
PATCHES = 576  # the published schedules are for this many tokens
KEPT = {
    "1.5": {192: (300, 200, 110), 128: (303, 110, 36), 96: (238, 48, 26), 64: (66, 30, 17)},
    "2.0": {192: (300, 200, 118), 128: (238, 108, 60), 96: (246, 54, 28), 64: (66, 34, 20)},
}
RANKS = {192: (13.5, 0.0), 128: (9.0, 6.0), 64: (0.8, 0.0)}  # scale and bias of version 1.0
HEADS = 14


@dataclass(frozen=True, kw_only=True)
class SparseVLM(InDecoder):
    """SparseVLM: cut in stages by the attention of the question's telling words, recycling dropped tokens.

    Args:
        version: `1.5` | `1.0` (counts are read from the data: it waits for the device at each cut, and `entering` says
            the most there can be) | `2.0` (always keeps positions).
        scale, bias: of version 1.0; None are the published ones of T = 192, 128 and 64.
    """

    version: Literal["1.5", "1.0", "2.0"] = "1.5"
    scale: NotNegative | None = None
    bias: NotNegative | None = None

    title: ClassVar[str] = "SparseVLM"
    asks: ClassVar[str] = "text"

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", str(self.version))  # the command line reads 1.5 as a number
        super().__post_init__()

    @property
    def adaptive(self) -> bool:
        """Version 1.0 reads its counts from the data, image by image."""
        return self.version == "1.0"

    @property
    def renumbers(self) -> bool:
        """Version 2.0 leaves positions, whatever `positions` says."""
        return self.version != "2.0" and super().renumbers

    def plan(self, tokens: int, available: int, layers: int) -> list[Cut]:
        """The published schedule, or one cut that leaves T. Of version 1.0 the most that can stay."""
        cuts = scaled(CUTS[self.version], layers)
        listed = KEPT.get(self.version, {}).get(tokens) if available == PATCHES else None
        if self.version == "1.0":
            self.rank_rule(tokens)
            counts = [available] * len(cuts)
        elif listed is None:
            cuts, counts = cuts[:1], [tokens if self.version == "2.0" else solve(tokens, available)]
        else:
            counts = list(listed)
        planned, left = [], available
        for cut, count in dict(zip(cuts, counts, strict=True)).items():
            kept = min(count, left - 1)
            # `solve` keeps all T if there is no room for clusters
            no_clusters = self.version == "2.0" or (listed is None and kept == tokens)
            planned.append(Cut(cut, kept, 0 if no_clusters else recycled(left - kept)[1]))
            left = planned[-1].left
        return planned

    def rank_rule(self, tokens: int) -> tuple[float, float]:
        published = RANKS.get(tokens, (None, 0.0))
        scale = published[0] if self.scale is None else self.scale
        bias = published[1] if self.bias is None else self.bias
        if scale is None:
            raise OptionError(f"tokens={tokens}: version 1.0 has no published scale for it. Give scale (and bias)")
        return scale, bias

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Attention rows, and at every cut the raters, the distances and the means of recycled tokens."""
        spent, left = super().flops(shape, budget), shape.patches
        for cut in self.cuts(budget, shape.patches, shape.layers):
            candidates = recycled(left - cut.kept)[0] if cut.merged else 0
            spent += 2.0 * shape.width * (shape.patches * shape.text + candidates * (candidates + cut.merged))
            if self.version == "2.0":
                spent += 2.0 * shape.head_width * shape.text * left
            left = cut.left
        return spent

    def select(self, view: DecoderView, watch: Stopwatch) -> Chosen:
        with watch.time("saliency"), torch.no_grad():
            attention = at_columns(head_rows(view.probe), view.columns)  # [P, H, L, v]
            memo = {} if view.memo is None else view.memo
            if "raters" not in memo:  # the same at each cut
                memo["raters"] = raters(view.visual_inputs, view.text_inputs, view.probe.row_mask)
            is_rater = memo["raters"]
            if self.version == "2.0":
                attention = best_heads(attention / gravity(view.probe, view.columns)[:, None], is_rater)
            saliency = (attention.mean(1) * is_rater[..., None]).sum(1) / is_rater.sum(1, keepdim=True)  # [P, v]
            order, size = rank(ensure_finite("SparseVLM's attention rows", saliency)), saliency.shape[1]
            count = self.count_by_rank(view.tokens, attention, is_rater) if self.adaptive else view.cut.kept
        kept = order[:, :count].sort(dim=1).values
        if view.cut.merged == 0 or count == size:
            return Chosen(kept)
        candidates, clusters = recycled(size - count)
        with watch.time("recycling"):
            chosen = order[:, count : count + candidates]
            states = pick(view.hidden, chosen)
            group, centres = cluster(states.detach(), clusters)
            merged = ensure_finite("SparseVLM's merged tokens", group_means(states, group, clusters))
            return Chosen(kept, merged, chosen.gather(1, centres))

    def count_by_rank(self, tokens: int, attention: Tensor, is_rater: Tensor) -> int:
        """Version 1.0's number of kept tokens of one image. Waits for the device: the number is a result."""
        scale, bias = self.rank_rule(tokens)
        matrix_rank = int(torch.linalg.matrix_rank(attention.mean(1)[0][is_rater[0]]))
        size = attention.shape[-1]
        return size if matrix_rank == size else max(1, min(int(matrix_rank * scale + bias), size - 1))


def recycled(dropped: int) -> tuple[int, int]:
    """Counts of the dropped tokens that are recycled and of their clusters."""
    candidates = int(dropped * 0.3) + 1
    return candidates, candidates // 10 + 1


def solve(tokens: int, available: int) -> int:
    """The largest k with k + clusters = T; T itself if there are more clusters than that (then nothing is recycled)."""
    if recycled(available)[1] > tokens:
        return tokens
    return next(k for k in reversed(range(tokens)) if k + recycled(available - k)[1] == tokens)


def raters(visual: Tensor, text: Tensor, mask: Tensor) -> Tensor:
    """Text rows whose mean share of the visual tokens' softmax over text is above the mean; all rows where none is.

    Args:
        visual: [P, n, D] inputs of layer 0.
        text: [P, L, D] rows after the image.
        mask: [P, L] true if a row is real.
    Returns:
        [P, L] bool.
    """
    logits = (visual.float() @ text.float().transpose(1, 2)).masked_fill(~mask[:, None], float("-inf"))
    share = ensure_finite("SparseVLM's raters", torch.softmax(logits, dim=-1).mean(1))  # [P, L]
    above = (share > share.sum(1, keepdim=True) / mask.sum(1, keepdim=True)) & mask
    return torch.where(above.any(1, keepdim=True), above, mask)


def gravity(probe: TextProbe, columns: Tensor) -> Tensor:
    """Attention by rotary embedding only: rotated all-ones queries times keys, scaled. [P, L, v]."""
    cos, sin = (probe.cos, probe.sin) if probe.angles is None else probe.angles()
    rotated = rotate(torch.ones_like(cos[:, None], dtype=torch.float32), cos.float(), sin.float())[:, 0]  # [P, W, d]
    return pick(rotated, probe.rows) @ pick(rotated, columns).transpose(1, 2) * probe.scale


def best_heads(attention: Tensor, is_rater: Tensor) -> Tensor:
    """The 14 heads (or all of fewer) whose raters give the visual tokens most: [P, H, L, v] -> [P, 14, L, v]."""
    mass = (attention * is_rater[:, None, :, None]).sum((2, 3))  # [P, H]
    index = rank(mass)[:, :HEADS]
    return attention.gather(1, index[..., None, None].expand(-1, -1, *attention.shape[2:]))


def cluster(states: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Density-peak clusters: a centre is dense and far from anything denser. Equal densities rank by index.

    Args:
        states: [P, m, D].
        count: clusters.
    Returns:
        Cluster of every state [P, m], and centres [P, count], best first.
    """
    states = states.float()
    distance = torch.cdist(states, states, compute_mode="donot_use_mm_for_euclid_dist") / states.shape[-1] ** 0.5
    density = densities(distance, count)
    place = counting(states.shape[1], states.device)
    equal = density[:, None] == density[..., None]
    denser = (density[:, None] > density[..., None]) | (equal & (place < place[:, None]))  # [P, m, of which]
    widest = distance.flatten(1).amax(1)[:, None, None]
    gap = torch.where(denser, distance, widest).amin(-1)
    centres = rank(gap * density)[:, :count]
    group = distance.gather(2, centres[:, None].expand(-1, states.shape[1], -1)).argmin(-1)
    cluster_index = counting(count, states.device).expand_as(centres)
    return group.scatter(1, centres, cluster_index), centres


def densities(distance: Tensor, count: int) -> Tensor:
    """Density of each state, from the distances to its `count` nearest, itself included: [P, m, m] -> [P, m]."""
    return torch.exp(-distance.topk(count, dim=-1, largest=False).values.square().mean(-1))
