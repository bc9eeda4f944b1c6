"""A question or image a model fails at, or dies of, is a recorded error; the others are answered as ever.

Run: `pytest tests/evaluation/runs/test_execution.py`.
"""

import json
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeHost, Loader, config, make_model, make_place
from PIL import Image
from tiny_data import make_gqa

from llava_consensus import cli
from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation.benchmarks import make
from llava_consensus.evaluation.files import read_lines
from llava_consensus.evaluation.models.base import Answer
from llava_consensus.evaluation.runs import loop
from llava_consensus.evaluation.runs.execution import LONGEST, DeviceFailed, Execution, TooManyErrors
from llava_consensus.evaluation.runs.loop import RunResult
from llava_consensus.evaluation.runs.store import ASKING

FORK = multiprocessing.get_context("fork")
FILES = ("answers.jsonl", "errors.jsonl")


class Delicate(FakeHost):
    """Fails at any batch with a text or an image it cannot bear."""

    def __init__(self, poison: dict[str, Exception], colour: int = -1) -> None:
        super().__init__()
        self.poison, self.colour = poison, colour

    def encode(self, images: list[Image.Image]) -> list[Any]:
        if any(image.getpixel((0, 0))[0] == self.colour for image in images):  # type: ignore[index]
            raise ZeroDivisionError("an image that breaks the tower")
        return super().encode(images)

    def answer(self, encoded: list[list[Any]], prompts: list[Any]) -> list[Answer]:
        for prompt in prompts:
            if prompt.text in self.poison:
                raise self.poison[prompt.text]
        return super().answer(encoded, prompts)


POISON = {
    "what 0 1": IndexError("list index out of range"),
    "what 1 4": TypeError("TextEncodeInput must be Union"),
    "what 2 0": RuntimeError("DefaultCPUAllocator: can't allocate memory: 156 GB"),
    "what 3 4": MemoryError(),
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_place(tmp_path / "data")


def go(data: Path, out: Path, host: Any = None, workers: int = 1, batch: int = 3, **changes: Any) -> RunResult:
    execution = Execution(batch, workers, progress=False, **changes)
    loader = (lambda *_: host or FakeHost()) if host is None or isinstance(host, FakeHost) else host
    return loop.run(config(data, data / "model"), out, execution, loader)


def content(result: RunResult) -> list[bytes]:
    return [(result.path / name).read_bytes() for name in FILES]


@pytest.mark.parametrize("batch", [1, 3, 99])
def test_a_poison_question_is_a_recorded_error_and_the_run_goes_on(data: Path, tmp_path: Path, batch: int) -> None:
    result = go(data, tmp_path / "out", Delicate(POISON), batch=batch)
    errors = read_lines(result.path / "errors.jsonl", ("index", "question_id", "image", "error", "cause"))
    assert [one["index"] for one in errors] == [1, 9, 10, 19]
    assert errors[0]["error"] == "IndexError: list index out of range" and errors[0]["image"] == "0.png"
    assert result.metrics["answered"] == 16 and result.metrics["errors"] == 4
    whole = go(data, tmp_path / "whole")
    fine = read_lines(whole.path / "answers.jsonl", ())
    assert read_lines(result.path / "answers.jsonl", ()) == [
        one for one in fine if one["metadata"]["index"] not in (1, 9, 10, 19)
    ]
    assert go(data, tmp_path / "out").asked == 0, "it does not block the run, nor is it asked again unasked"


def test_retry_errors_asks_them_again_and_ends_as_if_nothing_had_failed(data: Path, tmp_path: Path) -> None:
    go(data, tmp_path / "out", Delicate(POISON, colour=2))
    image = data / "eval" / "fake" / "images" / "1.png"
    good = image.read_bytes()
    image.write_bytes(b"broken")
    whole = tmp_path / "whole"
    broken = go(data, whole)
    assert broken.metrics["errors"] == 5
    image.write_bytes(good)
    mended = [go(data, out, retry_errors=True) for out in (tmp_path / "out", whole)]
    assert mended[1].asked == 5 and content(mended[0]) == content(mended[1]) and mended[0].metrics["errors"] == 0
    assert content(mended[0]) == content(go(data, tmp_path / "never_failed"))


def test_a_picture_the_tower_fails_at_spoils_no_other(data: Path, tmp_path: Path) -> None:
    result = go(data, tmp_path, Delicate({}, colour=1), batch=20)
    errors = read_lines(result.path / "errors.jsonl", ("error",))
    assert [one["index"] for one in errors] == [5, 6, 7, 8, 9]
    assert "1.png: the model fails at it (ZeroDivisionError: an image that breaks" in errors[0]["error"]


def test_a_question_too_long_to_be_asked_is_told_by_its_length(data: Path, tmp_path: Path) -> None:
    path = data / "eval" / "fake" / "questions.jsonl"
    long = json.dumps({"question_id": 9, "image": "0.png", "text": "x" * (LONGEST + 1)})
    path.write_text(path.read_text() + long + "\n")
    result = go(data, tmp_path)
    assert "16,385 characters" in read_lines(result.path / "errors.jsonl", ())[0]["error"]


def test_a_model_that_fails_at_everything_stops_the_run(tmp_path: Path) -> None:
    data = make_place(tmp_path / "data", pictures=40)
    poison: dict[str, Exception] = {f"what {one} {two}": ValueError("no") for one in range(40) for two in range(5)}
    with pytest.raises(TooManyErrors, match="64 questions in a row failed"):
        go(data, tmp_path, Delicate(poison), batch=4)
    small = make_place(tmp_path / "small", pictures=2)
    with pytest.raises(DataError, match="not one question could be answered"):
        go(small, tmp_path / "other", Delicate(poison))


def test_a_dead_device_and_an_error_of_the_user_are_not_blamed_on_questions(data: Path, tmp_path: Path) -> None:
    with pytest.raises(DeviceFailed, match="the same command resumes"):
        go(data, tmp_path, Delicate({"what 0 1": RuntimeError("CUDA error: device-side assert triggered")}))
    with pytest.raises(OptionError, match="mine"):
        go(data, tmp_path / "other", Delicate({"what 0 1": OptionError("mine")}))


def test_the_real_model_with_poison_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).parents[3]
    place = root / "playground" / "mini" / "eval" / "gqa"
    (tmp_path / "eval").mkdir()
    own = tmp_path / "eval" / "gqa"
    own.mkdir()
    for one in place.iterdir():
        (own / one.name).symlink_to(one)
    file = own / "llava_gqa_testdev_balanced.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()[:8]]
    for index, text in ((1, "what is <image>?"), (3, "what \ud800?"), (5, "why " * 50_000)):
        lines[index]["text"] = text
    file.unlink()
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ["eval", "gqa", "--model", str(root / "checkpoints" / "llava-mini"), "--data", str(tmp_path), "--device"]
    assert cli.main([*given, "cpu", "--out", str(tmp_path / "out"), "--no-progress"]) == 6
    output = capsys.readouterr()
    errors = [json.loads(line)["index"] for line in next(tmp_path.glob("out/*/errors.jsonl")).read_text().splitlines()]
    assert errors == [1, 3, 5]
    answered = f"on {8 - len(errors)} of 8 questions, {len(errors)} without an answer"
    assert answered in output.out and "Traceback" not in output.err


