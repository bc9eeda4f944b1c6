"""Hosts and methods on a second device (`second_device`): the answers of the CPU, and how often it waits."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from hf_models import CASES, noise, prompts
from models import IMAGE, runnable, tiny_llava
from prompts import batch, row
from second_device import Standin, apart, back, onto, there

from llava_consensus import attach
from llava_consensus.errors import OptionError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.benchmarks import make as benchmark
from llava_consensus.evaluation.files import ANSWERS, read_answers
from llava_consensus.evaluation.runs import loop
from llava_consensus.evaluation.runs.configuration import RunConfig
from llava_consensus.evaluation.runs.execution import Execution
from llava_consensus.methods import METHODS, make
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Place
from playground.mini.paths import MINI

CURRENT = int(transformers.__version__.split(".")[0]) >= 5
current = pytest.mark.skipif(not CURRENT, reason="methods on models of transformers need >= 5.19")
PLACES = ("consensusdrop+", "prumerge", "downsample", "fastv", "sparsevlm")
EMBEDDED = Path(__file__).parents[2] / "checkpoints" / "llava-mini"
Call = Callable[[Any, dict[str, Any]], Any]  # of a model with inputs


class Most(NamedTuple):
    """What any method may cost a batch of four prompts and three pictures, beside the same call without a method."""

    waits: int  # reads of a number
    copies: int  # to the device, by methods that act before the language model
    between: int  # the same, by those that cut between its layers


MOST = {
    "llava": Most(1, 20, 45),
    "llava_next": Most(2, 36, 69),
    "qwen2_5_vl": Most(2, 57, 93),
    "qwen3_vl video": Most(2, 67, 93),
    "internvl": Most(1, 39, 93),
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
    methods = METHODS if name == "llava" else PLACES
    budgets = {method: case.square if method in small else case.tokens for method in methods}
    return added(case.build(), onto(case.build()), inputs, budgets)


@current
@pytest.mark.parametrize("name", [name for name in MOST if name != "official"])
def test_methods_answer_as_on_the_cpu_and_waits_as_often_as_it_may(name: str) -> None:
    found = apart(of_transformers, name)
    assert all(one <= most for one, most in zip(found, MOST[name], strict=True)), found


def stepping(model: Any, inputs: dict[str, Any]) -> Any:
    """A loop of one's own: logits of a prompt and of two steps after it."""
    cache, logits = None, []
    given = {**inputs, "use_cache": True}
    with torch.no_grad():
        for _ in range(3):
            output = model(**given, past_key_values=cache)
            cache = output.past_key_values
            logits.append(output.logits[:, -1])
            given = {"input_ids": logits[-1].argmax(-1, keepdim=True), "use_cache": True}
    return torch.stack(logits)


def kept_positions(name: str) -> None:
    case = CASES[name]
    plain, moved = case.build(), onto(case.build())
    inputs = prompts([1, 5, case.picture(0), 6, 7, 8])
    for method in ("consensusdrop+", "fastv"):
        compared(plain, moved, inputs, method, case.tokens, stepping)


@current
@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
def test_a_loop_of_ones_own_has_the_positions_of_the_cpu(name: str) -> None:
    apart(kept_positions, name)


def of_official_llava(tower: Path) -> Most:
    """The same for official LLaVA, whose own assembly reads every id."""
    ids, mask = batch(row(5, 6), [1, 5, 6, 7], row(5, images=2), left=True)
    inputs = {"ids": ids, "mask": mask, "images": noise(4, 3, IMAGE, IMAGE, seed=0)}

    def say(model: Any, inputs: dict[str, Any]) -> Any:
        given = {"attention_mask": inputs["mask"], "images": inputs["images"]}
        return model.generate(inputs["ids"], **given, max_new_tokens=2, do_sample=False)

    sides = {"tokenizer_padding_side": "left"}
    return added(
        tiny_llava(tower, **sides), onto(tiny_llava(tower, **sides)), inputs, dict.fromkeys(runnable(), 4), say
    )


def test_official_llava_answers_as_on_the_cpu(tower_folder: Path) -> None:
    found = apart(of_official_llava, tower_folder)
    assert all(one <= most for one, most in zip(found, MOST["official"], strict=True)), found


def trained(name: str) -> None:
    """One step of training, of all weights."""
    case = CASES[name]
    plain, moved = case.build().train(), onto(case.build().train())
    inputs = prompts([1, 5, case.picture(0), 6, 7, 8])
    inputs["labels"] = inputs["input_ids"].where(torch.arange(inputs["input_ids"].shape[1]) > 17, -100)

    def step(model: Any, given: dict[str, Any]) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(**given).loss
        loss.backward()
        optimizer.step()
        return torch.cat([loss.detach()[None], *(weight.detach().flatten()[:9] for weight in model.parameters())])

    for method in ("consensusdrop", "fastv"):
        compared(plain, moved, inputs, method, case.tokens, step)


@current
def test_a_step_of_training_gives_the_weights_of_the_cpu() -> None:
    apart(trained, "llava", start="spawn")


def evaluated(out: Path, device: bool) -> list[str]:
    """Answers of one evaluation of the embedded model."""
    config = RunConfig(
        benchmark("gqa"), make("consensusdrop"), Budget(16), model=str(EMBEDDED), data=MINI, limit=6,
        loading=models.Loading("cpu"),
    )  # fmt: skip
    host = models.load(config.model, config.loading)
    if device:
        onto(host.model)
    with Standin() if device else nullcontext():
        result = loop.run(config, out, Execution(3, progress=False), lambda *_: host)
    return [line["text"] for line in read_answers(result.path / ANSWERS)]


def test_an_evaluation_has_the_answers_of_the_cpu(tmp_path: Path) -> None:
    expected = apart(evaluated, tmp_path / "plain", False)
    assert apart(evaluated, tmp_path / "moved", True) == expected and len(set(expected)) > 1
