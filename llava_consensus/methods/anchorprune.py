"""AnchorPrune: tokens that have to do with the question, and around them those that are looked at and unlike them
(ECCV 2026; official code 9aa2774).

Tokens are ranked by their relevance to the question. The first 5/32 of T are the anchor, which then grows along the
ranking up to half of T, but no further than the third token that is novel: farther than tau, by cosine, from everything
in the first anchor. Each step after that keeps the token whose class attention times distance to the nearest kept token
is largest, a distance counting as 1 at most. As in the authors' code for LLaVA relevance is the NEGATED cosine of
patch and question in CLIP's space, novelty is measured there and distance on the tower's features.

Where the vision tower is of no CLIP model it is read as in their code for Qwen2.5-VL: relevance is the largest cosine,
not negated, of a token as the language model receives it and any word, both distances are between such tokens, and
attention is received from all rows. Differences: the words are those that follow the image, where the authors
tokenise the question apart; prompts without such words rank by attention; every tile of an image undoes its own
windows, where their code undoes those of only the first image; ties go to the lower index. Their scripts' smallest
anchors (5, 10 and 20 of 32, 64 and 128; on Qwen2.5-VL 10, 20 and 40 of 64, 128 and 256) are 5/32 of T.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from llava_consensus.methods.cdpruner import relevance_products
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.merging import directions
from llava_consensus.reduction.method import ReadsTower, Selected, Selector, Shape
from llava_consensus.reduction.options import Bounds, NotNegative, Ratio
from llava_consensus.reduction.saliency import class_flops, class_saliency
from llava_consensus.reduction.selection import cosines, counting, greedy, pick, rank, top
from llava_consensus.reduction.tokens import ClipSides, Need, VisualTokens, ensure_finite


@dataclass(frozen=True, kw_only=True)
class AnchorPrune(Selector, ReadsTower):
    """Keep an anchor of tokens that are relevant to the question, and attended tokens that are unlike all kept ones.

    Args:
        least: share of the tokens in the first anchor, which has one at least.
        most: share of the tokens that the anchor grows to at most.
        tau: cosine distance from the first anchor above which a token is novel.
        patience: novel tokens with which the anchor ends.
    """

    least: Ratio = 5 / 32
    most: Ratio = 0.5
    tau: NotNegative = 0.2
    patience: Annotated[int, Bounds(1)] = 3

    title: ClassVar[str] = "AnchorPrune"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.ATTENTION, Need.FEATURES, Need.QUESTION})

    def sizes(self, count: int) -> tuple[int, int]:
        least = min(max(1, round(count * self.least)), count)
        return least, max(least, int(count * self.most))

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Class attention, the text tower once, relevance, novelty, and the cosines of all pairs of tokens.
        Without a text tower: the products with the words after the image in place of the text tower's.
        """
        meaning, width = (shape.joint, shape.vision_width) if shape.text_tower else (shape.width, shape.width)
        total = 0.0
        for count, size in self.losing(shape, budget):
            least, most = self.sizes(count)
            total += 2.0 * size * (relevance_products(shape) + size * width)
            total += 2.0 * least * (most - least) * meaning
        return class_flops(shape) + shape.text_tower + total if total else 0.0

    def choose(self, tokens: VisualTokens, count: int) -> Selected:
        """The anchor and its expansion; `cross` is the relevance."""
        sides = tokens.needed(Need.QUESTION)
        saliency = tokens.of_tiles(class_saliency(tokens.needed(Need.ATTENTION), own=True))  # [B, N]
        meaning = directions(tokens.of_tiles(sides.patches.float()))  # [B, N, P]
        features = tokens.projected if sides.words else tokens.of_tiles(tokens.needed(Need.FEATURES))
        points = directions(ensure_finite("features that tokens are compared by", features.float()))
        score = relevance(meaning, sides, tokens.tile[:, 0])
        score = torch.where(score > -torch.inf, score, saliency)
        ranked, anchored = self.anchor(score, meaning, count)
        kept = expand(points, saliency, ranked, anchored, count, self.sizes(count)[0])
        return Selected(kept, vision=saliency, cross=score)

    def anchor(self, score: Tensor, meaning: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The most relevant tokens [B, A] by falling relevance [B, N], and which of them are in the anchor [B, A]."""
        least, most = self.sizes(count)
        ranked = rank(score)[:, :most]
        points = pick(meaning, ranked)
        novel = (1.0 - points[:, least:] @ points[:, :least].transpose(1, 2)).amin(2) > self.tau
        open_before = novel.cumsum(1) - novel.long() < self.patience  # the token that ends the anchor is in it
        return ranked, pad(open_before, (least, 0), value=True)


def relevance(meaning: Tensor, sides: ClipSides, tile: Tensor) -> Tensor:
    """Relevance [B, N] of tokens [B, N, P] of length 1 to the text of these tiles [B]; -inf if there is none."""
    text, real = directions(sides.text.float())[tile], sides.real[tile, None]  # [B, M, P], [B, 1, M]
    cosine = ensure_finite("relevance to the question", meaning @ text.transpose(1, 2))  # [B, N, M]
    if not sides.words:
        return -(cosine * real).sum(2) / real.sum(2)
    return pad(cosine.masked_fill(~real, -torch.inf), (0, 1), value=-torch.inf).amax(2)


def expand(points: Tensor, weight: Tensor, ranked: Tensor, anchored: Tensor, count: int, least: int) -> Tensor:
    """`count` tokens of each unit [B, count], ascending: the anchor, and those of the largest weight times distance.

    Args:
        points: [B, N, D] of length 1.
        weight: [B, N], not negative.
        ranked, anchored: [B, A] the tokens of the largest anchor, and which of them are in this one.
        least: tokens in the smallest anchor.
    """
    table = cosines(points)
    loss = table[:, :-1].sub_(1.0)  # [B, N, N], the negated distance
    to_anchor = pick(loss, ranked).masked_fill_(~anchored[..., None], -1.0).amax(1)  # [B, N], at most 1 away
    loss.mul_(weight[:, None])
    start = to_anchor.clamp_min_(-1.0).mul_(weight)
    start.scatter_reduce_(1, ranked, torch.where(anchored, torch.inf, -torch.inf), "amax")
    chosen = greedy(table, count - least, start=start)
    step = torch.full_like(weight, torch.inf)  # at which a token is kept, the anchor before all
    step.scatter_(1, ranked, torch.where(anchored, 0.0, torch.inf))
    steps = counting(count - least + 1, weight.device)[1:].float().expand_as(chosen)
    return top(step.scatter_reduce_(1, chosen, steps, "amin").neg_(), count)  # a larger anchor leaves fewer of them
