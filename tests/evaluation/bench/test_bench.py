"""Measurements side by side: what the clock counts, turns, resuming, memory, operations and the command."""

import csv
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fakes import FakeHost
from hf_models import SQUARE, TEXT
from PIL import Image

from llava_consensus import cli, load, make
from llava_consensus.cli.arguments import one_word_method
from llava_consensus.errors import DataError
from llava_consensus.evaluation.bench import efficiency, timing
from llava_consensus.evaluation.bench.efficiency import UNKNOWN_TOWER, cases_of, measure, prompt_shape
from llava_consensus.evaluation.bench.timing import Timing, answer_once, in_rounds, peak_bytes, reset_peak
from llava_consensus.evaluation.models import Loading, Prompt, Runner
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.costs import SHAPES, account

MINI = str(Path(__file__).parents[3] / "checkpoints" / "llava-mini")
VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
PICTURE = Image.new("RGB", (192, 192), (7, 0, 0))
PROMPT = Prompt("Is there a dog?")
FULL, RANDOM, OURS = ((make(name), Budget(64)) for name in ("full", "random", "consensusdrop"))
hf = pytest.mark.skipif(VERSION < (5, 19), reason="models of transformers need >= 5.19")


@pytest.fixture(scope="module")
def mini() -> Runner:
    return load(MINI, Loading("cpu"))


class WorkClock:
    """A millisecond passes for each row that a decoder layer or a vision block reads, a microsecond with each look."""

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


def test_a_sample_counts_the_tower_the_prompt_and_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    host = load(MINI, Loading("cpu"))
    clock = WorkClock(host)
    monkeypatch.setattr(time, "perf_counter", clock)
    found = answer_once(host, PICTURE, Prompt("Is there a dog?", max_new_tokens=4), OURS)
    shape = prompt_shape(host, PROMPT, PICTURE)
    assert shape.available == 576 and found.kv_bytes == account(*OURS, shape).kv_bytes
    tower, prefill = len(clock.blocks) * (shape.patches + shape.classes), len(clock.layers) * (shape.text + 64)
    slack = 1e-3 * clock.looks
    assert tower < found.tower_ms < tower + slack and prefill - slack < found.prefill_ms < prefill + slack
    assert found.ttft_ms == pytest.approx(found.tower_ms + found.reduction_ms + found.prefill_ms)
    assert found.tpot_ms == pytest.approx(len(clock.layers), abs=slack)
    assert found.generation_ms == pytest.approx(found.ttft_ms + 3 * len(clock.layers), abs=slack)
    assert 0 < found.reduction_ms < slack < 1, "no layer is run for the reduction"


def test_items_take_turns_in_every_round_and_what_was_measured_is_left_out() -> None:
    taken: list[str] = []
    found = list(in_rounds(["a", "b"], 2, 1, {(0, 0), (0, 1), (1, 0)}, taken.append))
    assert taken == ["a", "b", "b"] and [one[:2] for one in found] == [(1, 1)]
    assert not list(in_rounds(["a"], 1, 1, {(0, 0)}, taken.append)) and len(taken) == 3


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


class Rounds:
    """In place of measurements: the n-th round takes 100 n ms, with a reduction half of it; one round may fail."""

    def __init__(self, fails: int = 0) -> None:
        self.calls, self.fails = 0, fails

    def __call__(self, host: Any, picture: Any, prompt: Any, setting: Any) -> Timing:
        number, place = 1 + self.calls // 2, self.calls % 2
        self.calls += 1
        if number == self.fails:
            raise KeyboardInterrupt
        ttft = 100.0 * number / (1 + place)
        return Timing(ttft, 2.0, ttft + 10, ttft / 4, {"gather": ttft / 8, "method": ttft / 8}, 99, number)


