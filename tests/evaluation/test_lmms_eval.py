"""The real lmms-eval asks our hosts: its own command, killed and resumed, gives the answers of our harness."""

import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from llava_consensus import cli
from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation import benchmarks, models
from llava_consensus.evaluation.runs.configuration import RunConfig
from llava_consensus.evaluation.runs.execution import Execution
from llava_consensus.evaluation.runs.loop import run
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lmms_eval") is None, reason="lmms-eval is not installed")
MINI, QUESTIONS = "checkpoints/llava-mini", 32


@pytest.fixture(scope="module")
def model() -> Any:
    """The embedded model as lmms-eval makes it, two questions together."""
    return made(f"pretrained={MINI},method=visionzip,tokens=64", batch_size=2)


def made(arguments: str, **more: Any) -> Any:
    from lmms_eval.models import get_model

    return get_model("consensusdrop").create_from_arg_string(arguments, more)


def lmms_model() -> Any:
    return importlib.import_module("llava_consensus.evaluation.lmms_eval.model")


def request(text: str, *, number: int = 0, content: list[Any] | None = None, **generation: Any) -> Any:
    """A request of a chat task, as lmms-eval makes it."""
    own = [{"type": "image", "url": Image.new("RGB", (40, 30), (number, 90, 20))}, {"type": "text", "text": text}]
    turns = [{"role": "user", "content": content or own}]
    generation = {"max_new_tokens": 4, "do_sample": False, **generation}
    return SimpleNamespace(args=("", lambda document: turns, generation, number, "task", "test"), task_name="task")


def asked(model: Any, *requests: Any) -> Any:
    model.task_dict = {"task": {"test": [None] * 9}}
    return model.generate_until(list(requests))


