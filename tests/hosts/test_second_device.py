"""Hosts and methods on a second device (`second_device`): the answers of the CPU, and how often it waits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from hf_models import CASES, noise, prompts
from models import IMAGE, tiny_llava
from prompts import batch, row
from second_device import Standin, apart, back, onto, there

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.methods import METHODS
from llava_consensus.reduction.method import Place

CURRENT = int(transformers.__version__.split(".")[0]) >= 5
current = pytest.mark.skipif(not CURRENT, reason="methods on models of transformers need >= 5.19")
PLACES = ("consensusdrop+", "prumerge", "resize", "fastv", "sparsevlm")
Call = Callable[[Any, dict[str, Any]], Any]  # of a model with inputs


class Most(NamedTuple):
    """What any method may cost a batch of four prompts and three pictures, beside the same call without a method."""

    waits: int  # reads of a number
    copies: int  # to the device, by methods that act before the language model
    between: int  # the same, by those that cut between its layers


MOST = {
    "llava": Most(1, 20, 45),
    "qwen2_5_vl": Most(2, 57, 93),
    "gemma3": Most(1, 21, 45),
    "official": Most(2, 18, 33),
}


def answer(model: Any, inputs: dict[str, Any]) -> Any:
    return model.generate(**inputs, max_new_tokens=2, do_sample=False)


def counted(model: Any, inputs: dict[str, Any], call: Call = answer) -> tuple[Any, Standin]:
    """What a call of a model on the device gives, back on the CPU, and what was counted meanwhile."""
    shown = there(inputs)
    with Standin() as device:
        found = call(model, shown)
    return back(found), device


def compared(plain: Any, moved: Any, inputs: dict[str, Any], method: str, tokens: int, call: Call = answer) -> Standin:
    """Asserts that a call with a method gives the same on the CPU and, by the model `moved`, on the device."""
    with attach(plain, method, tokens) as attached:
        expected, became = call(plain, inputs), kept(attached)
    with Standin(), attach(moved, method, tokens) as attached:
        found, device = counted(moved, inputs, call)
        assert kept(attached) == became, f"{method}: other tokens"
    assert torch.allclose(expected.double(), found.double(), rtol=1e-5, atol=1e-5), f"{method}: another answer"
    return device


def kept(attached: Any) -> list[Any]:
    """What became of every picture, in numbers of the CPU."""
    return [
        (outcome.row, outcome.before, outcome.after, [back(one.source).tolist() for _, one in outcome.reductions])
        for outcome in attached.outcomes
    ]


def added(plain: Any, moved: Any, inputs: dict[str, Any], budgets: dict[str, int], call: Call = answer) -> Most:
    """The most that any of these methods costs beside the same call without one; all answer as on the CPU."""
    _, without = counted(moved, inputs, call)
    waits, copies, between = [], [0], [0]
    for method, tokens in budgets.items():
        try:
            device = compared(plain, moved, inputs, method, tokens, call)
        except OptionError:
            continue  # refused, see the matrix
        waits.append(device.waits - without.waits)
        (between if METHODS[method].place is Place.DECODER else copies).append(device.copies - without.copies)
    return Most(max(waits), max(copies), max(between))


def of_transformers(name: str) -> Most:
    case = CASES[name]
    a, b, c, d = (case.picture(number) for number in range(4))
    inputs = prompts([1, 5, a, 6, 7, 8], [1, b, 9, c, 11, 12], [1, 21, 22, 23, 24], [1, 5, 6, 7, d, 31])
    small = {name for name, method in METHODS.items() if method.place is Place.PICTURE}
    budgets = {method: case.square if method in small else case.tokens for method in PLACES}
    return added(case.build(), onto(case.build()), inputs, budgets)


@current
@pytest.mark.parametrize("name", [name for name in MOST if name != "official"])
def test_methods_answer_as_on_the_cpu_and_waits_as_often_as_it_may(name: str) -> None:
    found = apart(of_transformers, name)
    assert all(one <= most for one, most in zip(found, MOST[name], strict=True)), found


def of_official_llava(tower: Path) -> Most:
    """The same for official LLaVA, whose own assembly reads every id."""
    ids, mask = batch(row(5, 6), [1, 5, 6, 7], row(5, images=2), left=True)
    inputs = {"ids": ids, "mask": mask, "images": noise(4, 3, IMAGE, IMAGE, seed=0)}

    def say(model: Any, inputs: dict[str, Any]) -> Any:
        given = {"attention_mask": inputs["mask"], "images": inputs["images"]}
        return model.generate(inputs["ids"], **given, max_new_tokens=2, do_sample=False)

    sides = {"tokenizer_padding_side": "left"}
    return added(tiny_llava(tower, **sides), onto(tiny_llava(tower, **sides)), inputs, dict.fromkeys(PLACES, 4), say)


def test_official_llava_answers_as_on_the_cpu(tower_folder: Path) -> None:
    found = apart(of_official_llava, tower_folder)
    assert all(one <= most for one, most in zip(found, MOST["official"], strict=True)), found