FATAL = "what 1 2"
INDEX = 7  # of that question


class Deadly(FakeHost):
    """Dies of one question, or has its device fail at it for good."""

    def __init__(self, sticky: bool = False) -> None:
        super().__init__()
        self.sticky, self.failed = sticky, False

    def answer(self, encoded: Any, prompts: Any) -> Any:
        if self.failed or any(prompt.text == FATAL for prompt in prompts):
            self.failed = True
            if self.sticky:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().answer(encoded, prompts)


@dataclass(frozen=True)
class DeadlyLoader:
    sticky: bool = False

    def __call__(self, *_: str) -> Deadly:
        return Deadly(self.sticky)


@dataclass(frozen=True)
class KilledLoader:
    """Loads hosts in whose way somebody stands who kills the run at one question: the first process below `parent`,
    whichever process asks.
    """

    parent: int

    def __call__(self, *_: str) -> FakeHost:
        return Killed(self.parent)


class Killed(FakeHost):
    def __init__(self, parent: int) -> None:
        super().__init__()
        self.parent = parent

    def answer(self, encoded: Any, prompts: Any) -> Any:
        if any(prompt.text == FATAL for prompt in prompts):
            run = os.getpid() if os.getppid() == self.parent else os.getppid()
            os.kill(run, signal.SIGKILL)
            time.sleep(9)
        return super().answer(encoded, prompts)


def died(data: Path, out: Path) -> bool:
    process = FORK.Process(target=go, args=(data, out, DeadlyLoader()))
    process.start()
    process.join()
    return process.exitcode != 0


