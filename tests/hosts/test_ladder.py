"""A part of the ladder (`tests/ladder.py`), of which `make ladder` climbs the whole; and faults show."""

import dataclasses
from typing import Any

import hf_models
import ladder
import pytest
import transformers
from transformers.cache_utils import DynamicCache

from llava_consensus.hosts.caches import Shortened
from llava_consensus.reduction.method import Place

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (5, 19), reason="methods on models of transformers need >= 5.19")
MECHANISMS = ("official LLaVA", "llava", "llava_next", "qwen2_5_vl", "gemma3", "internvl")
PLACES = ("consensusdrop", "consensusdrop+", "prumerge", "fastv", "sparsevlm", "tome", "resize")
FOLD = ("official LLaVA", "llava", "llava_next")  # whose patches may merge inside the tower


def expected(name: str, method: str, rung: str) -> str:
    """State of a rung in one word."""
    if method == "tome" and name not in FOLD:
        return "refused"
    if rung == "masking" and method in ladder.MAKE_ROWS:
        return "undefined"
    if rung == "static" and ladder.METHODS[method].place is Place.DECODER:
        return "refused"
    if rung == "assisted" and name == "official LLaVA":
        return "refused"
    return "plain" if rung == "quantized" and name == "gemma3" else "works"


@pytest.mark.parametrize("name", MECHANISMS)
def test_each_mechanism_with_a_method_for_each_place(name: str) -> None:
    """Plain rows, tiles, three position axes with windows, two-way attention and shuffled patches; before, inside and
    after the tower, and between decoder layers.
    """
    family = ladder.Family(ladder.FAMILIES[name])
    for method in PLACES:
        rungs = ladder.RUNGS if (name, method) == ("llava", "consensusdrop+") else ladder.QUICK
        for rung, state in ladder.climbed(family, method, rungs).items():
            assert state.split(":")[0] == expected(name, method, rung), (method, rung, state)


@pytest.mark.parametrize("name", [name for name in ladder.FAMILIES if name not in MECHANISMS])
def test_every_family_answers_a_mixed_batch(name: str) -> None:
    family = ladder.Family(ladder.FAMILIES[name])
    for method in ("consensusdrop+", "fastv"):
        states = ladder.climbed(family, method, ["keep-all", "rows and positions", "mixed batch"])
        assert set(states.values()) == {"works"}, method


@pytest.mark.parametrize("name", ["official LLaVA", "llava", "qwen3_vl", "gemma3", "glm4v"])
def test_calibrated_attention_of_a_prompt_cut_before_the_first_layer(name: str) -> None:
    family, refused = ladder.Family(ladder.FAMILIES[name]), ("second turn", "static")
    rungs = ("keep-all", "rows and positions", "own loop", "mixed batch", "no cache", *refused)
    for rung, state in ladder.climbed(family, "restore_calibrated", rungs).items():
        assert state.split(":")[0] == ("refused" if rung in refused else "works"), (rung, state)


def narrow(name: str, window: int) -> ladder.Family:
    """A family whose language model has windows of so many rows."""
    case = ladder.FAMILIES[name]

    def build() -> Any:
        config = case.build().config
        if name == "llava":  # all of whose layers are alike
            config.text_config = transformers.MistralConfig(**hf_models.TEXT, head_dim=16)
        config.text_config.sliding_window = window
        return hf_models.ready(type(case.build()), config)

    return ladder.Family(dataclasses.replace(case, build=build))


@pytest.mark.parametrize(("name", "window"), [("llava", 8), ("gemma3", 8), ("gemma3", 14), ("cohere2_vision", 20)])
def test_windows_narrower_than_the_prompt_or_than_what_is_left_of_it(name: str, window: int) -> None:
    family = narrow(name, window)
    rungs = ["rows and positions", "own loop", "mixed batch", "second turn", "no cache", "beams", "assisted"]
    for method in ("fastv", "sparsevlm"):
        assert set(ladder.climbed(family, method, rungs).values()) == {"works"}
    trial = ladder.Trial(family, "fastv")
    ladder.decoding(trial, past_key_values=DynamicCache())  # which holds every row, whatever a layer sees


def test_other_configurations() -> None:
    for name, method, states in ladder.at_random(7, 2):
        assert [one for one in states.values() if one.startswith("third")] == [], (name, method)


def test_a_position_that_is_wrong_is_a_third_state(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Shortened.own
    monkeypatch.setattr(Shortened, "own", lambda *given: own(*given) + 1)
    family = ladder.Family(ladder.FAMILIES["llava"])
    states = ladder.climbed(family, "consensusdrop+", ["own loop", "no cache"])
    assert states == {"own loop": "third: AssertionError: logits", "no cache": "works"}
