"""CDPruner: keep T tokens that differ from each other and have to do with the question (Zhang et al., NeurIPS 2025). A
determinantal point process over the projected tokens, its kernel their cosines weighted by each patch's relevance to
the question in CLIP's embedding space, and greedy MAP inference with an incremental Cholesky factor. As in the
authors' code, relevance is the NEGATED cosine (CLIP patches point away from their content; where a tower's do not,
take `relevance=cosine`) and the sentence that asks for a single word is no part of the question. Differences:
relevance is scaled within an image (over all its tiles, never over other frames), not within a batch; past the rank of
the kernel, where theirs repeats one token, selection continues by the largest remainder; exactly T, none twice.

Where the vision tower is of no CLIP model there is no text side. The authors reduce Qwen2.5-VL after its merger, with
code they do not publish. Our reading there: relevance is the cosine, not negated, of a token as the language model
receives it and the model's own embeddings of the words that follow the image, the template's among them, mean
over words; prompts without such words choose by diversity only. The call's notes say so.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import embedding, normalize, pad

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import ReadsTower, Selected, Selector, Shape
from llava_consensus.reduction.options import Bounds
from llava_consensus.reduction.selection import counting, distinct
from llava_consensus.reduction.tokens import ClipSides, Need, VisualTokens, WholeImages, ensure_finite

NOTHING = 1e-6  # of the largest remainder
SHORT_ANSWER = "\nAnswer the question using a single word or phrase."


@dataclass(frozen=True, kw_only=True)
class CDPruner(Selector, ReadsTower):
    """Keep T tokens that are relevant to the question and unlike each other.

    Args:
        theta: weight of relevance in [0, 1): it becomes exp(a r), a = theta / (2 - 2 theta), as a comment in the
            authors' code has it; 0 is diversity only. None, the default, is the relevance itself, as their code runs.
        relevance: `negated` | `cosine`, of patch and question in CLIP's space.
    """

    theta: Annotated[float, Bounds(0.0, 1.0 - 1e-6)] | None = None
    relevance: Literal["negated", "cosine"] = "negated"

    title: ClassVar[str] = "CDPruner"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.FEATURES, Need.QUESTION, Need.WHOLE_IMAGES})

    def query(self, question: str) -> str:
        """The prompt's text without the sentence that asks for a single word."""
        return question.replace(SHORT_ANSWER, "")

    def flops(self, shape: Shape, budget: Budget) -> float:
        """The text tower once, the patches' embeddings and the kernel; each of the T steps only subtracts. Without a
        text tower: the products with the words after the image in place of the first two.
        """
        total = 0.0
        for _, size in self.losing(shape, budget):
            total += 2.0 * size * (relevance_products(shape) + size * shape.width)
        return shape.text_tower + total if total else 0.0

    def choose(self, tokens: VisualTokens, count: int) -> Selected:
        """The tokens of greedy MAP inference; `fused` is the relevance."""
        sides = tokens.needed(Need.QUESTION)
        sides = sides._replace(patches=tokens.by_token(sides.patches))
        scaled = relevance(sides, tokens.needed(Need.WHOLE_IMAGES), negated=self.relevance == "negated")
        token_relevance = tokens.of_tiles(scaled)  # [B, N]
        weight = self._weight(token_relevance)
        direction = normalize(ensure_finite("projected tokens", tokens.projected).float(), dim=-1)
        kernel = weight[:, :, None] * (direction @ direction.transpose(1, 2)) * weight[:, None]  # [B, N, N]
        return Selected(greedy_map(kernel, count), fused=token_relevance)

    def _weight(self, token_relevance: Tensor) -> Tensor:
        """Weights of the kernel; scaled, which changes no choice, so that they never overflow."""
        if self.theta is None:
            return token_relevance
        return torch.exp(self.theta / (2 - 2 * self.theta) * (token_relevance - token_relevance.amax(1, keepdim=True)))


def relevance_products(shape: Shape) -> float:
    """Products of a token's relevance: its embedding in CLIP's space and cosine, or cosines with the words."""
    return shape.joint * (shape.vision_width + 1) if shape.text_tower else shape.known("question") * shape.width


def relevance(sides: ClipSides, whole: WholeImages, negated: bool = True) -> Tensor:
    """Relevance of every token of every tile, scaled to (0, 1] over all tiles of its image: [U, N_tile].

    Args:
        sides: patches [U, N_tile, P], and the text [U, M, P] of each tile with `real` [U, M]. Without text all tokens
            are equally relevant.
        whole: which tiles make an image, and which of their tokens the image has; the others (padding that anyres
            cuts away) do not count for the scale, and their own values mean nothing.
        negated: whether patches point away from their content in CLIP's space.
    """
    patches, text = normalize(sides.patches.float(), dim=-1), normalize(sides.text.float(), dim=-1)
    cosine = patches @ text.transpose(1, 2) * sides.real[:, None]  # [U, N_tile, M]
    mean = ensure_finite("CLIP relevance", cosine.sum(2) / sides.real.sum(1, keepdim=True).clamp_min(1))
    raw = -mean if negated and not sides.words else mean
    same_image = whole.image[:, None] == whole.image[None]  # [U, U]
    lowest, highest = (raw.masked_fill(~whole.present, end) for end in (torch.inf, -torch.inf))
    low = torch.where(same_image, lowest.amin(1), torch.inf).amin(1, keepdim=True)
    high = torch.where(same_image, highest.amax(1), -torch.inf).amax(1, keepdim=True)
    return torch.where(high > low, (raw - low + 1e-6) / (high - low), torch.ones_like(raw))


def greedy_map(kernel: Tensor, count: int) -> Tensor:
    """`count` tokens of each kernel [B, N, N] in the order they are chosen: [B, count]. Ties go to the lower place.

    Each step takes the token with the largest remainder p and eliminates it from the kernel: with its row u, the rest
    of the kernel falls by u u / p, and its own remainder to 0. A step is four operations. Beyond the rank of the kernel
    nothing remains but rounding errors: there steps take a token N that is in no set, and the seats that are free go to
    the largest remainders.
    """
    batch, size, device = *kernel.shape[:2], kernel.device
    table = pad(kernel, (0, 1, 0, 1))  # [B, N + 1, N + 1]
    remainder, rest, reads = table.diagonal(dim1=1, dim2=2), table[:, :size, :size], table.flatten(0, 1)
    torch.mul(remainder.amax(1), NOTHING, out=remainder[:, size])
    offset = counting(batch, device)[:, None] * (size + 1) if batch > 1 else None
    chosen: list[Tensor] = []  # [B, 1] each
    for _ in range(count):
        pivot, index = remainder.max(1, keepdim=True)
        chosen.append(index)
        row = embedding(index if offset is None else index + offset, reads)[:, :, :size]  # [B, 1, N]
        rest.addcmul_(row.transpose(1, 2), row / pivot[..., None], value=-1)
    return distinct(torch.cat(chosen, dim=1), size, remainder[:, :size])
