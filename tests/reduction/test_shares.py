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

from llava_consensus import attach, cli
from llava_consensus.errors import OptionError
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
