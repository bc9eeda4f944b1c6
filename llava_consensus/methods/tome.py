"""ToMe: merge the most similar tokens a few at a time inside every vision block (Bolya et al., "Token Merging: Your ViT
But Faster", ICLR 2023). Between attention and MLP the patches are matched by the cosine of their attention keys, mean
over heads, and the closest pairs become one, weighted by the patches each represents; attention then counts a token as
often as it has patches (proportional attention, here an additive mask, so that the fast kernel stays). The authors
publish no vision-language version. Here the blocks up to the feature block merge by a schedule that lands on T exactly,
as even as their halving limit allows, and the T tokens are in raster order of their first patch.

On other models than LLaVA the reading is ours. A SigLIP tower has no class token to keep out of it. Where the model
makes one token of each square of patches, the tokens left after merging form no grid, and the method is refused.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.merging import Bag, match, merge
from llava_consensus.reduction.method import InTower, Shape


@dataclass(frozen=True, kw_only=True)
class ToMe(InTower):
    """Merge the most similar patches inside every vision block until T are left.

    Args:
        rate: `constant` (the same number of patches merge in every block) | `decreasing` (the authors' other schedule:
            from twice the mean in the first block to none in the last).
        proportional: attend to a merged token in proportion to the patches in it; off is the authors' option for models
            trained with merging.
    """

    rate: Literal["constant", "decreasing"] = "constant"
    proportional: bool = True

    answer_version: ClassVar[int] = 2
    title: ClassVar[str] = "ToMe"

    @property
    def masks(self) -> bool:
        return self.proportional

    def schedule(self, tokens: int, patches: int, blocks: int) -> list[int]:
        """Patches to merge away in each block, `patches - tokens` in all, the larger numbers first.

        A block can merge away half of its patches at most, so the last blocks merge half and the ones before
        share the rest evenly: 192 of 576 in 23 blocks is 17 sixteen times, then 16.

        Raises:
            OptionError: for a budget out of reach of the number of blocks.
        """
        if self.rate == "decreasing":
            return self._decreasing(tokens, patches, blocks)
        counts: list[int] = []
        left = tokens  # patches after the block
        for before in range(blocks, 0, -1):
            counts.append(min((patches - left) // before, left))
            left += counts[-1]
        if left != patches:
            least = -(-patches // 2**blocks)
            raise OptionError(
                f"tokens={tokens}: merging in {blocks} vision blocks halves {patches} patches {blocks} times at most: "
                f"give at least {least}, or take a method that acts after the tower"
            )
        return counts[::-1]

    def _decreasing(self, tokens: int, patches: int, blocks: int) -> list[int]:
        """The authors' list for the largest whole r that merges no more than is wanted, from 2 r to 0, and the rest one
        each from the first block on; patches that a block cannot merge go to the next.

        Raises:
            OptionError: for a budget that cannot be reached so.
        """
        wanted, last = patches - tokens, max(blocks - 1, 1)
        lists = ([int(2 * r - 2 * r * block / last) for block in range(blocks)] for r in range(wanted, -1, -1))
        counts = next(one for one in lists if sum(one) <= wanted)
        each, more = divmod(wanted - sum(counts), blocks)
        left, owed = patches, 0
        for block in range(blocks):
            owed += counts[block] + each + (block < more)
            counts[block] = min(owed, left // 2)
            left, owed = left - counts[block], owed - counts[block]
        if owed:
            raise OptionError(
                f"tokens={tokens}: a decreasing schedule of {blocks} vision blocks cannot merge {patches} patches to "
                "so few, as a block halves them at most: give more, or take rate=constant"
            )
        return counts

    def bias(self, bag: Bag) -> Tensor | None:
        """Logarithm of the sizes, added to the logits of each key: [U, t]."""
        return bag.size.log() if self.proportional else None

    def fold(self, bag: Bag, key: Tensor, count: int, protected: bool) -> Bag:
        """The bag after the `count` best pairs by the keys [U, H, t, d] became one; a class token stays out of it."""
        return merge(bag, match(key.mean(1, dtype=torch.float32), count, protected), count)

    def vision_tokens(self, budget: Budget, shape: Shape) -> list[int]:
        """Patches entering each block: fewer from block to block, T after the feature block."""
        left = [shape.patches]
        for count in self._counts(shape, self.units(shape, budget)[0][0]):
            left.append(left[-1] - count)
        return (left + left[-1:] * shape.blocks)[: shape.blocks]

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Similarities with odd places and the weighted means, in every block."""
        total, width = 0.0, shape.vision_width
        for share, left in self.units(shape, budget):
            for count in self._counts(shape, share):
                tokens = left + shape.classes
                total += 2.0 * tokens * (tokens // 2 * width / shape.vision_heads + (tokens - count) * width)
                left -= count
        return total

    def _counts(self, shape: Shape, budget: Budget) -> list[int]:
        if budget.tokens >= shape.patches:
            return []
        return self.schedule(budget.tokens, shape.patches, shape.feature_blocks or shape.blocks - 1)
