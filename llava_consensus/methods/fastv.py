"""FastV: after the second decoder layer keep the visual tokens the last prompt token attends to most.

Chen et al., "An Image is Worth 1/2 Tokens After Layer 2", ECCV 2024; written from its text only. The saliency is the
head-mean softmaxed attention of the last prompt token in layer K - 1, the cut is before layer K (from 0). Differences
from the official code: one attention row is computed from the layer's own queries and keys instead of all maps;
images are ranked each on its own, rows of a batch too; the cache holds every layer once; ties go to the lower index.
Official scripts count tokens after the cut (`count=kept`); `count=eq` gives T its other meaning, the mean over layers
of the tokens that enter them. In models of fewer than 32 layers K is 2/32 of the depth, rounded, at least 1.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from llava_consensus.errors import OptionError
from llava_consensus.reduction.decoder import Chosen, Cut, DecoderView, InDecoder, last_row_saliency, only_cut
from llava_consensus.reduction.selection import top
from llava_consensus.reduction.tokens import Stopwatch


@dataclass(frozen=True, kw_only=True)
class FastV(InDecoder):
    """FastV: keep the tokens that the last prompt token attends to after decoder layer 2.

    Args:
        count: `kept` (T tokens after the cut) | `eq` (T is the mean over layers of the tokens entering them).
        layer: K, how many layers see everything; None is 2, less in shallow models.
    """

    positions: Literal["renumber", "keep"] = "keep"
    count: Literal["kept", "eq"] = "kept"
    layer: int | None = None

    title: ClassVar[str] = "FastV"

    def plan(self, tokens: int, available: int, layers: int) -> list[Cut]:
        """One cut before layer K.

        Raises:
            OptionError: for a layer the model does not have, or a mean the layers before the cut exceed already.
        """
        cut = only_cut(self.layer, 2, layers)
        if self.count == "kept":
            return [Cut(cut, tokens)]
        kept = (2 * (tokens * layers - cut * available) + layers - cut) // (2 * (layers - cut))  # nearest whole number
        if kept < 1:
            least = -(-(cut * available + layers - cut) // layers)
            raise OptionError(
                f"tokens={tokens} cannot be the mean over layers (count=eq): {cut} of {layers} layers see all "
                f"{available} tokens. Give at least {least}, or count=kept"
            )
        return [Cut(cut, kept)]

    def select(self, view: DecoderView, watch: Stopwatch) -> Chosen:
        with watch.time("saliency"):
            return Chosen(top(last_row_saliency(view, "FastV"), view.cut.kept))
