"""What a server knows of a picture before it is encoded, on models of transformers: no vLLM is needed."""

import copy
from typing import Any

import hf_models
import pytest
import torch

from llava_consensus import attach
from llava_consensus.hosts import view_of
from llava_consensus.hosts.hf.rows import PictureRows
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.serving.plan import Plan, row_kinds
from llava_consensus.serving.setting import Setting


def plan(model: Any, tokens: int | float = 6, method: str = "divprune", **options: Any) -> Plan:
    return Plan(Setting(method, tokens, None, options)(copy.deepcopy(model.config)), "")


@pytest.fixture(scope="module")
def model() -> Any:
    return hf_models.CASES["llava_next"].build()


@torch.no_grad()
@pytest.mark.parametrize("newlines", ["keep", "drop"])
def test_rows_left_of_a_tiled_picture_are_those_that_attach_leaves(model: Any, newlines: str) -> None:
    case, before = hf_models.CASES["llava_next"], copy.deepcopy(model.config.to_dict())
    inputs = hf_models.prompts([1, 5, 6, case.picture(0), 7, 8, 9])
    (rows,) = view_of(model, old=True).pictures("image", inputs, None)
    own = plan(model, newlines=newlines)
    for budget in (Budget(6), Budget(1), Share(0.5), Budget(4096)):
        tokens = budget.share if isinstance(budget, Share) else budget.tokens
        with attach(model, "divprune", tokens, newlines=newlines) as attached:
            model(**inputs)
            (outcome,) = attached.outcomes
        assert own.left("image", rows, budget) == outcome.after + outcome.structural
    assert next(own.view.module.parameters()).is_meta and own.config.text_config.num_hidden_layers > 1
    assert len(own.view.decoder.layers) == 1 and model.config.to_dict() == before


def test_the_question_is_read_by_the_clip_that_the_tower_is_of(model: Any) -> None:
    assert plan(model).clip_name == ""
    named = plan(model, method="cdpruner")
    named.config.vision_config._name_or_path = "openai/clip"
    assert named.clip_name == "openai/clip"


def test_rows_of_prompts_are_numbered_on_the_side_of_the_processor() -> None:
    second = torch.zeros(2, dtype=torch.long)
    pictures = [PictureRows(torch.tensor([0, 0, 1]), torch.tensor([4, -1, 5]), 2), PictureRows(second, second, 1)]
    prompts = [torch.tensor([-1, 0, 0, 0, -1, 1, 1]), torch.tensor([-1, -1])]
    kinds = row_kinds(prompts, pictures, "video", (1, 2))
    assert kinds.real.tolist() == [[True] * 7, [True] * 2 + [False] * 5]
    assert kinds.picture.tolist() == [[-1, 0, 0, 0, -1, 1, 1], [-1] * 7]
    assert kinds.tile.tolist() == [[-1, 0, -1, 1, -1, 0, 0], [-1] * 7]
    assert kinds.token.tolist() == [[-1, 4, -1, 5, -1, 0, 0], [-1] * 7]
    assert kinds.videos == {0, 1} and kinds.tiles == (2, 1) and kinds.marked == ((1, 2), (1, 2))
    alone = row_kinds(prompts, pictures, "image")
    assert alone.videos == frozenset() and alone.marked == ((0, 0), (0, 0))
