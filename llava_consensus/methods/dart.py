"""DART: after the second decoder layer keep a few pivots and, for each, the visual tokens least like it.

Wen et al., "Stop Looking for Important Tokens in Multimodal Language Models: Duplication Matters More", EMNLP 2025.
Pivots are the 4 image and 4 text tokens whose rotated keys of layer K - 1 have the largest L1 norm; image pivots stay.
States that enter layer K pass the decoder's final norm; each pivot in turn adds the not yet chosen visual tokens with
the lowest cosine to it. No attention weight is read. Differences from the official code: it walks through a Python
set; here image pivots come first, then text pivots, each by rank, ties to the lower index. It keeps 4 + 8 floor(T / 8)
tokens; here the last rounds are shortened or the last one lengthened until T are there (`exact=false` is the official
count). In models of fewer than 32 layers K is 2/32 of the depth, rounded, at least 1.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.decoder import Chosen, Cut, DecoderView, InDecoder, only_cut
from llava_consensus.reduction.method import Shape
from llava_consensus.reduction.saliency import rotate
from llava_consensus.reduction.selection import pick, rank, top
from llava_consensus.reduction.tokens import Stopwatch, ensure_finite

PIVOTS = 4  # of each kind


@dataclass(frozen=True, kw_only=True)
class Dart(InDecoder):
    """DART: keep pivots by key norm and the tokens least similar to them.

    Args:
        layer: K, how many layers see everything; None is 2, less in shallow models.
        exact: whether T tokens stay, or 4 + 8 floor(T / 8) as in the official code.
    """

    positions: Literal["renumber", "keep"] = "keep"
    layer: int | None = None
    exact: bool = True

    title: ClassVar[str] = "DART"
    asks: ClassVar[str] = "text"

    def plan(self, tokens: int, available: int, layers: int) -> list[Cut]:
        """One cut before layer K.

        Raises:
            OptionError: for a layer the model does not have.
        """
        cut = only_cut(self.layer, 2, layers)
        kept = tokens if self.exact else PIVOTS + 2 * PIVOTS * (tokens // (2 * PIVOTS))
        return [Cut(cut, min(kept, available))]

    def rounds(self, kept: int) -> list[int]:
        """Number of tokens that each of the eight pivots adds, after the image pivots."""
        total = max(kept - PIVOTS, 0)
        per_pivot = kept // (2 * PIVOTS) if self.exact else total // (2 * PIVOTS)
        sizes: list[int] = []
        for _ in range(2 * PIVOTS - 1):
            sizes.append(min(per_pivot, total - sum(sizes)))
        return [*sizes, total - sum(sizes)]

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Cosines of eight pivots with every visual token."""
        cuts = self.cuts(budget, shape.patches, shape.layers)
        return 2.0 * 2 * PIVOTS * shape.patches * shape.width * len(cuts)

    @torch.no_grad()
    def select(self, view: DecoderView, watch: Stopwatch) -> Chosen:
        with watch.time("saliency"):
            kept = view.cut.kept
            norms = key_norms(view)  # [P, W]
            of_image = norms.gather(1, view.columns)
            of_text = norms.gather(1, view.probe.rows).masked_fill(~view.probe.row_mask, -1.0)
            image = rank(ensure_finite("DART's key norms", of_image))[:, : min(PIVOTS, kept)]
            text = rank(ensure_finite("DART's key norms", of_text))[:, :PIVOTS]
            # places that are no real row are replaced by the first
            text = torch.where(view.probe.row_mask.gather(1, text), text, text[:, :1])
            text = torch.cat((text, text[:, :1].expand(-1, PIVOTS - text.shape[1])), dim=1)
            states = torch.nn.functional.normalize(view.norm(view.hidden).float(), dim=-1)  # [P, v, D]
            text_states = torch.nn.functional.normalize(view.norm(view.asked).float(), dim=-1)  # [P, L, D]
            pivots = torch.cat((pick(states, image), pick(text_states, text)), dim=1)
            unlike = -ensure_finite("DART's cosines", pivots @ states.transpose(1, 2))  # [P, pivots, v]
        with watch.time("selection"):
            chosen = torch.zeros_like(of_image).scatter(1, image, 1.0)
            for number, size in enumerate(self.rounds(kept)[-unlike.shape[1] :]):
                fresh = rank(unlike[:, number].masked_fill(chosen > 0, float("-inf")))[:, :size]
                chosen = chosen.scatter(1, fresh, 1.0)
        return Chosen(top(chosen, kept))


def key_norms(view: DecoderView) -> Tensor:
    """L1 norm of every rotated key, heads side by side: [P, W]."""
    probe = view.probe
    return rotate(probe.key.float(), probe.cos.float(), probe.sin.float()).abs().sum((1, 3))
