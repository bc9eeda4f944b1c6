"""MMTok: keep the tokens that cover the words of the question and the image's other tokens (ICLR 2026, arXiv
2508.18264; official code d1522cd).

A token covers each word, and each token, by a share: a softmax over all tokens of its cosines with them, of projected
tokens and the language model's embeddings for words, of the tower's features for tokens. Coverage counts
only once: each step keeps the token that adds most to the sum over words and tokens of the largest share kept so far.
The words weigh 1 in all, the tokens alpha. The temperature of the words is 0.02 in the authors' code for LLaVA and 0.01
for Qwen2.5-VL, here wherever a token is made of several patches.

Differences: the words are the rows that follow the image in the prompt, the template's among them. The authors
tokenise the question apart, and for LLaVA leave out the sentence that asks for a short answer and 47 common words,
which no model knows without its tokenizer. Patches of a square image's padding are candidates, which their code for
LLaVA-1.5 excludes; prompts without words after their image cover only tokens; vectors are normalised in float32;
ties go to the lower index.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from llava_consensus.methods.scope import cover
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.merging import directions
from llava_consensus.reduction.method import ReadsTower, Selected, Selector, Shape
from llava_consensus.reduction.options import NotNegative, Positive
from llava_consensus.reduction.tokens import Need, VisualTokens, ensure_finite


@dataclass(frozen=True, kw_only=True)
class MMTok(Selector, ReadsTower):
    """Keep T tokens, each the one that adds most to the kept tokens' coverage of the question's words and all tokens.

    Args:
        alpha: weight of covered tokens against covered words.
        word_temperature: of a word's shares; None is 0.02, and 0.01 if a token is made of several patches.
        token_temperature: of a token's shares.
    """

    alpha: NotNegative = 0.5
    word_temperature: Positive | None = None
    token_temperature: Positive = 0.2

    title: ClassVar[str] = "MMTok"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.FEATURES, Need.WORDS})

    def flops(self, shape: Shape, budget: Budget) -> float:
        """The cosines of all pairs of tokens, and of tokens with words; each of the T steps only compares and adds."""
        sizes = [size for _, size in self.losing(shape, budget)]
        words = shape.known("question") * shape.width if sizes else 0
        return sum(2.0 * size * (size * shape.vision_width + words) for size in sizes)

    def choose(self, tokens: VisualTokens, count: int) -> Selected:
        words = tokens.needed(Need.WORDS)
        points = directions(ensure_finite("projected tokens", tokens.projected).float())  # [B, N, D]
        features = ensure_finite("features of the vision tower", tokens.of_tiles(tokens.needed(Need.FEATURES)).float())
        features = directions(features)
        usual = 0.02 if tokens.members is None else 0.01
        cosine = directions(words.text.float()) @ points.transpose(1, 2)  # [B, M, N]
        of_words = torch.softmax(cosine / (self.word_temperature or usual), dim=2) * words.real[..., None]
        of_words = of_words / words.real.sum(1)[:, None, None].clamp_min(1)
        of_tokens = torch.softmax(features @ features.transpose(1, 2) / self.token_temperature, dim=2)
        shares = torch.cat((of_words, of_tokens * (self.alpha / points.shape[1])), dim=1)  # [B, M + N, N]
        return Selected(cover(shares.transpose(1, 2).contiguous(), None, count))
