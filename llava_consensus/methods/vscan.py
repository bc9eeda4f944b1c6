"""VScan's scans: half of the tokens from windows all over the image by an early block of the vision tower, half by
the last one, and every other token merged into the kept one that it is most like (Zhang et al., TMLR 2026, arXiv
2505.22654; official code a82450e).

The grid of a tile is cut into 4 x 4 windows. Each keeps an equal share of T / 2, rounded down, of the tokens that the
class token looks at most in the early block; the tokens it looks at most in the block that feeds the projector fill up.
A kept token becomes the plain mean of itself and the tokens that join it, by cosine of the features that the language
model would have received. A tower without a class token is read as in the authors' code for Qwen2.5-VL: windows are 4 x
4 tokens, the last ones longer if that does not divide, a window keeps at most T / 2 over their number, rounded up, of
the tokens that all rows look at most, and so T / 2 are found. Differences: exactly T tokens stay where the windows'
shares do not come to T / 2, a T / 2 of fewer tokens than windows gives one to T / 2 windows (the authors keep none),
seats of windows that unpadding cut away go to the most attended elsewhere, any grid is cut (the authors' code for LLaVA
knows 24 x 24), and ties go to the lower index. The authors prune once more in the middle of the language model, which
is not a part of this method: `fastv` and `pyramiddrop` cut there. The early block is the sixth of CLIP's 24 in the
authors' code; elsewhere it is the one at a quarter of the depth.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from llava_consensus.reduction import merging
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Order, ReadsBlocks, Shape
from llava_consensus.reduction.options import Bounds, Ratio
from llava_consensus.reduction.saliency import class_flops, class_saliency
from llava_consensus.reduction.selection import assemble, membership, rank, seated, top
from llava_consensus.reduction.tokens import Need, Reduction, VisionAttention, VisualTokens, ensure_finite


@dataclass(frozen=True, kw_only=True)
class VScan(ReadsBlocks):
    """Keep tokens of every window by an early vision block, the rest by the last one, and merge the others into them.

    Args:
        windows: with a class token how many in a row and in a column of a tile, else their side in tokens.
        local: share of the tokens that the windows keep.
    """

    windows: Annotated[int, Bounds(1)] = 4
    local: Ratio = 0.5
    order: Order = "raster"

    answer_version: ClassVar[int] = 2
    title: ClassVar[str] = "VScan's scans"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.ATTENTION, Need.EARLIER})
    early: ClassVar[float] = 6 / 24

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Class attention of two blocks, the cosines of all tokens with the kept ones, and the means."""
        units = self.losing(shape, budget)
        merged = sum(2.0 * size * 2 * count * shape.width for count, size in units)
        return merged + 2 * class_flops(shape) if units else 0.0

    def reduce(self, tokens: VisualTokens, budget: Budget) -> Reduction:
        """`budget.tokens` tokens, each the mean of its members. Gradients flow to the projected tokens only."""
        size = tokens.projected.shape[1]
        with torch.no_grad():
            attention: VisionAttention = tokens.needed(Need.ATTENTION)
            early = tokens.by_token(class_saliency(tokens.needed(Need.EARLIER), own=True))  # [U, N_tile]
            last = tokens.of_tiles(class_saliency(attention, own=True))
            count = min(budget.tokens, size)
            window, windows = self.window(tokens, early.shape[1], bool(attention.classes))
            windows *= tokens.tiles_per_unit
            wanted = int(count * self.local)
            each = max(wanted // windows, 1) if attention.classes else -(-wanted // windows)
            seats = torch.full((len(last), windows), each, device=last.device)
            ranked = rank(early[tokens.tile, tokens.patch])
            local = seated(ranked, window, seats, min(wanted, each * windows))
            kept = top(last.masked_fill(membership(local, size), torch.inf), count)
            group = merging.nearest(ensure_finite("projected tokens", tokens.projected).float(), kept)
        everything = torch.arange(size, device=kept.device).expand(len(kept), -1)
        folded = merging.fold(tokens.projected, everything, kept, group)
        return assemble(tokens.projected, kept[:, :0], self.order, folded)._replace(vision=last)

    def window(self, tokens: VisualTokens, size: int, classes: bool) -> tuple[Tensor, int]:
        """Window of each token of a unit, [B, N], in tiles of `size` tokens, and how many windows a tile has."""
        columns = tokens.side or size
        rows = -(-size // columns)
        row, column = tokens.patch // columns, tokens.patch % columns
        if classes:
            down = across = self.windows
            row, column = row * down // rows, column * across // columns
        else:
            down, across = max(rows // self.windows, 1), max(columns // self.windows, 1)
            row, column = (row // self.windows).clamp_max(down - 1), (column // self.windows).clamp_max(across - 1)
        tile = tokens.tile - tokens.tile.amin(1, keepdim=True)
        return (tile * down + row) * across + column, down * across
