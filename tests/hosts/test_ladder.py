"""Some of the ladder (`tests/ladder.py`): no third state, the page says what comes out, and faults show."""

import dataclasses
from typing import Any

import hf_models
import ladder
import pytest
import transformers
from transformers.cache_utils import DynamicCache

from llava_consensus.hosts.caches import Shortened

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (5, 19), reason="methods on models of transformers need >= 5.19")
SLICE = {
    "llava": ("consensusdrop+", "sparsevlm", "prumerge", "cdpruner"),
    "llava_next": ("visionzip", "pyramiddrop", "consensusdrop+", "random"),
    "qwen3_vl": ("consensusdrop", "visionzip", "cdpruner", "fastv", "tome"),
    "gemma3": ("consensusdrop+", "prumerge", "fastv", "tome"),
    "official LLaVA": ("consensusdrop", "consensusdrop+", "dart"),
}
COMPILED = ("llava", "consensusdrop+")


@pytest.mark.parametrize("name", SLICE)
def test_no_third_state_and_the_page_agrees(name: str) -> None:
    family, said = ladder.Family(ladder.FAMILIES[name]), ladder.read(ladder.PAGE.read_text())
    for method in SLICE[name]:
        states = ladder.climbed(family, method, ladder.RUNGS if (name, method) == COMPILED else ladder.QUICK)
        assert [one for one in states.values() if one.startswith("third")] == []
        assert said[name, method] == ladder.told(states, str)


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


def test_the_page_holds_every_cell_and_no_third_state() -> None:
    text = ladder.PAGE.read_text()
    assert set(ladder.read(text)) == {(name, method) for name in ladder.FAMILIES for method in ladder.METHODS}
    assert text.count(", 0 are a third state.") == 2 and "third:" not in text


def test_a_position_that_is_wrong_is_a_third_state(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Shortened.own
    monkeypatch.setattr(Shortened, "own", lambda *given: own(*given) + 1)
    family = ladder.Family(ladder.FAMILIES["llava"])
    states = ladder.climbed(family, "consensusdrop+", ["own loop", "no cache"])
    assert states == {"own loop": "third: AssertionError: logits", "no cache": "works"}
