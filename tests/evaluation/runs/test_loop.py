"""The evaluation loop against a host without weights: resume, SIGKILL, bad images, bad arguments."""

import errno
import json
import logging
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fakes import FakeHost, config, make_place

from llava_consensus.errors import DataError, Interrupted, OptionError
from llava_consensus.evaluation.files import read_lines
from llava_consensus.evaluation.media import open_image
from llava_consensus.evaluation.runs import loop
from llava_consensus.evaluation.runs.configuration import prepare
from llava_consensus.evaluation.runs.execution import Execution
from llava_consensus.evaluation.runs.images import EncodingCache
from llava_consensus.evaluation.runs.loop import RunResult
from llava_consensus.evaluation.runs.store import run_name
from llava_consensus.evaluation.user_files import read_answers

FORK = multiprocessing.get_context("fork")  # a child that has imported everything dies in the loop, not in its imports


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_place(tmp_path / "data")


def go(data: Path, out: Path, host: FakeHost | None = None, batch: int = 3, **changes: Any) -> RunResult:
    loader = lambda *_: host or FakeHost()  # noqa: E731
    return loop.run(config(data, data / "model", **changes), out, Execution(batch, progress=False), loader)


NO_LOAD = Mock(side_effect=AssertionError("weights were loaded"))


def steady(metrics: dict[str, Any]) -> dict[str, Any]:
    """What must be the same in every run of one configuration."""
    return {key: value for key, value in metrics.items() if key not in ("timing", "environment")}


def texts(result: RunResult) -> list[tuple[int, str, str]]:
    lines = read_answers(result.path / "answers.jsonl")
    return [(one["metadata"]["index"], one["prompt"], one["text"]) for one in lines]


def test_a_run_encodes_each_picture_once_and_answers_in_the_order_of_the_file(data: Path, tmp_path: Path) -> None:
    host = FakeHost()
    result = go(data, tmp_path / "out", host)
    assert host.encoded == [0, 1, 2, 3], "the tower runs once per picture"
    assert host.groups == [3] * 6 + [2] and result.asked == 20
    assert [index for index, _, _ in texts(result)] == list(range(20))
    metrics = result.metrics
    assert metrics["tokens"] == {"before": 576, "after": 64, "structural": 0}
    assert (metrics["questions"], metrics["answered"], metrics["errors"]) == (20, 20, 0)
    assert metrics["score"] == metrics["report"]["accuracy"] and metrics["timing"]["questions_per_second"] > 0
    assert result.path.name.startswith("fake-consensusdrop-64-")
    assert read_answers(result.path / "answers.jsonl")[0]["model_id"] == "model"