def measured(file: Path, repeats: int = 3, **description: Any) -> dict[str, Any]:
    host = FakeHost()
    shape = prompt_shape(host, PROMPT, PICTURE)
    cases, left_out = cases_of(host, ["random"], [Budget(144)], shape, "kept")
    assert left_out == []
    return measure(host, [PICTURE], PROMPT, shape, cases, description, file, repeats)


def test_a_stopped_measurement_keeps_its_rounds_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "deep" / "bench.json"
    monkeypatch.setattr(efficiency, "answer_once", Rounds(fails=3))
    with pytest.raises(KeyboardInterrupt):
        measured(file, model="m")
    assert [one["ttft_ms"] for one in json.loads(file.read_text())["rows"][0]["samples"]] == [200.0]
    monkeypatch.setattr(efficiency, "answer_once", Rounds())
    found = measured(file, model="m")
    assert [one["ttft_ms"] for one in found["rows"][0]["samples"]] == [200.0, 200.0, 300.0], "each call warms up"
    assert len(found["load_average"]) == 3
    monkeypatch.setattr(efficiency, "answer_once", Rounds(fails=1))
    assert measured(file, model="m") == found, "a whole measurement is read, not taken again"
    with pytest.raises(DataError, match=r"another measurement \(model\)"):
        measured(file, model="other")


def test_a_row_has_medians_spread_and_the_paper_s_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficiency, "answer_once", Rounds())
    monkeypatch.setattr(FakeHost, "shape", lambda self, text=0: SHAPES["llava-1.5-7b"]._replace(text=text))
    full, row = measured(tmp_path / "bench.json", model="m")["rows"]
    assert (full["method"], full["tokens"], full["speedup"]) == ("full", 576, 1.0)
    assert (row["method"], row["tokens"], row["reduction_percent"]) == ("random", 144, 75.0)
    assert (row["ttft_ms"], row["quartiles"]["ttft_ms"], row["speedup"]) == (150.0, [125.0, 175.0], 2.0)
    assert row["phases_ms"] == {"tower": 37.5, "reduction": 37.5, "prefill": 75.0} and row["share"] == 0.25
    assert (row["tpot_ms"], row["kv_bytes"], row["peak_bytes"]) == (2.0, 99, 4)
    assert row["paper"]["flops"] / 1e12 == pytest.approx(2.78, abs=0.01), "as its table prints for 144 tokens"
    assert row["paper"]["kv_bytes"] / 2**20 == 97


def test_the_tower_is_not_counted_where_tokens_vary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["llava-1.5-7b"]._replace(patches=128000)
    monkeypatch.setattr(efficiency, "answer_once", Rounds())
    monkeypatch.setattr(FakeHost, "shape", lambda self, text=0: shape._replace(text=text))
    _, row = measured(tmp_path / "bench.json")["rows"]
    assert row["account"]["flops"]["vision"] is None and row["account"]["flops"]["total"] is None
    assert row["account"]["flops"]["llm"] > 1e12 and row["account"]["note"] == UNKNOWN_TOWER


def test_what_a_model_cannot_have_is_left_out_with_the_reason(mini: Runner) -> None:
    names, shape = ["random", "sparsevlm:version=1.0", "full"], prompt_shape(mini, PROMPT, PICTURE)
    cases, left_out = cases_of(mini, names, [Budget(64), Budget(65)], shape, "kept", one_word_method)
    assert [row.title for row in cases] == ["full", "random", "SparseVLM, version=1.0", "random"]
    assert [row.tokens for row in cases] == [576, 64, 64, 65]
    assert [(one["method"], one["tokens"]) for one in left_out] == [("sparsevlm:version=1.0", 65)]
    assert "scale" in left_out[0]["reason"]


