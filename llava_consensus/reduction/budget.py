"""The budget: how many visual tokens the language model reads for one image, as a number or as a share of its tokens.

`budget(64)` is `Budget(64)`, `budget(0.1)` is `Share(0.1)`; `of(N)` of each is the budget of an image of N tokens.
"""

import contextlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from llava_consensus.errors import OptionError, plural

FEWEST = 8  # part of its budget that an old image of a conversation keeps at least, as 1 / FEWEST


@dataclass(frozen=True)
class Budget:
    """Visual tokens passed to the language model for one image: `tokens` = T = K kept + M merged.

    Args:
        tokens: T >= 1, in absolute tokens. T >= N means the unpatched model.
        merged: M in 0..T; None means floor(20 T / 128 + 1/2), the split of the paper.
    Raises:
        OptionError: for a T below 1 or an M outside 0..T.
    """

    tokens: int
    merged: int | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "merged"):
            value = getattr(self, name)
            if not (value is None and name == "merged") and (not isinstance(value, int) or isinstance(value, bool)):
                raise OptionError(f"{name}={value!r} must be a whole number")
        if self.tokens < 1:
            raise OptionError(
                f"tokens={self.tokens} must be at least 1: a budget counts the visual tokens of one image"
            )
        if self.merged is not None and not 0 <= self.merged <= self.tokens:
            raise OptionError(
                f"merged={self.merged} must be in 0..{self.tokens}: merged tokens are part of tokens={self.tokens}"
            )

    def of(self, available: int) -> "Budget":
        """The budget of an image of `available` tokens: a number of tokens is the same for all."""
        return self

    def split(self, available: int) -> tuple[int, int]:
        """K and M for a unit of `available` tokens; M is clamped to the rest after K, K to the number of tokens."""
        merged = (40 * self.tokens + 128) // 256 if self.merged is None else self.merged
        kept = min(self.tokens - merged, available)
        return kept, min(merged, available - kept)

    def over(self, sizes: Sequence[int]) -> list["Budget"]:
        """This budget shared over the tiles of one image: equal parts, which add up to T. A tile of fewer tokens than
        its part keeps all of them, and the others share the rest.

        Args:
            sizes: tokens of each tile, more than T in all.
        Raises:
            OptionError: for fewer tokens than tiles.
        """
        left, parts = self.tokens, dict[int, int]()
        order = sorted(range(len(sizes)), key=lambda tile: (sizes[tile], -tile))  # small ones take the remainder
        for settled, tile in enumerate(order):
            parts[tile] = min(sizes[tile], left // (len(order) - settled))
            left -= parts[tile]
        if min(parts.values()) < 1:
            raise OptionError(
                f"tokens={self.tokens} is less than one token for each of {len(sizes)} tiles: "
                f"give at least {len(sizes)}, or tile_budget=global where the method has that option"
            )
        reduced = [tile for tile in range(len(sizes)) if parts[tile] < sizes[tile]]
        merged: dict[int, int] = {}
        if self.merged is not None:
            whole, more = divmod(self.merged, len(reduced))
            merged = {tile: min(whole + (place < more), parts[tile]) for place, tile in enumerate(reduced)}
            merged |= {tile: 0 for tile in parts.keys() - merged.keys()}
        return [Budget(parts[tile], merged.get(tile)) for tile in range(len(sizes))]

    def share(self, parts: int) -> list["Budget"]:
        """The budget divided equally over `parts` tiles; the first tiles take the remainder."""
        return self.over([self.tokens + 1] * parts)


@dataclass(frozen=True)
class Share:
    """A share of each image's own visual tokens; of a video, of those of all its frames.

    Args:
        share: in (0, 1). M follows from the tokens it comes to by the paper's split.
    Raises:
        OptionError: for a share outside its bound.
    """

    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise OptionError(
                f"tokens={self.share!r}: a share must be above 0 and below 1. A whole number counts tokens (1 is one "
                "token), and all tokens are the method full"
            )

    def of(self, available: int) -> Budget:
        """The budget of an image of `available` tokens: its share, rounded half up, at least one token."""
        exact = Fraction(str(self.share)) * available + Fraction(1, 2)
        return Budget(max(1, int(exact)))


def budget(tokens: int | float | str, merged: int | None = None) -> Budget | Share:
    """A whole number of tokens, or a fraction as a share of each image's own.

    Raises:
        OptionError: for a value outside its bound, or `merged` beside a share.
    """
    if isinstance(tokens, str):
        raise OptionError(f"tokens={tokens!r} must be a whole number of tokens, or a share in (0, 1)")
    found, merged = _number(tokens), _number(merged)
    if not isinstance(found, float):
        return Budget(found, merged)
    if merged is not None:
        raise OptionError(
            f"merged={merged} beside tokens={found}: with a share the merged tokens follow from the paper's split. "
            "Leave merged out, or give tokens as a whole number"
        )
    return Share(found)


def _number(value: Any) -> Any:
    """A number of numpy or torch as Python's own; anything else as it is, for the checks of its class."""
    if isinstance(value, bool | int | float | str | None) or getattr(value, "ndim", 0) != 0:
        return float(value) if isinstance(value, float) else value
    for plain in (operator.index, float):
        with contextlib.suppress(TypeError, ValueError):
            return plain(value)
    return value


def conversation(tokens: Sequence[int], total: int) -> list[int]:
    """Budgets of the images of one prompt that add up to `total` at most. Where they do not as they are, images are
    halved from the oldest on, the latest never; then from the oldest on once more, down to an eighth.

    Args:
        tokens: of each image without a bound, the oldest first.
        total: of all.
    Raises:
        OptionError: if they do not fit so.
    """
    found = list(tokens)
    part = 2
    while sum(found) > total:
        if part > FEWEST:
            raise OptionError(
                f"total={total} visual tokens are too few for {plural(len(found), 'image')}: {tokens[-1]} of the "
                f"latest and an eighth of the others are {sum(found)}. Give more, or fewer tokens for each image"
            )
        for place in range(len(found) - 1):
            if sum(found) <= total:
                break
            found[place] = max(1, tokens[place] // part)
        part *= 2
    return found


def of_prompts(
    budgets: Sequence[Budget | Share], sizes: Sequence[int], prompts: Sequence[int], total: int
) -> tuple[Budget | Share, ...]:
    """Budgets of images of several prompts, made smaller where those of one prompt have more than `total`.

    Args:
        budgets: of each image, those of a prompt with the oldest first.
        sizes: tokens of each image.
        prompts: which prompt each is of.
        total: of one prompt.
    """
    found = list(budgets)
    for prompt in set(prompts):
        places = [place for place, one in enumerate(prompts) if one == prompt and sizes[place]]
        tokens = [min(budgets[place].of(sizes[place]).tokens, sizes[place]) for place in places]
        for place, before, left in zip(places, tokens, conversation(tokens, total), strict=True):
            if left < before:
                found[place] = Budget(left)
    return tuple(found)


def checked_total(total: Any) -> int | None:
    """A bound on the visual tokens of a prompt, None for none. OptionError for anything but a whole number above 0."""
    total = _number(total)
    if total is not None and (not isinstance(total, int) or isinstance(total, bool) or total < 1):
        raise OptionError(f"total={total!r} must be a whole number of visual tokens, at least 1")
    return total


def most_first(budgets: "set[Budget | Share]") -> "list[Budget | Share]":
    """Budgets in the order of tables: numbers from many to few, then shares."""
    return sorted(budgets, key=lambda one: (isinstance(one, Share), -amount(one)))


def amount(budget: Budget | Share) -> Any:
    return budget.share if isinstance(budget, Share) else budget.tokens
