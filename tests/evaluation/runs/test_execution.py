"""A question or image a model fails at, or dies of, is a recorded error; the others are answered as ever."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fakes import FakeHost, config, make_place
from PIL import Image
from tiny_data import write_lines

from llava_consensus import cli
from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation.files import read_lines
from llava_consensus.evaluation.models.base import Answer
from llava_consensus.evaluation.runs import loop
from llava_consensus.evaluation.runs.execution import LONGEST, DeviceFailed, Execution, TooManyErrors
from llava_consensus.evaluation.runs.loop import RunResult

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
    whole = read_lines(go(data, tmp_path / "whole").path / "answers.jsonl", ())
    fine = [one for one in whole if one["metadata"]["index"] not in (1, 9, 10, 19)]
    assert read_lines(result.path / "answers.jsonl", ()) == fine
    assert go(data, tmp_path / "out").asked == 0, "it does not block the run, nor is it asked again unasked"


def test_retry_errors_asks_them_again_and_ends_as_if_nothing_had_failed(data: Path, tmp_path: Path) -> None:
    go(data, tmp_path / "out", Delicate(POISON, colour=2))
    image, whole = data / "eval" / "fake" / "images" / "1.png", tmp_path / "whole"
    good = image.read_bytes()
    image.write_bytes(b"broken")
    assert go(data, whole).metrics["errors"] == 5
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
    root, own = Path(__file__).parents[3], tmp_path / "eval/gqa"
    own.mkdir(parents=True)
    for one in (root / "playground/mini/eval/gqa").iterdir():
        (own / one.name).symlink_to(one)
    file = own / "llava_gqa_testdev_balanced.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()[:8]]
    for index, text in ((1, "what is <image>?"), (3, "what \ud800?"), (5, "why " * 50_000)):
        lines[index]["text"] = text
    file.unlink()
    write_lines(file, lines)
    given = ["eval", "gqa", "--model", str(root / "checkpoints" / "llava-mini"), "--data", str(tmp_path), "--device"]
    assert cli.main([*given, "cpu", "--out", str(tmp_path / "out"), "--no-progress"]) == 6
    output = capsys.readouterr()
    errors = read_lines(next(tmp_path.glob("out/*/errors.jsonl")), ())
    assert [one["index"] for one in errors] == [1, 3, 5] and "Traceback" not in output.err
    assert "on 5 of 8 questions, 3 without an answer" in output.out


def test_what_is_asked_again_is_kept_until_a_new_answer_comes(data: Path, tmp_path: Path) -> None:
    load = Mock(side_effect=DataError("no weights today"))
    (data / "eval" / "fake" / "images" / "1.png").unlink()
    first = go(data, tmp_path / "out")
    before = content(first)
    with pytest.raises(DataError, match="no weights"):
        go(data, tmp_path / "out", load, retry_errors=True)
    assert content(first) == before


def test_shards_in_folders_of_their_own_are_merged(data: Path, tmp_path: Path) -> None:
    places = [tmp_path / str(number) for number in range(3)]
    parts = [go(data, out, shard=(number, 3)) for number, out in enumerate(places, start=1)]
    assert [part.asked for part in parts] == [7, 7, 6] and all(part.metrics == {} for part in parts)
    merged = go(data, places[0], merge=tuple(places[1:]))
    assert merged.asked == 0 and content(merged) == content(go(data, tmp_path / "whole"))
    with pytest.raises(DataError, match="the folder of the same run"):
        go(data, tmp_path / "new", merge=(tmp_path / "nowhere",))
