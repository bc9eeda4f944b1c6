"""LLaVA of transformers over towers that are not CLIP."""

from typing import Any

import hf_models
import pytest
import torch
import transformers
from hf_models import llava_over, prompts, square

from llava_consensus import attach
from llava_consensus.errors import OptionError

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (5, 19), reason="methods on models of transformers need >= 5.19")


def inputs(kind: str = "") -> dict[str, Any]:
    picture = square(0)
    extra = [hf_models.IMAGE] * 4 if kind == "dinov2_with_registers" else []
    return prompts([1, 5, picture._replace(ids=picture.ids + extra), 7, 8, 9])


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
