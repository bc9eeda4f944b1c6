"""A budget that is a share of each image's own tokens: what it comes to, in a batch as alone, and in the records."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from llava_consensus import attach, cli
from llava_consensus.errors import OptionError
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget, Share, budget, most_first

main_stack = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="models of transformers need version 5.19 or later"
)


@pytest.mark.parametrize(
    ("share", "available", "tokens"),
    [
        (0.1, 576, 58),
        (0.1, 24, 2),
        (0.1, 25, 3),
        (0.1, 4, 1),
        (0.5, 5, 3),
        (0.29, 50, 15),
        (0.999, 3, 3),
        (0.001, 9, 1),
    ],
)
def test_a_share_is_rounded_half_up_and_at_least_one(share: float, available: int, tokens: int) -> None:
    assert budget(share).of(available) == Budget(tokens)


def test_a_whole_number_is_no_share() -> None:
    assert budget(128) == Budget(128) == budget(128).of(7) and budget(1) == Budget(1)
    assert budget(0.1) == Share(0.1) and budget(64, 3) == Budget(64, 3)
    assert most_first({Share(0.1), Budget(2), Share(0.5), Budget(64)}) == [
        Budget(64),
        Budget(2),
        Share(0.5),
        Share(0.1),
    ]


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


@main_stack
@pytest.mark.parametrize("name", ["consensusdrop", "fastv"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_5_vl video"])
def test_each_picture_of_a_batch_gets_its_own_share(family: str, name: str) -> None:
    from hf_models import CASES, prompts

    case = CASES[family]
    model = case.build()
    rows: list[list[Any]] = [
        [1, 7, case.picture(0), 8, 9],
        [1, case.picture(2), 5, 6, 7],
        [2, case.picture(1), 3, case.picture(2), 4],
    ]
    told = dict(max_new_tokens=3, do_sample=False)
    with attach(model, name, tokens=0.3) as attached:
        together = model.generate(**prompts(*rows), **told)[:, -3:]
        outcomes = attached.outcomes
        singles = [model.generate(**prompts(row), **told)[:, -3:] for row in rows]
    assert len({outcome.before for outcome in outcomes}) > 1, "images of one size show nothing"
    if make(name).place.name != "DECODER":  # those have schedules of their own
        assert [outcome.after for outcome in outcomes] == [Share(0.3).of(one.before).tokens for one in outcomes]
    assert torch.equal(together, torch.cat(singles))


@main_stack
@pytest.mark.parametrize("name", ["consensusdrop", "fastv", "resize"])
def test_a_budget_above_all_tokens_of_one_row_leaves_that_row_whole(name: str) -> None:
    from hf_models import CASES, prompts

    case = CASES["qwen2_5_vl"]
    model = case.build()
    rows: list[list[Any]] = [[1, 7, case.picture(0), 8], [1, case.picture(2), 5]]  # 24 and 8 tokens
    told = dict(max_new_tokens=3, do_sample=False)
    plain = model.generate(**prompts(rows[1]), **told)[:, -3:]
    with attach(model, name, tokens=10) as attached:
        together = model.generate(**prompts(*rows), **told)[:, -3:]
        assert [(one.before, one.after < one.before) for one in attached.outcomes] == [(24, True), (8, False)]
        single = model.generate(**prompts(rows[0]), **told)[:, -3:]
    assert torch.equal(together, torch.cat((single, plain)))
