"""RESTORE's token merging: half of the budget by a selector, half merged from the other tokens (Cho et al., ICML 2026,
arXiv 2606.01711, section 3; official code 9b27e68).

A selector keeps T / 2 tokens. Of the others, those are anchors that are representative and distinctive: the sum of a
token's cosines with the rest, times 1 less its largest cosine with a token of a smaller sum (as the code runs; its
names speak of a larger one). Every other token joins the anchor it is most like, and a merged token is the plain mean.
Kept tokens keep their positions, a merged one is at the lower median of its members; an image of several tiles is one
unit. Both methods of this file choose and merge so. `restore` is only the merging; `restore_calibrated` adds the
authors' calibration of the language model's attention (`reduction/calibration.py`), for which it drops tokens before
the first decoder layer instead of before the language model. Differences: ties go to the lower index. Nothing depends
on the depth of a model.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import threshold

from llava_consensus.errors import OptionError
from llava_consensus.methods.divprune import DivPrune
from llava_consensus.methods.holov import HoloV
from llava_consensus.methods.vispruner import VisPruner
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.decoder import Chosen, Cut, DecoderView, InDecoder
from llava_consensus.reduction.merging import directions, fold_at_medians
from llava_consensus.reduction.method import Order, Positions, ReadsTower, Selector, Shape, Tiled
from llava_consensus.reduction.selection import Folded, apart, assemble, counting, pick, top
from llava_consensus.reduction.tokens import Need, Reduction, Stopwatch, VisualTokens, ensure_finite


@dataclass(frozen=True, kw_only=True)
class Restore(ReadsTower):
    """Half of the tokens by another selector, and the rest merged into distinctive anchors.

    Args:
        selector: `vispruner` | `divprune` | `holov`, as the authors offer.
    """

    selector: Literal["vispruner", "divprune", "holov"] = "vispruner"
    tile_budget: Literal["per_tile", "global"] = "global"
    order: Order = "raster"
    positions: Positions = "keep"

    answer_version: ClassVar[int] = 2
    title: ClassVar[str] = "RESTORE merging"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.ATTENTION, Need.FEATURES})

    def counts(self, budget: Budget, available: int) -> tuple[int, int]:
        """Kept and merged tokens of one unit: halves, unless the budget says how many are merged."""
        merged = budget.tokens - budget.tokens // 2 if budget.merged is None else budget.merged
        return Budget(budget.tokens, merged).split(available)

    def chooser(self) -> Tiled:
        if self.selector == "divprune":
            return DivPrune(tile_budget=self.tile_budget)
        made = HoloV if self.selector == "holov" else VisPruner
        return made(tile_budget=self.tile_budget, vision_layer=self.vision_layer)

    def flops(self, shape: Shape, budget: Budget) -> float:
        """The selector's own, the cosines of all that is left, and the means."""
        total = 0.0
        for share, size in self.units(shape, budget):
            kept, merged = self.counts(share, size)
            if share.tokens < size:
                one = shape._replace(tiles=1, patches=size)
                total += self.chooser().flops(one, Budget(kept)) or 0.0 if kept else 0.0
                total += 2.0 * (size - kept) * (size - kept + merged) * shape.width
        return total

    def reduce(self, tokens: VisualTokens, budget: Budget) -> Reduction:
        """Kept and merged tokens of each unit. Gradients flow to the projected tokens only."""
        kept, folded = self.fold(tokens, budget)
        return assemble(tokens.projected, kept, self.order, folded)

    def fold(self, tokens: VisualTokens, budget: Budget) -> tuple[Tensor, Folded | None]:
        """Kept tokens [B, K], ascending, and the merged ones."""
        size = tokens.projected.shape[1]
        count, merged = self.counts(budget, size)
        with torch.no_grad():
            chooser = self.chooser()
            if not count:
                chosen = counting(0, tokens.projected.device).expand(len(tokens.projected), -1)
            elif isinstance(chooser, Selector):  # without the tokens that it would make of its choice
                chosen = chooser.choose(tokens, count).kept
            else:
                chosen = chooser.reduce(tokens, Budget(count)).kept
            kept, rest = apart(chosen, size)
        if not merged:
            return kept, None
        values = pick(tokens.projected, rest)
        with torch.no_grad():
            direction = directions(values.float())
            group = distinctive(direction @ direction.transpose(1, 2), merged)
        return kept, fold_at_medians(values, rest, group, merged)


@dataclass(frozen=True, kw_only=True)
class RestoreCalibrated(InDecoder):
    """RESTORE whole: its merging, kept positions, and attention calibrated by distance and by how many tokens each is.

    Args:
        selector: `vispruner` | `divprune` | `holov`, as the authors offer.
        vision_layer: the block that is read, from 0, or from the end if negative; None is the one that feeds the
            projector.
    """

    positions: Literal["keep"] = "keep"
    selector: Literal["vispruner", "divprune", "holov"] = "vispruner"
    vision_layer: int | None = None

    title: ClassVar[str] = "RESTORE"
    needs: ClassVar[frozenset[Need]] = Restore.needs
    attention: ClassVar[str] = "none"

    @property
    def merging(self) -> Restore:
        return Restore(selector=self.selector, vision_layer=self.vision_layer)

    @property
    def calibrates(self) -> bool:
        return True

    @property
    def reads_prompt(self) -> bool:
        return False

    def plan(self, tokens: int, available: int, layers: int) -> list[Cut]:
        return [Cut(0, *self.merging.counts(Budget(tokens), available))]

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Those of the merging, and the decay of every pair of rows."""
        if budget.tokens >= shape.available:
            return 0.0
        rows = budget.tokens + shape.text
        return self.merging.flops(shape, budget) + 4.0 * rows * rows * shape.head_width

    def select(self, view: DecoderView, watch: Stopwatch) -> Chosen:
        """Kept and merged tokens.

        Raises:
            OptionError: for a host that does not say the output of its vision tower.
        """
        if view.tower is None:
            raise OptionError("this host does not show methods between decoder layers the output of its vision tower")
        with watch.time("selection"):
            kept, folded = self.merging.fold(view.tower, Budget(view.tokens))
            assert folded is not None  # at least one of T is merged
            none = torch.full(view.columns.shape, -1, device=kept.device)
            merged = ensure_finite("RESTORE's merged tokens", folded.tokens)
            joined = none.scatter_(1, folded.rest, folded.group)
            return Chosen(kept, merged, folded.anchors, joined=joined, in_place=True)


def distinctive(cosine: Tensor, count: int) -> Tensor:
    """The anchor each token joins: [B, R, R] -> [B, R] in 0..count-1, in the order of the anchors."""
    density = cosine.sum(2)
    denser = density[:, None] >= density[..., None]  # [B, R, R] whether the second has no smaller sum than the first
    nearest = threshold(cosine.masked_fill(denser, -1.0).amax(2), -1.0, 0.0)  # 0 if none has
    anchors = top(torch.addcmul(density, density, nearest, value=-1), count)
    group = pick(cosine, anchors).argmax(1)
    return group.scatter(1, anchors, counting(count, group.device).expand_as(anchors))
