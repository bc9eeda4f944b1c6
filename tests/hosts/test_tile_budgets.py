"""`tokens=T` is T for images of any size and any tiles. `tools/tile_budgets.py` shows the whole table."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from llava_consensus.hosts.images import Image
from llava_consensus.hosts.units import units_of
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget, Share

TILES = st.lists(st.integers(1, 40), min_size=1, max_size=13)  # tokens of each tile


def left(sizes: list[int], budget: Budget | Share, **options: str) -> int:
    tile, token = np.repeat(np.arange(len(sizes)), sizes), np.concatenate([np.arange(size) for size in sizes])
    image = Image(0, np.arange(sum(sizes)), tile, token, len(sizes), False, 0)
    units = units_of([image], [budget], make("visionzip", **options), 13)
    return sum(sizes) - sum(len(unit.places) - unit.budget.tokens for unit in units)


@settings(deadline=None, max_examples=300)
@given(TILES, st.integers(1, 300), st.integers(0, 40))
def test_a_picture_keeps_t_tokens(sizes: list[int], tokens: int, more: int) -> None:
    """So it is monotonic in T, and never smaller for a larger picture."""
    assert left(sizes, Budget(tokens)) == min(tokens, sum(sizes)) == left(sizes, Budget(tokens), tile_budget="global")
    assert left([*sizes, 7], Budget(tokens)) >= left(sizes, Budget(tokens)) <= left(sizes, Budget(tokens + more))


@given(TILES.filter(lambda sizes: sum(sizes) > len(sizes)), st.data())
def test_tiles_get_equal_parts_or_all_they_have(sizes: list[int], data: Any) -> None:
    tokens = data.draw(st.integers(len(sizes), sum(sizes) - 1))
    merged = data.draw(st.integers(0, tokens))
    parts = Budget(tokens, merged).over(sizes)
    assert sum(part.tokens for part in parts) == tokens
    reduced = [part for part, size in zip(parts, sizes, strict=True) if part.tokens < size]
    whole = [size for part, size in zip(parts, sizes, strict=True) if part.tokens == size]
    fewest = min(part.tokens for part in reduced)
    assert max(part.tokens for part in reduced) <= fewest + 1 and max(whole, default=0) <= fewest + 1
    assert sum(part.merged or 0 for part in parts) <= merged
    if tokens + 1 < sum(sizes):
        assert all(a.tokens <= b.tokens for a, b in zip(parts, Budget(tokens + 1).over(sizes), strict=True))