def test_a_question_that_kills_is_found_by_a_process_apart(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert [died(data, out) for _ in range(2)] == [True, False]
    result = go(data, out, DeadlyLoader())
    (error,) = [json.loads(line) for line in (result.path / "errors.jsonl").read_text().splitlines()]
    assert error["index"] == INDEX and error["cause"] == "death" and result.metrics["answered"] == 19
    assert not (result.path / ASKING).exists()
    assert go(data, out, DeadlyLoader()).asked == 0
    mended = go(data, out, Loader(), retry_errors=True)
    assert mended.asked == 1
    assert content(mended) == content(go(data, tmp_path / "whole", Loader()))


def test_kills_from_outside_lose_nothing(data: Path, tmp_path: Path) -> None:
    """At the same question again and again: once while the run asks it itself, then while a child process does."""
    out = tmp_path / "out"
    for number in range(4):
        process = FORK.Process(target=go, args=(data, out, KilledLoader(os.getpid())))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL, number
    again = go(data, out, Loader())
    assert again.metrics["errors"] == 0 and content(again) == content(go(data, tmp_path / "whole", Loader()))


def test_shards_in_folders_of_their_own_are_merged(data: Path, tmp_path: Path) -> None:
    places = [tmp_path / str(number) for number in range(3)]
    parts = [go(data, out, shard=(number, 3)) for number, out in enumerate(places, start=1)]
    assert [part.asked for part in parts] == [7, 7, 6] and all(part.metrics == {} for part in parts)
    merged = go(data, places[0], merge=tuple(places[1:]))
    assert merged.asked == 0 and content(merged) == content(go(data, tmp_path / "whole"))
    with pytest.raises(DataError, match="the folder of the same run"):
        go(data, tmp_path / "new", merge=(tmp_path / "nowhere",))


def test_pictures_that_are_back_are_asked_about_unasked(data: Path, tmp_path: Path) -> None:
    image = data / "eval" / "fake" / "images" / "1.png"
    image.rename(tmp_path / "away.png")
    first = go(data, tmp_path / "out")
    assert (first.metrics["answered"], first.metrics["errors"]) == (15, 5)
    assert go(data, tmp_path / "out", Delicate({"what": ValueError()})).asked == 0, "it is still missing"
    (tmp_path / "away.png").rename(image)
    again = go(data, tmp_path / "out")
    assert again.asked == 5 and content(again) == content(go(data, tmp_path / "whole"))


def test_what_is_asked_again_is_kept_until_a_new_answer_comes(data: Path, tmp_path: Path) -> None:
    def load(*_: str) -> FakeHost:
        raise DataError("no weights today")

    image = data / "eval" / "fake" / "images" / "1.png"
    image.rename(tmp_path / "away.png")
    first = go(data, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in first.path.iterdir()}
    (tmp_path / "away.png").rename(image)
    with pytest.raises(DataError, match="no weights"):
        go(data, tmp_path / "out", load)
    before["lock"] = (first.path / "lock").read_bytes()
    assert {path.name: path.read_bytes() for path in first.path.iterdir()} == before


@pytest.mark.parametrize("json", [False, True])
def test_the_last_line_says_what_has_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, json: bool
) -> None:
    monkeypatch.setattr("llava_consensus.evaluation.models.load", lambda *_: FakeHost())
    data = make_gqa(tmp_path / "data")
    place, questions = make("gqa").place(data), make("gqa").load(data)
    file = place / make("gqa").question_file
    file.write_text(file.read_text().replace(f'"{questions[0].images[0]}"', '"gone.jpg"', 1))
    (place / make("gqa").images).mkdir(parents=True)
    for question in questions:
        Image.new("RGB", (4, 4)).save(place / make("gqa").images / question.images[0])
    given = ["--data", str(data), "--model", str(make_model(tmp_path / "m")), "--no-progress", "--device", "cpu"]
    assert cli.main(["eval", "gqa", *given, "--out", str(tmp_path / "out"), *(["--json"] if json else [])]) == 6
    last = capsys.readouterr().err.splitlines()[-1]
    assert "questions have no answer" in last and "errors.jsonl" in last
    swept = ["sweep", "--bench", "gqa", "--methods", "random", "--tokens", "64", *given, "--out", str(tmp_path / "s")]
    assert cli.main(swept) == 6
    assert "questions without an answer" in capsys.readouterr().out.splitlines()[-1]


def test_a_device_that_failed_for_good_does_not_block_the_run(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(DeviceFailed, match="the same command resumes"):
        go(data, out, DeadlyLoader(sticky=True))
    result = go(data, out, DeadlyLoader(sticky=True))
    assert result.metrics["answered"] == 19 and result.metrics["errors"] == 1
