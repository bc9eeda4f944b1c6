"""LLaVA of transformers over towers that are not CLIP."""

import copy
from typing import Any

import hf_models
import pytest
import torch
import transformers
from hf_models import llava_over, prompts, square
from torch import Tensor

from llava_consensus import attach
from llava_consensus.errors import OptionError

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (5, 19), reason="methods on models of transformers need >= 5.19")
SMOL = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8, "num_hidden_layers": 30,
        "tie_word_embeddings": True}  # fmt: skip


def inputs(kind: str = "") -> dict[str, Any]:
    picture = square(0)
    extra = [hf_models.IMAGE] * 4 if kind == "dinov2_with_registers" else []
    return prompts([1, 5, picture._replace(ids=picture.ids + extra), 7, 8, 9])


def answer(model: Any, method: str, **options: Any) -> tuple[Tensor, list[list[int]]]:
    with torch.no_grad(), attach(model, method, 5, **options) as attached:
        logits = model(**{k: v.to(model.dtype) if v.is_floating_point() else v for k, v in inputs().items()}).logits
        kept = [one.kept[0].tolist() for outcome in attached.outcomes for _, one in outcome.reductions]
    return logits, kept


@pytest.mark.parametrize("method", ["consensusdrop", "visionzip", "fastv", "sparsevlm", "divprune"])
def test_dinov2_under_thirty_layers_of_grouped_queries_equals_float64(method: str) -> None:
    model = llava_over("dinov2", **SMOL)
    exact = copy.deepcopy(model).double()
    found, kept = answer(model, method)
    expected, same = answer(exact, method)
    assert kept == same and torch.allclose(found.double(), expected, atol=1e-3)


def test_dinov2_encodes_the_smaller_picture_as_if_it_had_been_given() -> None:
    model, given = llava_over("dinov2").double(), inputs()
    pixels = given["pixel_values"].double()
    with torch.no_grad():
        small = torch.nn.functional.interpolate(pixels.float(), (28, 28), mode="bicubic", antialias=True).double()
        states = model.model.vision_tower(small, output_hidden_states=True).hidden_states[-2][:, 1:]
        expected = model.model.multi_modal_projector(states)[0]
        with attach(model, "resize", 5) as attached:
            model(**{**given, "pixel_values": pixels})
            outcome = attached.outcomes[0]
    assert (outcome.before, outcome.after) == (16, 4)
    assert torch.allclose(outcome.reductions[0][1].tokens[0], expected, atol=1e-9)


def test_registers_are_tokens_as_the_model_has_it() -> None:
    model = llava_over("dinov2_with_registers")
    with attach(model, "visionzip", 5) as attached, torch.no_grad():
        model(**inputs("dinov2_with_registers"))
        assert (attached.outcomes[0].before, attached.outcomes[0].after) == (20, 5)


def test_any_tower_serves_methods_that_read_nothing_in_it() -> None:
    model = llava_over("beit")
    for method in ("random", "divprune", "fastv"):
        with attach(model, method, 5) as attached, torch.no_grad():
            model(**inputs())
            assert attached.outcomes[0].after == 5
    with pytest.raises(OptionError, match="CLIP and SigLIP towers only"):
        attach(llava_over("dinov2"), "tome", 5)