def command(folder: Path, model: str, method: str) -> dict[str, Any]:
    """What `subprocess` runs for lmms-eval's own command, and where."""
    arguments = f"pretrained={model},method={method},tokens=64"
    task = ["--include_path", "playground/mini/lmms_eval", "--tasks", "mini_gqa", "--limit", str(QUESTIONS)]
    outputs = ["--log_samples", "--output_path", str(folder / "out"), "--use_cache", str(folder / "cache")]
    options = ["--model", "consensusdrop", "--model_args", arguments, "--batch_size", "2"]
    more = {"LMMS_CACHE_RUN_ID": "tried", "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return {"args": [sys.executable, "-m", "lmms_eval", *options, *task, *outputs], "env": os.environ | more}


def evaluated(folder: Path, model: str, method: str) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    """What lmms-eval's command printed, its results and its logged samples in the order of the questions."""
    done = subprocess.run(**command(folder, model, method), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (results,) = (folder / "out").rglob("*_results.json")
    (samples,) = (folder / "out").rglob("*_samples_mini_gqa.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    return done.stdout + done.stderr, json.loads(results.read_text()), sorted(lines, key=lambda line: line["doc_id"])


def killed(folder: Path, model: str, method: str, after: int) -> int:
    """Kills the command when it has stored some answers; how many it had."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(**command(folder, model, method), **quiet) as process:
        while process.poll() is None and stored(folder) < after:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, "it ended by itself"
    return stored(folder)


def stored(folder: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in (folder / "cache").rglob("*.audit.jsonl"))


def check_answers_are_ours(folder: Path, model: str, method: str, results: Any, samples: list[dict[str, Any]]) -> None:
    config = RunConfig(benchmarks.make("gqa"), make(method), Budget(64), model=model, limit=QUESTIONS)
    result = run(config, folder, Execution(progress=False))
    answers = (result.path / "answers.jsonl").read_text().splitlines()
    assert [sample["filtered_resps"] for sample in samples] == [json.loads(line)["text"] for line in answers]
    assert 100 * results["results"]["mini_gqa"]["accuracy,none"] == pytest.approx(result.metrics["score"])


@pytest.mark.slow
def test_a_killed_evaluation_goes_on_and_asks_nothing_twice(tmp_path: Path) -> None:
    answered = killed(tmp_path, MINI, "visionzip", after=5)
    assert 5 <= answered < QUESTIONS
    printed, results, samples = evaluated(tmp_path, MINI, "visionzip")
    found = re.search(r"stats: (\d+) hits.* (\d+) misses", printed)
    assert found and [int(count) for count in found.groups()] == [answered, QUESTIONS - answered]
    check_answers_are_ours(tmp_path / "ours", MINI, "visionzip", results, samples)
    assert [sample["token_counts"] for sample in samples[:answered]] == [[None]] * answered, "its cache holds texts"
    assert {sample["token_counts"][0]["visual_after"] for sample in samples[answered:]} == {64}


@pytest.mark.slow
def test_another_method_on_a_host_of_transformers(tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "llava-mini-hf")
    assert cli.main(["model", "convert", MINI, checkpoint]) == 0
    _, results, samples = evaluated(tmp_path, checkpoint, "fastv")
    check_answers_are_ours(tmp_path / "ours", checkpoint, "fastv", results, samples)
    counted = samples[0]["token_counts"][0]
    assert (counted["visual_before"], counted["visual_after"]) == (576, 64)


@pytest.mark.parametrize(
    "arguments, more, error, words",
    [
        ("method=visionzip", {}, OptionError, "pretrained: no model"),
        (f"pretrained={MINI},method=vision_zip", {}, OptionError, "Did you mean 'visionzip'"),
        (f"pretrained={MINI},tokens=0", {}, OptionError, "tokens=0 must be at least 1"),
        (f"pretrained={MINI},conversation=nobody", {}, OptionError, "nobody"),
        (f"pretrained={MINI},host_newlines=no", {}, OptionError, "host option newlines=no"),
        (f"pretrained={MINI}", {"batch_size": "auto"}, OptionError, "batch_size='auto'"),
        ("pretrained=checkpoints/absent", {}, (DataError, OptionError), "checkpoints/absent"),
    ],
)
def test_bad_arguments_are_refused_before_weights_load(
    arguments: str, more: dict[str, Any], error: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "load", lambda *given: pytest.fail("weights were loaded"))
    with pytest.raises(error, match=re.escape(words)):
        made(arguments, **more)


def test_answers_come_one_by_one_in_the_order_of_the_requests(model: Any) -> None:
    lengths = [4, 4, 4, 2, 2, 4]
    requests = [request(f"Question {n}?", number=n, max_new_tokens=length) for n, length in enumerate(lengths)]
    assert [len(batch) for batch in lmms_model().batches(requests, 2)] == [2, 1, 2, 1]
    answers = asked(model, *requests)
    assert iter(answers) is answers, "a list would be stored by its cache only at the end"
    together = [answer.text for answer in answers]
    assert together == [asked(model, one)[0].text for one in requests]


def test_the_model_is_let_go_when_everything_is_answered() -> None:
    model = made(f"pretrained={MINI},method=random")
    llava, generate = model.runner.model, type(model.runner.model).generate
    model.clean()
    assert not hasattr(model, "runner") and llava.generate.__func__ is generate, "the method is detached"


def test_a_question_without_a_picture_and_an_end_of_answers(model: Any) -> None:
    (answer,) = asked(model, request("", content=[{"type": "text", "text": "What is two plus two?"}]))
    assert answer.token_counts.to_dict()["visual_after"] == 0
    *_, until = lmms_model().read(request("Which?", until=["\n\n", "."]), {"task": {"test": [None]}}, None)
    assert lmms_model().cut("a cat. It sleeps\n\nbye", until) == "a cat"


@pytest.mark.parametrize(
    "one, words",
    [
        (request("Why?", do_sample=True), "must be greedy"),
        (request("Why?", do_sample=False, num_beams=3), "must be greedy"),
        (request("", content=[{"type": "video", "url": "clip.mp4"}, {"type": "text", "text": "?"}]), "video, text"),
        (request("", content=[{"type": "text", "text": "?"}, {"type": "image", "url": "a.png"}]), "text, image"),
    ],
)
def test_what_a_host_cannot_be_asked_is_refused(model: Any, one: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        asked(model, one)
