"""Arguments and inputs of a call that the plain model takes: followed, or refused in one line that names them."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hf_models import CASES, END, TAG, prompts

from llava_consensus import attach
from llava_consensus.errors import NonFiniteError, OptionError
from llava_consensus.hosts import view_of

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (5, 19), reason="methods on models of transformers need >= 5.19")


def one(name: str, *numbers: int) -> dict[str, Any]:
    """A prompt with these pictures."""
    pictures = [part for number in numbers for part in (6, CASES[name].picture(number))]
    return prompts([1, 5, *pictures, 7, 8, 9])


@pytest.mark.parametrize("name", ["llava", "llava_next", "pixtral", "mistral_3"])
@torch.no_grad()
def test_another_layer_of_the_tower_is_refused_where_a_method_reads_it(name: str) -> None:
    model, case = CASES[name].build(), CASES[name]
    other = {"vision_feature_layer": -3 if name.startswith("llava") else -2}
    same = {"vision_feature_layer": model.config.vision_feature_layer}
    with attach(model, "consensusdrop", case.tokens):
        with pytest.raises(OptionError, match=r"vision_feature_layer=-\d: the method reads"):
            model(**one(name, 0), **other)
        assert torch.equal(model(**one(name, 0), **same).logits, model(**one(name, 0)).logits)
    plain = model(**one(name, 0), **other).logits
    with attach(model, "fastv", 4096):
        assert torch.equal(model(**one(name, 0), **other).logits, plain)


@pytest.mark.parametrize("name", ["pixtral", "mistral_3", "qwen2_5_vl", "smolvlm", "internvl"])
def test_the_question_is_words(name: str) -> None:
    """Breaks, tags and markers of a later picture are no part of the question about an earlier one."""
    inputs, case = one(name, 0, 2), CASES[name]
    with attach(case.build(), "consensusdrop", case.tokens) as attached, torch.no_grad():
        read: list[Any] = []
        layout = attached.layout
        attached.layout = lambda kinds: read.append(layout(kinds)) or read[-1]  # type: ignore[method-assign,func-returns-value]
        attached.model.module(**inputs)
    first, second = read[-1].pictures
    asked = inputs["input_ids"][0][first.text].tolist()
    later = inputs["input_ids"][0][second.text].tolist()
    assert [word for word in asked if word < 10] == [6, 7, 8, 9] and TAG not in asked
    assert len(asked) <= 1 + len(later) + 1 and asked.count(END) <= 1  # that of the first picture itself


def test_without_token_types_pictures_would_stand_elsewhere() -> None:
    inputs = one("qwen2_5_vl", 0)
    del inputs["mm_token_type_ids"]
    model = CASES["qwen2_5_vl"].build()
    with torch.no_grad():
        plain = model(**inputs).logits
        with attach(model, "consensusdrop", 5), pytest.raises(OptionError, match="mm_token_type_ids: without it"):
            model(**inputs)
        with attach(model, "fastv", 4096):
            assert torch.equal(model(**inputs).logits, plain)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_5_vl video"])
def test_types_of_rows_follow_from_the_ids(name: str) -> None:
    view, inputs = view_of(CASES[name].build()), one(name, 0, 1)
    typed, ids = inputs["mm_token_type_ids"], inputs["input_ids"]
    assert typed.any() and torch.equal(view.types(inputs, ids), typed)
    del inputs["mm_token_type_ids"]
    real = torch.ones_like(ids, dtype=torch.bool)
    places = view.positions(inputs, ids, real)
    assert torch.equal(places, view.positions({**inputs, "mm_token_type_ids": typed}, ids, real))
    assert torch.equal(places, view.positions({**inputs, "position_ids": places.permute(2, 0, 1)}, ids, real))


@torch.no_grad()
def test_what_a_reduced_call_cannot_follow_is_refused() -> None:
    model, inputs = CASES["llava"].build(), one("llava", 0)
    with attach(model, "consensusdrop", 5):
        with pytest.raises(OptionError, match="logits_to_keep: a tensor"):
            model(**inputs, logits_to_keep=torch.tensor([0, 3]))
        with pytest.raises(OptionError, match="LlavaModel: pictures are reduced on their way"):
            model.model(**inputs)
        model.model(input_ids=inputs["input_ids"][:, -3:])
    model.model(**inputs)
    with attach(model, "fastv", 5), pytest.raises(OptionError, match="generate_batch: continuous batching"):
        model.generate_batch([[1, 2, 3]])


@torch.no_grad()
def test_a_picture_that_is_not_finite_is_named() -> None:
    model = CASES["llava"].build()
    inputs = prompts(*([1, CASES["llava"].picture(number), 7, 8] for number in range(3)))
    inputs["pixel_values"][1] = torch.nan
    with attach(model, "consensusdrop", 5), pytest.raises(NonFiniteError, match=r"^picture 1 of prompt 1: "):
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
    case = CASES["qwen3_vl"]
    model = torch.ao.quantization.quantize_dynamic(case.build(), {torch.nn.Linear}, torch.qint8)
    for method in ("consensusdrop", "fastv", "visionzip"):
        with attach(model, method, tokens=case.tokens) as attached:
            model(**one("qwen3_vl", 0))
        assert attached.outcomes[0].after == case.tokens


def test_another_merge_size_is_named() -> None:
    model = CASES["qwen2_5_vl"].build()
    model.model.visual.spatial_merge_size = 3
    with pytest.raises(OptionError, match="spatial_merge_size=3"):
        attach(model, "consensusdrop", 5)


def test_an_encoder_in_the_place_of_the_models_own_says_what_it_takes() -> None:
    model = CASES["llava"].build()
    view = view_of(model)
    own = view.encoder_names("image")
    model.model.get_image_features = lambda pixel_values, sizes: None
    assert view.encoder_names("image") == ["pixel_values", "sizes"]
    del model.model.get_image_features
    assert view.encoder_names("image") == own
