"""Derived hosts as people run models: half precision, inference mode, every form of `generate`, compiled layers, LoRA,
copies, layers spread by accelerate, and a loop of a user's own.
"""

import copy
import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.19")

from families import FAMILIES, Family, build, prompts  # noqa: E402
from reference import answer, cross  # noqa: E402

from llava_consensus import attach  # noqa: E402
from llava_consensus.errors import OptionError  # noqa: E402
from llava_consensus.hosts.derived import model as derived  # noqa: E402
from llava_consensus.hosts.hf import reduce  # noqa: E402

NAME = "llama4"  # features that are projected after the seam, so that merged rows enter at the language model
FAMILY = FAMILIES[NAME]


@pytest.fixture(autouse=True)
def no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)


def made(dtype: torch.dtype = torch.float32, *shown: list[int], family: Family = FAMILY) -> tuple[Any, dict[str, Any]]:
    derived._RECORDS.clear()
    model = build(family, dtype)
    return model, prompts(model, family, *(shown or ([0, 1], [1])), dtype=dtype)


def answers(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    given = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **options}
    with attach(model, "consensusdrop", tokens=4):
        return model.generate(**inputs, **given)


def test_inference_mode_maps_patches_too() -> None:
    model, inputs = made()
    with torch.inference_mode():
        inputs = {name: value.clone() for name, value in inputs.items()}
        first = answers(model, inputs)
    assert derived.DerivedModel(model, {}).record.block  # a map needs gradients, which inference mode forbids
    assert torch.equal(first, answers(model, {name: value.clone() for name, value in inputs.items()}))


def test_half_precision_finds_the_same_patches() -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model, inputs = made(dtype)
        derived._MAPS.clear()
        with attach(model, "divprune", tokens=4), torch.no_grad():
            model(**inputs)
        view = derived.DerivedModel(model, {})
        rows, *_ = next(iter(derived._MAPS[view.key].values()))
        found.append((view.record.block, rows.members))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    "options", [{"num_beams": 2}, {"do_sample": True}, {"num_beams": 2, "num_return_sequences": 2}]
)
def test_every_form_of_generate(options: dict[str, Any]) -> None:
    family = FAMILIES["paligemma"]  # `generate` repeats its features for beams, which are one tensor
    model, inputs = made(family=family)
    torch.manual_seed(3)
    first = answers(model, inputs, **options)
    torch.manual_seed(3)
    assert torch.equal(first, answers(model, inputs, **options))
    if not options.get("do_sample"):
        alone = answers(model, prompts(model, family, [1], dtype=torch.float32), **options)
        assert torch.equal(first[-len(alone) :, -4:], alone[:, -4:])


@pytest.mark.parametrize("name", ["kimi_k25", NAME])
def test_deriving_makes_no_logits_but_the_last(name: str) -> None:
    model, inputs = made(family=FAMILIES[name])
    rows = set()
    model.get_output_embeddings().register_forward_hook(lambda head, given, logits: rows.add(logits.shape[1]))
    answers(model, inputs)
    assert rows == {1}


def test_deriving_keeps_the_shapes_of_a_tower_and_not_its_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    facts, recorded = derived.tower_facts, []
    monkeypatch.setattr(derived, "tower_facts", lambda *given: recorded.extend(given[2]) or facts(*given))
    model, inputs = made()
    answers(model, inputs)
    assert len(recorded) == len(model.vision_model.model.layers)
    assert all(one.query.is_meta and one.value.is_meta and one.output is None for one in recorded)


def test_chunks_of_a_prompt_are_refused_where_rows_see_later_ones() -> None:
    model, inputs = made(family=FAMILIES["paligemma"])
    with pytest.raises(OptionError, match="reads chunks otherwise"):
        answers(model, inputs, prefill_chunk_size=5)
    model, inputs = made(family=FAMILIES["kimi_k25"])
    assert torch.equal(answers(model, inputs, prefill_chunk_size=5), answers(model, inputs))


def test_a_loop_of_ones_own_and_gradients() -> None:
    model, inputs = made(torch.float64, [0, 1])
    model.train()
    with attach(model, "consensusdrop", tokens=4):
        arguments = reduce(model, **inputs, labels=inputs["input_ids"])
        output = model(**arguments)
        output.loss.backward()
        assert any(
            weight.grad is not None and weight.grad.abs().sum() > 0 for weight in model.vision_model.parameters()
        )
        with torch.no_grad():
            assert torch.equal(model(**inputs).logits, output.logits.detach())
    assert all(module.training for module in model.modules())


def test_a_deep_copy_of_an_attached_model_is_attached_by_itself() -> None:
    model, inputs = made()
    expected = answers(model, inputs)
    with attach(model, "consensusdrop", tokens=4):
        twin = copy.deepcopy(model)
    assert torch.equal(twin.generate(**inputs, max_new_tokens=4, do_sample=False, pad_token_id=0), expected)


def test_a_compiled_layer_is_left_as_it_is() -> None:
    model, inputs = made()
    expected = answers(model, inputs)
    for layer in model.get_decoder().model.layers:
        layer.compile(backend="eager")
    assert torch.equal(answers(model, inputs), expected)


def check_against_itself(model: Any) -> None:
    """All rows kept is the plain model; rows that are left are read as its own language model reads them, and SCAP is
    its own first attention.
    """
    inputs = prompts(model, FAMILY, [0, 1], dtype=torch.float32)
    with torch.no_grad():
        plain = model(**inputs).logits
        with attach(model, "consensusdrop", tokens=4000):
            assert torch.equal(model(**inputs).logits, plain)
        with attach(model, "consensusdrop", tokens=3, positions="keep", tile_budget="global") as attached:
            logits, outcomes = model(**inputs).logits[0, -1], attached.outcomes
    assert all(one.after == 3 < one.before for one in outcomes)
    torch.testing.assert_close(logits, answer(model, inputs, outcomes, keeps=True), rtol=0, atol=1e-4)
    for outcome, expected in zip(outcomes, cross(model, inputs, FAMILY.layer), strict=True):
        torch.testing.assert_close(outcome.reductions[0][1].cross[0], expected, rtol=0, atol=1e-6)


@pytest.mark.skipif(find_spec("peft") is None, reason="LoRA needs peft")
def test_lora() -> None:
    from peft import LoraConfig, get_peft_model

    model, _ = made()
    adapters = LoraConfig(target_modules=["q_proj", "k_proj"], r=2, lora_dropout=0.5, init_lora_weights=False)
    adapted = get_peft_model(model, adapters).eval()
    with pytest.raises(OptionError, match="get_base_model"):
        attach(adapted, "consensusdrop")
    check_against_itself(adapted.get_base_model())


@pytest.mark.skipif(find_spec("accelerate") is None, reason="spread layers need accelerate")
@pytest.mark.parametrize("weights", ["in place", "offloaded"])
def test_layers_that_accelerate_has_spread(weights: str) -> None:
    from accelerate import cpu_offload, dispatch_model

    model, inputs = made()
    expected = answers(model, inputs)
    if weights == "offloaded":  # they are there while their module runs alone
        cpu_offload(model, torch.device("cpu"))
    else:
        model = dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    assert torch.equal(answers(model, inputs), expected)
    derived._RECORDS.clear()  # derived of such a model too
    check_against_itself(model)


def test_quantised_weights() -> None:
    model, _ = made()
    torch.ao.quantization.quantize_dynamic(model.language_model.model.layers, {torch.nn.Linear}, inplace=True)
    check_against_itself(model)
