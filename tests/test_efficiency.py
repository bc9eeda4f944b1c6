"""Measurements side by side: sides take turns, the first round does not count, scripts end with JSON.

Run: `pytest tests/test_efficiency.py`.
"""

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeHost
from PIL import Image

from llava_consensus import METHODS, load, make
from llava_consensus.hosts import Prompt
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.costs import account
from llava_consensus.runs import timing
from llava_consensus.runs.timing import first_token, measure, peak_bytes, reset_peak

ROOT = Path(__file__).parents[1]
PICTURE = Image.new("RGB", (4, 4), (7, 0, 0))


class Spy(FakeHost):
    """Writes down what was asked with how many tokens and how long an answer."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[int, int, int]] = []

    def answer(self, encoded: Any, prompts: Any) -> Any:
        self.log.append((self.tokens, prompts[0].max_new_tokens, prompts[0].min_new_tokens))
        return super().answer(encoded, prompts)


def test_sides_take_turns_on_every_picture() -> None:
    host = Spy()
    sides = [(make("full"), Budget(1)), (make("random"), Budget(64)), (make("random"), Budget(8))]
    found = measure(host, [PICTURE, PICTURE], Prompt("what"), sides, repeats=2, length=5)
    turn = [(tokens, length, low) for tokens in (576, 64, 8) for length, low in ((1, 0), (5, 5))]
    assert host.log == turn * 2 * 3, "two pictures, one round that does not count and two that do"
    assert len(found) == 3 and all(one.first.total > 0 for one in found)


def test_the_first_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([9000.0, 9900.0, 100.0, 180.0, 300.0, 420.0, 200.0, 300.0])
    host, real = FakeHost(), timing._timed
    monkeypatch.setattr(timing, "_timed", lambda *given: (next(times), real(*given)[1]))
    (found,) = measure(host, [PICTURE], Prompt("what"), [(make("random"), Budget(64))], repeats=3, length=11)
    assert (found.first.total, found.token_ms, found.own_ms) == (200.0, 10.0, 0.0)


def test_first_tokens_are_timed_in_turns() -> None:
    host = Spy()
    sides = [(make("full"), Budget(1)), (make("random"), Budget(64))]
    assert len(first_token(host, [PICTURE], Prompt("what"), sides, repeats=1)) == 2
    assert host.log == [(576, 1, 0), (64, 1, 0)] * 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_peak_memory_falls_when_it_is_reset() -> None:
    reset_peak()
    before = peak_bytes()
    block = bytearray(64 << 20)
    high = peak_bytes()
    del block
    reset_peak()
    after = peak_bytes()
    assert before is not None and high is not None and after is not None
    assert high - before > 48 << 20 and high - after > 48 << 20


class WorkClock:
    """In place of the system's clock: a millisecond passes for each row that a decoder layer or a vision block reads,
    and a microsecond with each look at the clock. So what is measured does not depend on how busy the machine is.
    """

    def __init__(self, host: Any) -> None:
        self.now, self.looks = 0.0, 0
        tower = host.model.get_vision_tower().vision_tower
        self.layers = host.model.get_model().layers
        self.blocks = next(part for name, part in tower.named_modules() if name.endswith("encoder.layers"))
        parts = (*self.layers, *self.blocks)
        self.hooks = [part.register_forward_pre_hook(self.read, with_kwargs=True) for part in parts]

    def read(self, part: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.now += 1e-3 * (given[0] if given else named["hidden_states"]).shape[1]

    def __call__(self) -> float:
        self.looks += 1
        self.now += 1e-6
        return self.now


def test_a_measurement_counts_the_tower_the_prompt_and_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is the formula's; the first token has the time of all rows that are read before it, a later token that
    of one row, and the reduction a share of its own.
    """
    host = load(str(ROOT / "checkpoints" / "llava-mini"), device="cpu")
    prompt, method, budget = Prompt("Is there a dog?"), make("consensusdrop"), Budget(64)
    clock = WorkClock(host)
    monkeypatch.setattr(time, "perf_counter", clock)
    (found,) = measure(host, [PICTURE.resize((192, 192))], prompt, [(method, budget)], repeats=1, length=3)
    text, question = host.rows(prompt)
    shape = host.shape(text)._replace(question=question)
    assert found.kv_bytes == account(method, budget, shape).kv_bytes
    read = len(clock.blocks) * (shape.patches + shape.classes) + len(clock.layers) * (text + budget.tokens)
    slack = 1e-3 * clock.looks
    assert read < found.first.total < read + slack
    assert abs(found.token_ms - len(clock.layers)) < slack
    assert 0 < found.own_ms < slack < 1, "no layer is run for the reduction"


def test_a_lower_bound_forces_a_long_answer() -> None:
    host = load(str(ROOT / "checkpoints" / "llava-mini"), device="cpu")
    with host.attach(make("consensusdrop"), Budget(64)):
        (answer,) = host.answer([host.encode([PICTURE])], [Prompt("Is it?", max_new_tokens=7, min_new_tokens=7)])
    assert len(host.tokenizer(answer.text).input_ids) > 3


@pytest.mark.parametrize("name", ["random", "consensusdrop"])
def test_a_method_s_own_work_is_timed_whether_or_not_it_has_stages(name: str) -> None:
    host = load(str(ROOT / "checkpoints" / "llava-mini"), device="cpu")
    with host.attach(make(name), Budget(64)) as attached:
        host.answer([host.encode([PICTURE])], [Prompt("Is it?", max_new_tokens=1)])
        spent = attached.milliseconds()
    assert ("method" in spent) != ("scap" in spent) and {"probe", "gather", "splice"} < spent.keys()


def script(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """The JSON a script ends with."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(ROOT / "eval_scripts" / name), run_name="__main__")
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_account_script_agrees_with_the_model_and_the_paper(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = script("account.py", monkeypatch, capsys, "--device", "cpu")
    assert {row["method"] for row in found["model"]["rows"]} == set(METHODS)
    assert all(row["measured"]["equal"] for row in found["model"]["rows"])
    assert {row["tokens"] for row in found["llava-next-7b"]} == {2880, 640, 320, 160}
    cells = {(one["table"], one["column"], one["method"], one["tokens"]): one for one in found["paper"]}
    assert len(found["paper"]) == len(cells) == 105
    assert cells["llava_1_5_7b", "kv_mb", "ConsensusDrop", 128]["verdict"] == "matches to rounding"
    assert cells["efficiency_llava_1_5_7b", "flops_t", "VisionZip", 432]["verdict"] == "matches within 0.01 T"
    assert "vision tower" in cells["efficiency_llava_1_5_13b", "flops_t", "VisPruner", 144]["verdict"]
    assert cells["llava_1_5_7b", "kv_mb", "FastV", 192]["verdict"].startswith("cannot: no one rule")


def test_the_bench_script_writes_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    PICTURE.resize((192, 192)).save(tmp_path / "one.jpg")
    file = tmp_path / "deep" / "bench.json"
    arguments = ["--images", str(tmp_path), "--methods", "random", "--repeats", "1", "--length", "2", "--device", "cpu"]
    found = script("bench.py", monkeypatch, capsys, *arguments, "--out", str(file))
    assert json.loads(file.read_text()) == found
    assert [(row["method"], row["tokens"]) for row in found["rows"]] == [("full", 576), ("random", 64)]
    for row in found["rows"]:
        assert {"ttft_ms", "tpot_ms", "own_ms", "share", "kv_bytes", "peak_bytes", "account"} <= row.keys()
        assert row["kv_bytes"] == row["account"]["kv_bytes"] and row["ttft_ms"] > 0
