"""What a server knows of an image before it is encoded, on models of transformers: no vLLM is needed."""

import copy
from typing import Any

import hf_models
import numpy as np
import pytest
import torch

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.hosts import view_of
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.serving.plan import Plan
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
    view, own = view_of(model), plan(model, newlines=newlines)
    arguments = view.encoder_inputs(inputs)["image"]
    (image,) = view.images("image", arguments, inputs["input_ids"].numpy())
    known = own.image("image", arguments, len(image.places))
    assert all(np.array_equal(getattr(known, part), getattr(image, part)) for part in ("tile", "token", "tiles"))
    for budget in (Budget(6), Budget(1), Share(0.5), Budget(4096)):
        tokens = budget.share if isinstance(budget, Share) else budget.tokens
        with attach(model, "divprune", tokens, newlines=newlines) as attached:
            model(**inputs)
            (outcome,) = attached.outcomes
        assert own.left(known, budget) == outcome.after + outcome.structural
    assert next(own.facts.module.parameters()).is_meta and own.config.text_config.num_hidden_layers > 1
    assert len(own.facts.module.get_decoder().layers) == 1 and model.config.to_dict() == before


def test_the_question_is_read_by_the_clip_that_the_tower_is_of(model: Any) -> None:
    assert plan(model).clip_name == ""
    named = plan(model, method="cdpruner")
    named.config.vision_config._name_or_path = "openai/clip"
    assert named.clip_name == "openai/clip"


def test_blocks_that_are_read_are_those_of_the_towers_options(model: Any) -> None:
    assert plan(model, method="divprune").blocks() == (2, {})
    assert plan(model, method="visionzip").blocks() == (2, {"": 2})
    assert plan(model, method="prumerge").blocks() == (2, {"": 3})
    assert plan(model, method="visionzip", vision_layer=1).blocks() == (1, {"": 1})
    with pytest.raises(OptionError, match="which is the last of 4: give vision_layer=2"):
        plan(model, method="prumerge", vision_layer=3).blocks()
    with pytest.raises(OptionError, match=r"vision_layer=9 must be in -4\.\.3"):
        plan(model, method="visionzip", vision_layer=9).blocks()
