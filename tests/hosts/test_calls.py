"""Arguments and inputs of a call that the plain model takes: followed, or refused in one line that names them."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hf_models import CASES, END, TAG, prompts

from llava_consensus import attach
from llava_consensus.errors import NonFiniteError

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (5, 19), reason="methods on models of transformers need >= 5.19")


def one(name: str, *numbers: int) -> dict[str, Any]:
    """A prompt with these pictures."""
    pictures = [part for number in numbers for part in (6, CASES[name].picture(number))]
    return prompts([1, 5, *pictures, 7, 8, 9])


@pytest.mark.parametrize("name", ["llava", "llava_next", "pixtral", "mistral_3"])
@torch.no_grad()
def test_another_layer_of_the_tower_is_read_if_a_call_names_it(name: str) -> None:
    model, case = CASES[name].build(), CASES[name]
    other = {"vision_feature_layer": -3 if name.startswith("llava") else -2}
    same = {"vision_feature_layer": model.config.vision_feature_layer}
    plain = model(**one(name, 0), **other).logits
    with attach(model, "consensusdrop", case.tokens):
        assert torch.allclose(model(**one(name, 0), **same).logits, model(**one(name, 0)).logits, atol=1e-5)
        found = model(**one(name, 0), **other).logits
    model.config.vision_feature_layer = model.model.config.vision_feature_layer = other["vision_feature_layer"]
    with attach(model, "consensusdrop", case.tokens):
        assert torch.allclose(model(**one(name, 0)).logits, found, atol=1e-5)
    with attach(model, "fastv", 4096):
        assert torch.allclose(model(**one(name, 0)).logits, plain, atol=1e-5)


@pytest.mark.parametrize("name", ["pixtral", "mistral_3", "qwen2_5_vl", "smolvlm", "internvl"])
def test_the_question_is_words(name: str) -> None:
    """Breaks, tags and markers of a later image are no part of the question about an earlier one."""
    inputs, case = one(name, 0, 2), CASES[name]
    model = case.build()
    with attach(model, "consensusdrop", case.tokens) as attached, torch.no_grad():
        read: list[Any] = []
        budgets = attached._budgets
        attached._budgets = lambda stage, prompt: read.append(prompt) or budgets(stage, prompt)  # type: ignore[method-assign,func-returns-value]
        model(**inputs)
    asked, later = (inputs["input_ids"][0][text].tolist() for text in read[-1].text)
    assert [word for word in asked if word < 10] == [6, 7, 8, 9] and TAG not in asked
    assert len(asked) <= 1 + len(later) + 1 and asked.count(END) <= 1  # that of the first image itself


@torch.no_grad()
def test_logits_of_any_rows_and_states_of_the_inner_model() -> None:
    model, inputs = CASES["llava"].build(), one("llava", 0)
    with attach(model, "consensusdrop", 5):
        whole = model(**inputs).logits
        few = model(**inputs, logits_to_keep=torch.tensor([0, 3])).logits
        assert torch.allclose(few, whole[:, [0, 3]], atol=1e-5)
        states = model.model(**inputs).last_hidden_state
        assert torch.allclose(model.lm_head(states), whole, atol=1e-5)


@torch.no_grad()
def test_a_picture_that_is_not_finite_is_named() -> None:
    model = CASES["llava"].build()
    inputs = prompts(*([1, CASES["llava"].picture(number), 7, 8] for number in range(3)))
    inputs["pixel_values"][1] = torch.nan
    with attach(model, "consensusdrop", 5), pytest.raises(NonFiniteError, match=r"^image 1 of prompt 1: "):
        model(**inputs)


@pytest.mark.parametrize("tokens", [np.int64(8), np.float32(0.5), torch.tensor(8), torch.tensor(0.5)], ids=repr)
@torch.no_grad()
def test_numbers_of_numpy_and_torch_are_budgets(tokens: Any) -> None:
    model = CASES["llava"].build()
    with attach(model, "visionzip", tokens) as attached:
        model(**one("llava", 0))
    assert attached.outcomes[0].after == 8


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_weights_in_buffers_are_asked_in_their_own_format() -> None:
    case = CASES["llava"]
    model = torch.ao.quantization.quantize_dynamic(case.build(), {torch.nn.Linear}, torch.qint8)
    for method in ("consensusdrop", "fastv", "visionzip"):
        with attach(model, method, tokens=case.tokens) as attached:
            model(**one("llava", 0))
        assert attached.outcomes[0].after == case.tokens
