"""VisPruner: half of the budget for the patches the class token attends to, half for patches that differ from each
other (Zhang et al., VisPruner, ICCV 2025; official code aefa01a; FasterVLM is `ratio=1`).

The most attended patches are kept; the others, in order of attention, are thinned out round by round: the list is
split into its even and odd places, and up to eight of the even ones that are most similar to an odd one leave. Nothing
is merged. Differences: the rounds that crashed are repaired (the even half of an odd list is the longer one, and a
round never drops more than it has), which changes no published budget; similarities are worked out once, in float32,
and ties go to the patch that comes first. The order of survivors decides the next split, so the loop is numerically
chaotic: another precision picks another diverse half (docs/faithfulness.md).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import ReadsTower, Selected, Selector, Shape
from llava_consensus.reduction.options import Ratio
from llava_consensus.reduction.saliency import class_saliency
from llava_consensus.reduction.selection import counting, pick, rank
from llava_consensus.reduction.tokens import Need, VisualTokens, ensure_finite

ROUND = 8  # tokens that leave in one round
LONG, NEAREST = 1024, 32  # tokens of a list whose nearest ones are looked up, and how many of these


@dataclass(frozen=True, kw_only=True)
class VisPruner(Selector, ReadsTower):
    """The most attended patches and, of the others, those that are least alike.

    Args:
        ratio: share of the budget for the attended patches, in [0, 1]; the official scripts take 0.5.
    """

    ratio: Ratio = 0.5

    title: ClassVar[str] = "VisPruner"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.ATTENTION, Need.FEATURES})

    def flops(self, shape: Shape, budget: Budget) -> float:
        """Class row and the similarities of the patches that are thinned out."""
        if budget.tokens >= shape.patches:
            return 0.0
        rest = shape.patches - int(budget.tokens * self.ratio)
        return 2.0 * (shape.patches + 1 + rest**2) * shape.vision_width

    def choose(self, tokens: VisualTokens, count: int) -> Selected:
        saliency = tokens.of_tiles(class_saliency(tokens.needed(Need.ATTENTION)))
        order = rank(saliency)  # [B, N]
        attended = int(count * self.ratio)
        kept, rest = order[:, :attended], order[:, attended:]
        features = ensure_finite("features of the vision tower", tokens.needed(Need.FEATURES))
        direction = normalize(pick(tokens.of_tiles(features.float()), rest), dim=-1)
        left = thin(direction @ direction.transpose(1, 2), count - attended)
        return Selected(torch.cat((kept, rest.gather(1, left)), dim=1), vision=saliency)


def thin(similarity: Tensor, count: int) -> Tensor:
    """The `count` tokens left of a list of R, in the order of the last round: [B, R, R] -> [B, count]. When half of a
    long list has left, the rest is gathered into a smaller matrix.
    """
    tokens = every = counting(similarity.shape[1], similarity.device).expand(len(similarity), -1)
    while (size := tokens.shape[1]) > count > 0:
        if similarity.device.type == "cpu" and size > LONG:
            left = torch.stack([_halve_long(one, count) for one in similarity])
        else:
            left = _rounds(similarity, max(count, size // 2) if size > LONG else count, count)
        tokens = left if tokens is every else tokens.gather(1, left)
        if tokens.shape[1] > count:
            similarity = pick(pick(similarity, left).transpose(1, 2), left).transpose(1, 2)
    return tokens[:, :count]


def _rounds(similarity: Tensor, enough: int, count: int) -> Tensor:
    """Rounds until at most `enough` of the tokens are left: [B, R, R] -> [B, L]. Nothing waits for the device."""
    length = similarity.shape[1]
    table, entries = list_table(similarity)
    entries, filler = entries[:, :, : length + length % 2], entries[:, :, length:]
    order = counting(length + length % 2, table.device).expand(len(similarity), -1)
    while length > enough:
        if order.shape[1] % 2:
            order = torch.cat((order, torch.full_like(order[:, :1], entries.shape[2])), dim=1)
            entries = torch.cat((entries, filler), dim=2)
        entries = in_halves(entries, order)
        leaving = min(ROUND, length - count, (length + 1) // 2)
        order, length = thin_once(table, entries)[:, leaving:], length - leaving
        entries, order = entries.flatten(2), order[:, : length + length % 2]
    return entries[1].gather(1, order[:, :length])


def list_table(similarity: Tensor) -> tuple[Tensor, Tensor]:
    """The inputs of rounds from similarities [B, R, R], made so that a round is four operations.

    Returns:
        Table [B (R + 1), 2 (R + 1)]: row j says how similar every token is to token j. Column R + 1 + i is -inf: there
        a token at an odd place looks, which is not compared. Token R is a filler that ends lists of odd length.
        Entries [3, B, R + 1] of the tokens: their row, and their columns at an even and at an odd place.
    """
    batch, size = similarity.shape[:2]
    # [B, R, R] -> [B, R + 1, 2 R + 2]
    table = pad(similarity.transpose(1, 2), (0, size + 2, 0, 1), value=-torch.inf).flatten(0, 1)
    return table, entries_of(batch, size, table.device)


@lru_cache(maxsize=32)
def entries_of(batch: int, size: int, device: torch.device) -> Tensor:
    """Entries of `list_table`, made once for each device. Never write to it."""
    with torch.inference_mode(False):
        token, unit = counting(size + 1, device).expand(batch, -1), counting(batch, device)[:, None]
        return torch.stack((token + unit * (size + 1), token, token + size + 1))


def in_halves(entries: Tensor, order: Tensor) -> Tensor:
    """The entries [3, B, n] in this order [B, L], even places apart from odd ones: [3, B, 2, L / 2]."""
    halves = order.unflatten(1, (-1, 2)).transpose(1, 2)  # [B, 2, L / 2]
    # `gather` reads views, so that one operation moves and splits the entries
    return entries[..., None].expand(-1, -1, -1, halves.shape[2]).gather(2, halves.expand(3, -1, -1, -1))


def thin_once(table: Tensor, entries: Tensor) -> Tensor:
    """One round: [3, B, 2, H] -> [B, 2 H], indices of entries with their halves side by side. Those of even places come
    first, most similar ones ahead, of which some leave; those of odd places follow as they were.
    """
    batch, half = entries.shape[1], entries.shape[3]
    odd, begins = entries[0, :, 1].flatten(), counting(batch * half, table.device)[::half]
    nearest = torch.embedding_bag(table, odd, begins, mode=2)[0]  # [B, 2 R + 2], the maximum of the odd places' rows
    # A view of the first half's columns for even places and of the second half's for odd ones: [B, 2, H]
    column = entries.as_strided((batch, 2, half), (2 * half, (2 * batch + 1) * half, 1), 2 * batch * half)
    keys = nearest[:, None].expand(-1, 2, -1).gather(2, column).flatten(1)
    return rank(keys)  # odd places, at -inf, keep their order


def _halve_long(similarity: Tensor, count: int) -> Tensor:
    """`_halve` for a long list on the CPU, [R, R] -> [L], where comparing everything in every round would take most of
    the time: the odd token most like an even one is nearly always among its nearest, which are looked up once; where
    none of them is at an odd place, the token is compared with all odd ones. Which do depends on the numbers, so that a
    device would be waited for.
    """
    size = len(similarity)
    values, places = similarity.topk(NEAREST, dim=1)
    left, enough = torch.arange(size), max(count, size // 2)
    is_odd = torch.zeros(size, dtype=torch.bool)
    while len(left) > enough:
        even, odd = left[::2], left[1::2]
        is_odd.zero_().index_fill_(0, odd, True)
        elsewhere = ~is_odd.take(places.index_select(0, even))
        nearest = values.index_select(0, even).masked_fill_(elsewhere, -torch.inf).amax(1)
        missing = (nearest == -torch.inf).nonzero()[:, 0]
        nearest[missing] = similarity.index_select(0, even[missing]).index_select(1, odd).amax(1)
        stays = rank(nearest)[min(ROUND, len(left) - count) :]
        left = torch.cat((even[stays], odd))
    return left
