"""PyramidDrop: keep a shrinking share of the visual tokens after a quarter, a half and three quarters of the decoder.

Xing et al., "PyramidDrop", CVPR 2025. Before layers 8, 16 and 24 of 32 the visual tokens are ranked by the head-mean
attention of the last prompt token, with that layer's own norm, queries and keys; positions close up after each cut. The
official ratios 1/2, 1/4, 1/8 are the geometric schedule n, n l, n l^2, n l^3 with l = 1/2; a budget T sets l, so that T
stay after the last cut (`count=kept`; 72 of 576 is the official schedule), or T is the mean over layers (`count=eq`;
nothing below a quarter of n can be). Differences from the official code: batches with padding and several images
work, and the keys of the ranking layer are the only extra projection. In models of fewer than 32 layers the cuts are
at the same quarters, rounded. The official lists of layers and ratios can be given as they are, `layers="8 16 24"` and
`ratios="0.5 0.25 0.125"`.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from llava_consensus.errors import OptionError
from llava_consensus.reduction.decoder import Chosen, Cut, DecoderView, InDecoder, last_row_saliency, scaled
from llava_consensus.reduction.options import numbers
from llava_consensus.reduction.selection import top
from llava_consensus.reduction.tokens import Stopwatch

CUTS = (8, 16, 24)  # of 32 layers


@dataclass(frozen=True, kw_only=True)
class PyramidDrop(InDecoder):
    """PyramidDrop: keep fewer visual tokens after each quarter of the decoder, by the last prompt token's attention.

    Args:
        count: `kept` (T tokens after the last cut) | `eq` (T is the mean over layers of the tokens entering them).
        layers: the first layer, from 0, that sees fewer tokens, for each cut; empty: the published ones.
        ratios: share of the image's tokens that each cut leaves; T then only says whether to reduce at
            all. Empty: computed from T.
    """

    count: Literal["kept", "eq"] = "kept"
    layers: str = ""
    ratios: str = ""

    title: ClassVar[str] = "PyramidDrop"
    attention: ClassVar[str] = "own"

    def __post_init__(self) -> None:
        super().__post_init__()
        cuts, ratios = numbers("layers", self.layers, whole=True), numbers("ratios", self.ratios)
        if cuts != sorted(set(cuts)):
            raise OptionError(f"layers={self.layers!r} must ascend")
        if ratios != sorted(ratios, reverse=True) or any(not 0 < ratio <= 1 for ratio in ratios):
            raise OptionError(f"ratios={self.ratios!r} must be numbers in (0, 1] that do not grow")
        if ratios and len(ratios) != len(cuts or CUTS):
            raise OptionError(f"ratios={self.ratios!r}: {len(ratios)} for {len(cuts or CUTS)} cuts: give one for each")

    def plan(self, tokens: int, available: int, layers: int) -> list[Cut]:
        """Cuts with counts truncated to whole numbers, as the official code does.

        Raises:
            OptionError: for a mean the layers before the first cut exceed already, or a layer the model does not have.
        """
        cuts = self._cuts(layers)
        ratios = numbers("ratios", self.ratios)
        if ratios:
            return [Cut(cut, max(1, int(available * ratio))) for cut, ratio in zip(cuts, ratios, strict=True)]
        share = self._share(tokens, available, cuts, layers)
        counts = [max(1, int(available * share**power + 1e-6)) for power in range(1, len(cuts) + 1)]
        if self.count == "kept":
            counts[-1] = tokens
        return [Cut(cut, kept) for cut, kept in zip(cuts, counts, strict=True)]

    def _cuts(self, layers: int) -> tuple[int, ...]:
        cuts = tuple(int(cut) for cut in numbers("layers", self.layers, whole=True))
        if not cuts:
            return scaled(CUTS, layers)
        if not 1 <= cuts[0] <= cuts[-1] < layers:
            raise OptionError(
                f"layers={self.layers!r} must be in 1..{layers - 1}: the model has {layers} decoder layers"
            )
        return cuts

    def _share(self, tokens: int, available: int, cuts: tuple[int, ...], layers: int) -> float:
        """l: the share of the entering tokens that each cut leaves."""
        if self.count == "kept":
            return (tokens / available) ** (1 / len(cuts))
        spans = [end - start for start, end in zip((0, *cuts), (*cuts, layers), strict=True)]
        if tokens * layers <= spans[0] * available:
            raise OptionError(
                f"tokens={tokens} cannot be the mean over layers (count=eq): {spans[0]} of {layers} layers see all "
                f"{available} tokens. Give more than {spans[0] * available // layers}, or count=kept"
            )
        low, high = 0.0, 1.0
        for _ in range(60):  # the mean grows with l
            middle = (low + high) / 2
            mean = available * sum(span * middle**power for power, span in enumerate(spans)) / layers
            low, high = (middle, high) if mean < tokens else (low, middle)
        return high

    def select(self, view: DecoderView, watch: Stopwatch) -> Chosen:
        with watch.time("saliency"):
            return Chosen(top(last_row_saliency(view, "PyramidDrop"), view.cut.kept))
