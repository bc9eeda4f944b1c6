"""A budget that is a share of each image's own tokens: what it comes to, and in the records; and the most visual tokens
of a prompt with several images.
"""

import json
import re
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llava_consensus import attach, cli
from llava_consensus.errors import OptionError
from llava_consensus.hosts.images import Image
from llava_consensus.hosts.units import over_parts, units_of
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget, Share, budget, conversation, most_first, of_prompts


@pytest.mark.parametrize(
    ("share", "available", "tokens"),
    [(0.1, 576, 58), (0.1, 24, 2), (0.1, 25, 3), (0.5, 5, 3), (0.29, 50, 15), (0.999, 3, 3), (0.001, 9, 1)],
)
def test_a_share_is_rounded_half_up_and_at_least_one(share: float, available: int, tokens: int) -> None:
    assert budget(share).of(available) == Budget(tokens)


@pytest.mark.parametrize("tokens", [np.int64(8), np.float32(0.5), torch.tensor(8), torch.tensor(0.5)], ids=repr)
def test_numbers_of_numpy_and_torch_are_budgets(tokens: Any) -> None:
    assert budget(tokens).of(16) == Budget(8)


def test_a_whole_number_is_no_share() -> None:
    assert budget(128) == Budget(128) == budget(128).of(7) and budget(1) == Budget(1)
    assert budget(0.1) == Share(0.1) and budget(64, 3) == Budget(64, 3)
    in_order = [Budget(64), Budget(2), Share(0.5), Share(0.1)]
    assert most_first({Share(0.1), Budget(2), Share(0.5), Budget(64)}) == in_order


@pytest.mark.parametrize("wrong", [1.0, 0.0, -0.1, 1.5, float("nan"), float("inf")])
def test_a_share_outside_its_bound_is_refused(wrong: float) -> None:
    with pytest.raises(OptionError, match="1 is one token"):
        budget(wrong)


def test_records_hold_the_share_and_what_it_came_to(tmp_path: Path) -> None:
    told = ["--device", "cpu", "--limit", "3", "--no-progress", "--tokens", "0.1", "--out", str(tmp_path)]
    assert cli.main(["eval", "gqa", *told]) == 0
    (run,) = tmp_path.iterdir()
    assert run.name.startswith("gqa-consensusdrop-0.1-")
    for line in (run / "answers.jsonl").read_text().splitlines():
        said = json.loads(line)["metadata"]
        assert said["share"] == 0.1 and said["budgets"] == [58] and said["after"] == 58 == said["account"]["tokens"]
    assert json.loads((run / "metrics.json").read_text())["account"]["entering"] == 58


def test_older_pictures_are_halved_until_a_conversation_fits() -> None:
    assert conversation([64] * 4, 256) == [64] * 4
    assert conversation([64] * 4, 255) == [32, 64, 64, 64]
    assert conversation([64] * 4, 200) == [32, 32, 64, 64]
    assert conversation([64] * 4, 150) == [16, 32, 32, 64]
    assert conversation([64] * 20, 300) == [8] * 9 + [16] * 10 + [64]
    assert conversation([3, 1, 64], 66) == [1, 1, 64]
    with pytest.raises(OptionError, match=re.escape("total=100 visual tokens are too few for 20 images")):
        conversation([64] * 20, 100)
    found = of_prompts([Share(0.5), Budget(64), Budget(64)], [100, 40, 576], [0, 1, 1], 80)
    assert found == (Share(0.5), Budget(10), Budget(64))


def test_a_prompt_has_at_most_its_total() -> None:
    model = hf_models.CASES["llava"].build()
    inputs = hf_models.prompts([1, 5, hf_models.square(0), 7, hf_models.square(1), 8, 9])
    with attach(model, "visionzip", tokens=8, total=12) as attached:
        model.generate(**inputs, max_new_tokens=1)
        assert [one.after for one in attached.outcomes] == [4, 8]
    with pytest.raises(OptionError, match="total=True must be a whole number"):
        attach(model, "visionzip", total=True)
    with pytest.raises(OptionError, match="is for methods that act after the vision tower"):
        attach(model, "fastv", tokens=8, total=12)


# ---- over the tiles of an image

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=13)  # tokens of each tile


def left(sizes: list[int], budget: Budget | Share, **options: str) -> int:
    tile, token = np.repeat(np.arange(len(sizes)), sizes), np.concatenate([np.arange(size) for size in sizes])
    image = Image(0, np.arange(sum(sizes)), tile, token, len(sizes), False, 0)
    units = units_of([image], [budget], make("visionzip", **options), 13)
    return sum(sizes) - sum(len(unit.places) - unit.budget.tokens for unit in units)


@settings(deadline=None, max_examples=300)
@given(SIZES, st.integers(1, 300), st.integers(0, 40))
def test_a_picture_keeps_t_tokens(sizes: list[int], tokens: int, more: int) -> None:
    """So it is monotonic in T, and never smaller for a larger picture."""
    assert left(sizes, Budget(tokens)) == min(tokens, sum(sizes)) == left(sizes, Budget(tokens), tile_budget="global")
    assert left([*sizes, 7], Budget(tokens)) >= left(sizes, Budget(tokens)) <= left(sizes, Budget(tokens + more))


@given(SIZES.filter(lambda sizes: sum(sizes) > len(sizes)), st.data())
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


def test_parts_that_an_image_is_read_in_share_its_budget_or_keep_all_they_have() -> None:
    assert over_parts(Share(0.5), [3]) == [Share(0.5)]
    assert over_parts(Budget(8, 2), [6, 2, 4]) == [Budget(3, 1), Budget(2, 0), Budget(3, 1)]
    assert over_parts(Share(0.5), [5, 2]) == [Budget(2), Budget(2)]  # half of seven, rounded up
    for whole in (Budget(8, 1), Budget(9), Share(0.999)):
        assert over_parts(whole, [6, 2]) == [Budget(6), Budget(2)]