def test_a_budget_by_its_flops_is_another_run(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plain, matched = go(data, tmp_path), go(data, tmp_path, match="flops")
    found = matched.metrics["account"]
    assert plain.path != matched.path and found["match"] == "flops"
    assert found["tokens"] == found["kept"] < 64 and "match=flops: the method is given" in caplog.text
    random = go(data, tmp_path, method="random").metrics["account"]["flops"]["total"]
    dearer = plain.metrics["account"]["flops"]["total"]
    assert abs(found["flops"]["total"] - random) < abs(dearer - random)
    assert "match" not in json.loads((plain.path / "config.json").read_text()), "the default leaves old runs valid"


def test_what_is_complete_is_read_or_made_again_without_weights(data: Path, tmp_path: Path) -> None:
    first = go(data, tmp_path)
    assert first.metrics["titles"]["benchmark"] == "Fake" and first.metrics["scale"] == 1.0
    assert first.metrics["chance"] == 0.0 and "extracted" not in first.metrics["report"]
    path = first.path / "scores.jsonl"
    scores = read_lines(path, ("index", "correct"))
    assert len(scores) == 20
    for lost in (None, path, first.path / "metrics.json"):
        if lost:
            lost.unlink()
        again = loop.run(config(data, data / "model"), tmp_path, runner_loader=NO_LOAD)
        assert steady(again.metrics) == steady(first.metrics) and again.asked == 0 and read_lines(path, ()) == scores
        assert lost == first.path / "metrics.json" or again.metrics == first.metrics


def test_batch_size_changes_neither_name_nor_answers(data: Path, tmp_path: Path) -> None:
    first, *others = (go(data, tmp_path / str(batch), batch=batch) for batch in (1, 4, 99))
    for other in others:
        assert other.path.name == first.path.name
        assert texts(other) == texts(first) and steady(other.metrics) == steady(first.metrics)


def test_a_run_that_ends_before_its_first_answer_leaves_no_folder(data: Path, tmp_path: Path) -> None:
    broken = Mock(side_effect=DataError("the weights are damaged"))
    with pytest.raises(DataError, match="damaged"):
        loop.run(config(data, data / "model"), tmp_path / "out", Execution(2, progress=False), broken)
    assert not list((tmp_path / "out").iterdir())


def test_interrupt_tells_how_to_go_on(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    host = FakeHost()
    host.interrupt_after = 6
    with pytest.raises(Interrupted, match="6 of 20 questions"):
        go(data, tmp_path, host)
    caplog.set_level(logging.INFO)
    rest = FakeHost()
    result = go(data, tmp_path, rest)
    assert "going on after 6 of 20" in caplog.text and len(rest.asked) == 14 == result.asked
    assert steady(result.metrics) == steady(go(data, tmp_path / "other").metrics)


def test_a_run_killed_at_random_moments_ends_as_an_undisturbed_one(data: Path, tmp_path: Path) -> None:
    """Killed again and again, between and in the middle of batches: nothing lost, nothing twice, the same metrics."""
    undisturbed = go(data, tmp_path / "undisturbed")
    out, moments, kills = tmp_path / "killed", random.Random(0), 0

    def written() -> int:
        return sum(path.stat().st_size for path in out.glob("*/answers.jsonl"))

    while not list(out.glob("*/metrics.json")):
        before = written()
        child = FORK.Process(target=go, args=(data, out, FakeHost(0.01), 2))
        child.start()
        while kills % 3 and child.exitcode is None and written() == before:
            time.sleep(0.001)  # one in three dies at any moment, the others after an answer, so that it ends anywhere
        child.join(moments.uniform(0, 0.04))
        kills += child.exitcode is None
        child.kill()
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL)
    result = go(data, out)
    assert kills >= 3 and result.asked == 0
    assert texts(result) == texts(undisturbed) and steady(result.metrics) == steady(undisturbed.metrics)


def test_unreadable_picture_is_an_error_and_the_run_goes_on(data: Path, tmp_path: Path) -> None:
    images = data / "eval" / "fake" / "images"
    (images / "1.png").write_bytes((images / "1.png").read_bytes()[:40])
    (images / "3.png").unlink()
    host = FakeHost()
    result = go(data, tmp_path, host)
    errors = [json.loads(line) for line in (result.path / "errors.jsonl").read_text().splitlines()]
    assert [one["index"] for one in errors] == [5, 6, 7, 8, 9, 15, 16, 17, 18, 19]
    assert list(errors[0]) == ["index", "question_id", "image", "error"] and errors[0]["image"] == "1.png"
    assert result.metrics["errors"] == 10 and result.metrics["answered"] == 10 and host.encoded == [0, 2]
    assert len(read_lines(result.path / "scores.jsonl", ("correct",))) == 10, "an error is not a wrong answer"
    assert go(data, tmp_path).asked == 0
    (result.path / "errors.jsonl").unlink()
    assert go(data, tmp_path).asked == 10, "without errors.jsonl they are asked again"


def test_a_sample_is_the_same_questions_for_every_run_and_a_smaller_one_is_in_it(data: Path, tmp_path: Path) -> None:
    def asked(**settings: Any) -> list[int]:
        answers = (go(data, tmp_path, **settings).path / "answers.jsonl").read_text().splitlines()
        return [json.loads(answer)["metadata"]["index"] for answer in answers]

    some = asked(sample=12)
    assert len(some) == 12 and some == sorted(some) == asked(sample=12, method="random")
    assert set(asked(sample=5)) < set(some), "and not the first ones"
    assert some != list(range(12)) and asked(sample=1000) == list(range(20))


def test_another_configuration_is_another_run(data: Path) -> None:
    changes: list[dict[str, Any]] = [{}, {"tokens": 32}, {"merged": 3}, {"method": "random"}]
    changes += [{"options": {"alpha": 0.5}}, {"limit": 19}, {"sample": 19}, {"dtype": "float32"}]
    changes += [{"conversation": "plain"}, {"max_new_tokens": 5}]
    names = {run_name(prepare(config(data, data / "model", **change)).description) for change in changes}
    assert len(names) == len(changes)


def test_changed_data_and_weights_are_another_run(data: Path, tmp_path: Path) -> None:
    paths = {go(data, tmp_path).path}
    (data / "model" / "model.safetensors").write_bytes(b"weights")
    paths.add(go(data, tmp_path).path)
    questions = data / "eval" / "fake" / "questions.jsonl"
    questions.write_text(questions.read_text().replace("what 1", "who 1"))
    paths.add(go(data, tmp_path).path)
    assert len(paths) == 3


def test_the_full_model_has_neither_budget_nor_match(data: Path) -> None:
    plain = prepare(config(data, data / "model", method="full")).description
    assert (plain["tokens"], plain["merged"]) == (None, None) and run_name(plain).startswith("fake-full-all-")
    for change in ({"tokens": 32}, {"tokens": 576}, {"merged": 3}, {"match": "flops"}):
        assert prepare(config(data, data / "model", method="full", **change)).description == plain


def test_bad_input_stops_before_weights(data: Path, tmp_path: Path) -> None:
    for change, error, why in (
        ({"match": "equal"}, OptionError, "match='equal' must be one of kept, entering, average, flops"),
        ({"max_new_tokens": 0}, OptionError, "max_new_tokens=0"),
        ({"data": "nowhere"}, DataError, r"questions\.jsonl"),
    ):
        with pytest.raises(error, match=why):
            loop.run(config(data, data / "model", **change), tmp_path / "out", runner_loader=NO_LOAD)
    assert not (tmp_path / "out").exists()


def test_encodings_are_forgotten_after_their_last_question(data: Path) -> None:
    paths = [(data / "eval" / "fake" / "images" / f"{n}.png",) for n in (0, 1, 0, 2, 3, 1)]
    host = FakeHost()
    cache = EncodingCache(host, paths, lambda path: [open_image(path)], capacity=2)
    assert [cache.fetch([path])[0] for path in paths] == [[0], [1], [0], [2], [3], [1]]
    assert host.encoded == [0, 1, 2, 3]


def test_a_full_disk_is_a_line_and_nothing_is_lost(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    left = [1500]

    def short(file: int, content: bytes) -> int:
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= len(content)
        return write(file, content[: max(1, len(content) // 2)] if left[0] <= 0 else content)

    with monkeypatch.context() as full:
        full.setattr(os, "write", short)
        with pytest.raises(DataError, match=r"No space left on device.*the same command resumes"):
            go(data, tmp_path / "out")
    result = go(data, tmp_path / "out")
    assert 0 < result.asked < 20
    whole = go(data, tmp_path / "whole")
    assert (result.path / "answers.jsonl").read_bytes() == (whole.path / "answers.jsonl").read_bytes()
