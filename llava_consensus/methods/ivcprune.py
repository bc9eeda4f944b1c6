"""IVC-Prune: half way through the decoder keep the visual tokens that are like the text by their values, and those
whose rotary coordinates distinguish the others (ICLR 2026; official code 03afd9c, its forward for Qwen2.5-VL).

Read are the values of layer K - 1, not its queries and keys. A row looks at the visual tokens by a softmax of its
value's products with theirs, mean over heads. The tokens that the text looks at most are seeds, which then look as the
text does; a token's saliency is the mean over text and seeds. Whatever their saliency, the seeds stay, and so do the
tokens whose cosines of the rotary table, mean over all frequencies (and over the three axes of Qwen-VL), are largest,
and those whose sines are: coordinates that represent the implicit origin. The rest of T goes by saliency. Positions are
kept.

Differences: T is any number, where the authors keep half of n; their tenths of n for cosines and sines and hundredth
for seeds are the same shares of T here. Text is all rows after the image, theirs without the first of them; each
image of a prompt is cut, theirs the first. They cut the caches of the layers before K too, afterwards, so that decode
steps do not see dropped tokens there; here those caches stay as those layers have read them. Their forward for LLaVA, a
union of variable size, is not here. K is 16 in a decoder of 28 layers or more, and in proportion to 32 in a smaller
one; theirs is 22 of the 36 of Qwen2.5-VL-3B (`layer=22`). Ties go to the lower index.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.decoder import Chosen, Cut, DecoderView, InDecoder, only_cut
from llava_consensus.reduction.method import Shape
from llava_consensus.reduction.options import Ratio
from llava_consensus.reduction.selection import top
from llava_consensus.reduction.tokens import Stopwatch, ensure_finite

LAYER, DEPTH = 16, 28  # where the cut was published, and the fewest layers of a decoder that it was published on


@dataclass(frozen=True, kw_only=True)
class IVCPrune(InDecoder):
    """IVC-Prune: keep tokens like the text by their values, and the tokens of the extreme rotary coordinates.

    Args:
        layer: K, how many layers see everything; None is 16, less in decoders of fewer than 28 layers.
        coordinates: share of T that is kept for its cosines, and again for its sines, in [0, 1].
        seeds: share of T that looks at the image as the text does, in [0, 1]; at least one token.
    """

    positions: Literal["renumber", "keep"] = "keep"
    layer: int | None = None
    coordinates: Ratio = 0.2
    seeds: Ratio = 0.02

    title: ClassVar[str] = "IVC-Prune"
    asks: ClassVar[str] = "text"
    attention: ClassVar[str] = "values"

    def plan(self, tokens: int, available: int, layers: int) -> list[Cut]:
        """One cut before layer K.

        Raises:
            OptionError: for a layer the model does not have.
        """
        layer = LAYER if self.layer is None and layers >= DEPTH else self.layer
        return [Cut(only_cut(layer, LAYER, layers), tokens)]

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Products of the values of text and seeds with those of the visual tokens."""
        if not self.cuts(budget, shape.patches, shape.layers):
            return 0.0
        rows = shape.text + self._seeds(budget.tokens)
        return 2.0 * shape.kv_heads * shape.head_width * rows * shape.patches

    def _seeds(self, kept: int) -> int:
        return min(max(1, round(self.seeds * kept)), kept)

    def select(self, view: DecoderView, watch: Stopwatch) -> Chosen:
        probe, kept = view.probe, view.cut.kept
        with watch.time("saliency"):
            at_tokens = view.columns[:, None, :, None]
            values = probe.key.float().gather(2, at_tokens.expand(-1, probe.key.shape[1], -1, probe.key.shape[3]))
            looks = looking(probe.query.float(), values, probe.scale)  # [P, L, v]
            asked = probe.row_mask.sum(1, keepdim=True)
            text = ensure_finite("IVC-Prune's values", (looks * probe.row_mask[..., None]).sum(1))  # [P, v]
            seeds = top(text, self._seeds(kept))  # [P, s]
            own = values.gather(2, seeds[:, None, :, None].expand(-1, values.shape[1], -1, values.shape[3]))
            saliency = (text + looking(own, values, probe.scale).sum(1)) / (asked + seeds.shape[1])
        with watch.time("coordinates"):
            angles = (part.float().mean(-1).gather(1, view.columns) for part in (probe.cos, probe.sin))
            count = min(round(self.coordinates * kept), (kept - seeds.shape[1]) // 2)
            first = torch.cat([seeds, *(top(part, count) for part in angles)], dim=1)
            # a saliency is a mean of shares, so never above 1
            return Chosen(top(saliency.scatter(1, first, 2.0), kept))


def looking(query: Tensor, values: Tensor, scale: float) -> Tensor:
    """How much rows look at visual tokens by their values, mean over heads: [P, H, L, d], [P, H, v, d] -> [P, L, v]."""
    grouped = query.unflatten(1, (values.shape[1], -1))  # a decoder may have several rows' heads for one of values
    return torch.softmax(grouped @ values[:, :, None].transpose(3, 4) * scale, dim=-1).mean((1, 2))