@pytest.fixture
def tiny_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that is allocated in no time, called `tiny`."""
    from llava_consensus.evaluation.models import random_weights
    from llava_consensus.evaluation.models.random_weights import SIZES, Size

    def processor() -> Any:
        pixels = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
        found = SIZES["llava-1.5-7b"].processor()
        found.image_processor = transformers.CLIPImageProcessor(**pixels)
        return found

    vision = {"model_type": "clip_vision_model", **SQUARE}
    tiny = Size("Llava", vision, {"model_type": "llama", **TEXT, "vocab_size": 32000}, processor, 16)
    monkeypatch.setattr(random_weights, "SIZES", {**SIZES, "tiny": tiny})


@hf
def test_random_weights_are_planned_before_they_are_allocated(tiny_size: None) -> None:
    from llava_consensus.evaluation.models.random_weights import AFTER, BEFORE, plan

    planned = plan("tiny", Loading("cpu", "bfloat16"))
    assert {weight.device.type for weight in planned.model.parameters()} == {"meta"}
    host, again = planned.runner(), plan("tiny", Loading("cpu", "bfloat16")).runner()
    weights = dict(host.model.named_parameters())
    assert sum(weight.nbytes for weight in weights.values()) == planned.weight_bytes
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert all(torch.equal(weight, weights[name]) for name, weight in again.model.named_parameters())
    assert host.rows(PROMPT) == (BEFORE + AFTER, AFTER)
    found = answer_once(host, PICTURE, Prompt("any", max_new_tokens=5), (make("random"), Budget(4)))
    shape = prompt_shape(host, PROMPT, PICTURE)
    assert found.tpot_ms is not None and shape.available == 16
    assert found.kv_bytes == account(make("random"), Budget(4), shape).kv_bytes
    assert planned.cache_bytes == account(make("full"), Budget(16), shape).kv_bytes


@hf
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llava-1.5-0.1b", 0.122),
        ("llava-1.5-1b", 1.41),
        ("llava-1.5-7b", 7.06),
        ("llava-1.5-13b", 13.35),
        ("llava-next-7b", 7.06),
        ("qwen2.5-vl-7b", 8.29),
    ],
)
def test_sizes_have_the_published_numbers_of_weights(name: str, billions: float) -> None:
    from llava_consensus.evaluation.models.random_weights import plan

    assert plan(name, Loading("cpu", "float16")).weight_bytes / 2e9 == pytest.approx(billions, rel=0.005)


@hf
def test_a_size_that_does_not_fit_is_refused_before_it_is_allocated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from llava_consensus.evaluation.models.random_weights import RandomModel

    monkeypatch.setattr(timing, "_bytes_in", lambda *_: 8 << 30)
    monkeypatch.setattr(RandomModel, "runner", lambda self: pytest.fail("allocated"))
    assert cli.main(["bench", "--shape", "llava-1.5-7b", "--device", "cpu", "--dtype", "float16"]) == 2
    error = capsys.readouterr().err
    assert "needs about 14.8 GiB (weights 13.2 GiB, cache 0.3 GiB), 8.0 GiB are free" in error


@hf
def test_the_command_prints_the_paper_beside_what_it_measured(
    tiny_size: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["bench", "--shape", "tiny", "--device", "cpu", "--methods", "consensusdrop random:seed=3"]
    command += ["--tokens", "8 4", "--repeats", "1", "--length", "2"]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert "| ConsensusDrop |" in shown and "| random, seed=3 |" in shown and "random weights, float32" in shown
    assert "another model than ours" in shown
    content = json.loads(Path("results/bench-tiny.json").read_text())
    assert [row["method"] for row in content["rows"]] == ["full", *["consensusdrop", "random:seed=3"] * 2]
    assert [row["tokens"] for row in content["rows"]] == [16, 8, 8, 4, 4]
    assert all(row["kv_bytes"] == row["account"]["kv_bytes"] and row["peak_bytes"] for row in content["rows"])
    assert cli.main([*command, "--format", "csv"]) == 0, "read again, not measured again"
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [line["ttft_ms"] for line in lines] == [str(row["ttft_ms"]) for row in content["rows"]]
    assert cli.main([*command, "--length", "3"]) == 3
