"""The budget: how many visual tokens the language model is handed for one image."""

from dataclasses import dataclass

from llava_consensus.errors import OptionError


@dataclass(frozen=True)
class Budget:
    """Visual tokens handed to the language model for one image: `tokens` = T = K kept + M merged.

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

    def split(self, available: int) -> tuple[int, int]:
        """K and M for a unit of `available` tokens; M is clamped to what is left after K, K to what there is."""
        merged = (40 * self.tokens + 128) // 256 if self.merged is None else self.merged
        kept = min(self.tokens - merged, available)
        return kept, min(merged, available - kept)

    def share(self, parts: int) -> list["Budget"]:
        """The budget divided equally over `parts` tiles; the first tiles take what does not divide."""
        tokens = [self.tokens // parts + (tile < self.tokens % parts) for tile in range(parts)]
        if min(tokens) < 1:
            raise OptionError(
                f"tokens={self.tokens} is less than one token for each of {parts} tiles: "
                f"give at least {parts}, or tile_budget=global"
            )
        merged = [
            None if self.merged is None else self.merged // parts + (tile < self.merged % parts)
            for tile in range(parts)
        ]
        return [Budget(tile_tokens, tile_merged) for tile_tokens, tile_merged in zip(tokens, merged, strict=True)]
