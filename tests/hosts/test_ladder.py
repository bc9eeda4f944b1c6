"""Some of the ladder (`tests/ladder.py`): no third state, the page says what comes out, and faults show."""

import ladder
import pytest
import transformers

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


def test_other_configurations() -> None:
    for name, method, states in ladder.at_random(7, 2):
        assert [one for one in states.values() if one.startswith("third")] == [], (name, method)


def test_the_page_holds_every_cell_and_no_third_state() -> None:
    text = ladder.PAGE.read_text()
    families, methods = (set(those) - set(ladder.LATER) for those in (ladder.FAMILIES, ladder.METHODS))
    assert set(ladder.read(text)) == {(name, method) for name in families for method in methods}
    assert all(f"`{name}`" in text for name in ladder.LATER)
    assert text.count(", 0 are a third state.") == 2 and "third:" not in text


def test_a_position_that_is_wrong_is_a_third_state(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Shortened.own
    monkeypatch.setattr(Shortened, "own", lambda *given: own(*given) + 1)
    family = ladder.Family(ladder.FAMILIES["llava"])
    states = ladder.climbed(family, "consensusdrop+", ["own loop", "no cache"])
    assert states == {"own loop": "third: AssertionError: logits", "no cache": "works"}
