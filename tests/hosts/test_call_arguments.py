"""Every argument of a call is rewritten for the rows that are left, passed on, or refused by name; packed prompts."""

import inspect
from typing import Any

import pytest
import torch
import transformers
from hf_models import CASES, decoder_given, prompts
from torch import Tensor

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.hosts.attachment import OWN_GENERATE
from llava_consensus.hosts.prompts import ARGUMENTS

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (5, 19), reason="methods on models of transformers need >= 5.19")


def accepted(kind: str, name: str) -> set[str]:
    """Arguments of a type's model, of the part that encodes images, and of its decoder; none if it attaches to none."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    model = getattr(transformers, name)
    config = transformers.CONFIG_MAPPING[kind]
    own = [
        value
        for value in vars(inspect.getmodule(model)).values()
        if inspect.isclass(value) and value.__module__ == model.__module__ and hasattr(value, "forward")
    ]
    parts = [part for part in own if hasattr(part, "get_image_features")]
    if not parts or kind in (*OWN_GENERATE, "blip"):
        return set()
    text = config().get_text_config()
    decoders = [MODEL_MAPPING[type(text)]] if type(text) in MODEL_MAPPING else []
    decoders += [part for part in own if part.__name__.endswith(("TextModel", "LanguageModel"))]
    signatures = [inspect.signature(part.forward).parameters.values() for part in (model, *parts, *decoders)]
    return {
        parameter.name
        for parameters in signatures
        for parameter in list(parameters)[1:]
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }


def test_every_argument_of_transformers_has_a_treatment() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as TYPES
    from transformers.utils.generic import TransformersKwargs

    given = {"TransformersKwargs": set(TransformersKwargs.__annotations__)}
    given["GenerationConfig"] = {name for name in vars(transformers.GenerationConfig()) if name[0] != "_"}
    given["generate"] = set(inspect.signature(transformers.GenerationMixin.generate).parameters) - {"self", "kwargs"}
    for kind, names in TYPES.items():
        for name in [names] if isinstance(names, str) else names:
            given[f"{kind} {name}"] = accepted(kind, name)
    assert sum(map(bool, given.values())) > 70
    unknown = {where: names - ARGUMENTS.keys() for where, names in given.items() if names - ARGUMENTS.keys()}
    assert not unknown, "put these into ARGUMENTS of hosts/prompts.py"


@torch.no_grad()
def test_arguments_that_no_method_can_carry_are_refused_by_name() -> None:
    model, inputs = CASES["llava"].build(), prompts([1, CASES["llava"].picture(0), 7, 8])
    size = inputs["input_ids"].shape[1]
    wrong = {"is_causal": False, "decoder_input_ids": inputs["input_ids"], "row_weights": torch.ones(1, size)}
    with attach(model, "consensusdrop", 4):
        for name, value in wrong.items():
            with pytest.raises(OptionError, match=f"^{name}: .*detach the method"):
                model(**inputs, **{name: value})
        model(**inputs, output_router_logits=False, seed=torch.ones(3))


# ---- packed prompts

PACKED = ("llava", "llava_next", "qwen2_5_vl", "qwen3_vl", "internvl", "smolvlm", "gemma3", "mistral_3")


def parts_of(name: str) -> tuple[Any, list[dict[str, Any]], dict[str, Any]]:
    """A model in double precision, three prompts as calls of their own without masks, and the images of all of them."""
    case = CASES[name]
    model = case.build().double()
    rows = [
        [1, case.picture(0), 7, 8, 9],
        [1, 5, case.picture(1), 9, case.picture(2), 10, 11],
        [1, case.picture(3), 12, 13, 14],
    ]

    def call(*rows: Any) -> dict[str, Any]:
        inputs = {key: value.double() if value.is_floating_point() else value for key, value in prompts(*rows).items()}
        return {key: value for key, value in inputs.items() if key != "attention_mask"}

    apart = []
    for row in rows:
        inputs = call(row)
        words = inputs["input_ids"]
        labels = words.where(words < 400, -100)
        labels[:, :-2] = -100  # the answer
        positions = decoder_given(model, inputs)["position_ids"]
        text = torch.arange(words.shape[1])[None]
        several = positions is not None and positions.ndim == 3
        positions = torch.cat((text[None], positions[-3:])) if several else text
        apart.append({**inputs, "labels": labels, "position_ids": positions, "use_cache": False})
    return model, apart, call(*rows)


def packed(apart: list[dict[str, Any]], images: dict[str, Any], fill: int = 0) -> dict[str, Any]:
    """These prompts in one row, with more rows that fill it up."""
    found = {**images, "use_cache": False}
    for name, value in apart[0].items():
        if isinstance(value, Tensor) and value.shape[-2:] == apart[0]["input_ids"].shape:
            row = torch.cat([part[name] for part in apart], -1)
            found[name] = torch.nn.functional.pad(row, (0, fill), value=-100 if name == "labels" else 0)
    return found


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """In double precision, which the models' own loss is not."""
    return torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:])


