"""A cache with room behind its rows holds what that of transformers holds, bit for bit, whatever is done to it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llava_consensus.evaluation.models.room import ROOM, spread

DynamicCache = pytest.importorskip("transformers").DynamicCache
if not hasattr(DynamicCache, "batch_repeat_interleave"):
    pytest.skip("only transformers 5 has these caches", allow_module_level=True)

HEADS, WIDTH, LAYERS, OWNERS = 2, 4, 3, [0, 0, 1, 0]


def rows(count: int, length: int, seed: int) -> torch.Tensor:
    return torch.randn(count, HEADS, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def pair() -> tuple[Any, Any]:
    """The same two sequences, spread by us and by transformers."""
    caches = DynamicCache(), DynamicCache()
    for cache in caches:
        for layer in range(LAYERS):
            cache.update(rows(2, 7, layer), rows(2, 7, 10 + layer), layer)
    ours, theirs = caches
    spread(ours, OWNERS)
    theirs.batch_select_indices(torch.tensor(OWNERS))
    return ours, theirs


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: None,
        lambda cache: cache.crop(-3),
        lambda cache: cache.reorder_cache(torch.tensor([3, 1, 0, 2])),
        lambda cache: cache.batch_select_indices(torch.tensor([1, 2])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.reset(),
    ],
    ids=["nothing", "crop", "reorder", "select", "repeat", "reset"],
)
def test_both_caches_hold_the_same(change: Callable[[Any], None]) -> None:
    for cache in (caches := pair()):
        for step, length in enumerate((5, *[1] * 100)):
            if step == 60:
                change(cache)
            count = len(cache.layers[0].keys) if cache.layers[0].is_initialized else len(OWNERS)
            for layer in range(LAYERS):
                new = rows(count, length, 100 * step + layer)
                keys, values = cache.update(new, -new, layer)
                assert torch.equal(keys, cache.layers[layer].keys) and torch.equal(values, cache.layers[layer].values)
    ours, theirs = caches
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
        assert one.get_seq_length() == other.get_seq_length() and one.get_mask_sizes(1) == other.get_mask_sizes(1)


def test_rows_are_written_into_the_room_and_it_is_made_anew_when_it_is_full() -> None:
    ours, _ = pair()
    layer, places = ours.layers[0], []
    for step in range(2 * ROOM):
        ours.update(rows(4, 1, step), rows(4, 1, step), 0)
        places.append((layer.keys.data_ptr(), layer.values.data_ptr()))
    assert len(set(places)) == 2 and places[0] == places[ROOM - 1] != places[ROOM]


def test_one_sequence_goes_to_every_row() -> None:
    cache = DynamicCache()
    cache.update(rows(1, 7, 0), rows(1, 7, 1), 0)
    spread(cache, [0, 0, 0])
    assert torch.equal(cache.layers[0].keys, rows(1, 7, 0).expand(3, -1, -1, -1))


def test_sequences_that_share_nothing_with_each_other_keep_their_own_rows() -> None:
    ours, _ = pair()
    ours.update(new := rows(4, 2, 1), new, 1)
    expected = torch.cat((rows(2, 7, 1)[OWNERS], new), dim=2)
    assert torch.equal(ours.layers[1].keys, expected)


def test_caches_of_other_kinds_are_spread_by_transformers() -> None:
    sliding = pytest.importorskip("transformers.cache_utils").DynamicSlidingWindowLayer(sliding_window=8)
    sliding.update(rows(2, 5, 0), rows(2, 5, 1))
    cache = DynamicCache()
    cache.layers.append(sliding)
    spread(cache, OWNERS)
    assert cache.layers == [sliding] and torch.equal(sliding.keys, rows(2, 5, 0)[OWNERS])