@pytest.mark.parametrize("name", PACKED)
def test_packed_prompts_are_reduced_as_if_each_were_alone(name: str) -> None:
    """Logits, loss and gradients; rows that fill up a pack have no part in them."""
    model, apart, images = parts_of(name)
    weights, together = list(model.parameters()), packed(apart, images, fill=3)
    with attach(model, "consensusdrop", CASES[name].tokens) as attached:
        outputs = [model(**part) for part in apart]
        losses = [loss_of(output.logits, part["labels"]) for output, part in zip(outputs, apart, strict=True)]
        loss = sum(losses) / 3  # each prompt has two targets
        wanted = torch.autograd.grad(loss, weights, allow_unused=True)
        output = model(**together)
        rows = [outcome.row for outcome in attached.outcomes]
        mine = loss_of(output.logits, together["labels"])
        found = torch.autograd.grad(mine, weights, allow_unused=True)
    logits = torch.cat([output.logits for output in outputs], 1)
    assert rows == [0, 1, 1, 2]
    assert (output.logits[:, : logits.shape[1]] - logits).abs().max() < 1e-9
    assert abs(mine - loss) < 1e-9 and abs(output.loss - loss) < 1e-5
    bound = 1e-7 if name == "gemma3" else 1e-9  # its norms compute in single precision
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None) and (one is None or (one - other).abs().max() < bound)


@pytest.mark.parametrize("method", ["visionzip", "fastv"])
@pytest.mark.parametrize("name", PACKED)
@torch.no_grad()
def test_packed_prompts_in_several_rows_of_different_length(name: str, method: str) -> None:
    """Also of methods between layers, and with positions that are kept."""
    model, apart, images = parts_of(name)
    size = apart[2]["input_ids"].shape[1]
    first = packed(apart[:2], images)
    whole = first["input_ids"].shape[1]
    second = packed(apart[2:], images, fill=whole - size)
    both = {
        key: torch.cat((value, second[key]), value.ndim - 2)
        if key not in images or value.shape[1:] == (whole,)
        else value
        for key, value in first.items()
        if isinstance(value, Tensor)
    }
    options = {"positions": "keep"} if method == "visionzip" else {}
    with attach(model, method, CASES[name].tokens, **options):
        wanted = [model(**part).logits[0] for part in apart]
        found = model(**both, use_cache=False).logits
    assert (found[0] - torch.cat(wanted[:2])).abs().max() < 1e-9
    assert (found[1, :size] - wanted[2]).abs().max() < 1e-9


@pytest.mark.parametrize("checkpoints", [None, {"use_reentrant": True}, {"use_reentrant": False}])
@pytest.mark.parametrize("name", ["qwen3_vl", "mistral_3"])
def test_a_frozen_tower_is_read_in_training(name: str, checkpoints: dict[str, bool] | None) -> None:
    """Its first call already: no call without gradients has told which patches make which token."""
    model = CASES[name].build().train()
    for name_of, weight in model.named_parameters():
        weight.requires_grad_("language_model" in name_of)
    if checkpoints:
        model.gradient_checkpointing_enable(checkpoints)
        model.enable_input_require_grads()
    inputs, gradients = prompts([1, CASES[name].picture(0), 7, 8, 9]), []
    with attach(model, "consensusdrop", CASES[name].tokens) as attached:
        for _ in range(2):
            model.zero_grad()
            model(**inputs, labels=inputs["input_ids"]).loss.backward()
            gradients.append([weight.grad for weight in model.parameters() if weight.grad is not None])
        assert attached.outcomes[0].after == CASES[name].tokens
    assert all(map(torch.equal, *gradients)) and any(map(torch.any, gradients[0]))


@torch.no_grad()
def test_packed_prompts_that_the_plain_model_mixes_are_refused() -> None:
    model, apart, images = parts_of("llava")
    inputs = packed(apart, images)
    size = inputs["input_ids"].shape[1]
    with attach(model, "consensusdrop", 4):
        with pytest.raises(OptionError, match="use_cache=False"):
            model(**inputs | {"use_cache": True})
        with pytest.raises(OptionError, match="position_ids alone"):
            model(**inputs, attention_mask=torch.ones(1, 1, size, size, dtype=torch.bool).tril())


@pytest.mark.parametrize("labelled", ["all", "text"])
def test_labels_on_the_whole_prompt_leave_the_text_a_question(labelled: str, recwarn: pytest.WarningsRecorder) -> None:
    model, inputs = CASES["llava"].build(), prompts([1, CASES["llava"].picture(0), 7, 8])
    words = inputs["input_ids"]
    labels = words if labelled == "all" else words.where(words < 400, -100)
    with attach(model, "consensusdrop", 4) as attached:
        wanted = model(**inputs).logits
        assert torch.equal(model(**inputs, labels=labels).logits, wanted) and not attached.notes
    assert not [warning for warning in recwarn if "no text" in str(warning.message)]
