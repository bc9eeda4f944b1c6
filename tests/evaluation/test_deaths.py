"""A question that kills the process that asks it, and a device that answers nothing more, block no run.

Run: `pytest tests/test_deaths.py`.
"""

import json
import multiprocessing
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeHost, Loader, config, make_place

from llava_consensus.evaluation.runs import loop
from llava_consensus.evaluation.runs.deaths import NAME
from llava_consensus.evaluation.runs.execution import Execution
from llava_consensus.evaluation.runs.failures import DeviceFailed

FORK = multiprocessing.get_context("fork")
POISON = "what 1 2"
INDEX = 7  # of that question


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_place(tmp_path / "data")


class Deadly(FakeHost):
    """Dies of one question, or has its device fail at it for good."""

    def __init__(self, sticky: bool = False) -> None:
        super().__init__()
        self.sticky, self.failed = sticky, False

    def answer(self, encoded: Any, prompts: Any) -> Any:
        if self.failed or any(prompt.text == POISON for prompt in prompts):
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


def go(data: Path, out: Path, loader: Any, workers: int = 1, **changes: Any) -> loop.RunResult:
    execution = Execution(3, workers, progress=False, **changes)
    return loop.run(config(data, data / "model"), out, execution, loader)


def content(result: loop.RunResult) -> list[bytes]:
    return [(result.path / name).read_bytes() for name in ("answers.jsonl", "errors.jsonl")]


def died(data: Path, out: Path) -> bool:
    process = FORK.Process(target=go, args=(data, out, DeadlyLoader()))
    process.start()
    process.join()
    return process.exitcode != 0


def test_a_question_that_kills_the_process_is_an_error_after_two_deaths_alone(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert [died(data, out) for _ in range(4)] == [True, True, True, False]
    result = go(data, out, DeadlyLoader())
    (error,) = [json.loads(line) for line in (result.path / "errors.jsonl").read_text().splitlines()]
    assert error["index"] == INDEX and error["cause"] == "death" and result.metrics["answered"] == 19
    assert not (result.path / NAME).exists()
    mended = go(data, out, Loader(), retry_errors=True)
    assert mended.asked == 1 and content(mended) == content(go(data, tmp_path / "whole", Loader()))


def test_a_killed_process_accuses_nobody(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert died(data, out)
    again = go(data, out, Loader())
    assert again.metrics["errors"] == 0 and content(again) == content(go(data, tmp_path / "whole", Loader()))


@pytest.mark.parametrize("note", ["", "{", "[]", '{"asking": "x", "alone": []}', '{"asking": [null], "alone": {}}'])
def test_a_damaged_note_says_nothing(data: Path, tmp_path: Path, note: str) -> None:
    out = tmp_path / "out"
    assert died(data, out)
    next(out.glob(f"*/{NAME}")).write_text(note)
    assert go(data, out, Loader()).metrics["errors"] == 0


def test_a_device_that_failed_for_good_does_not_block_the_run(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for _ in range(3):
        with pytest.raises(DeviceFailed, match="the same command goes on"):
            go(data, out, DeadlyLoader(sticky=True))
    result = go(data, out, DeadlyLoader(sticky=True))
    assert result.metrics["answered"] == 19 and result.metrics["errors"] == 1


@pytest.mark.parametrize("sticky", [False, True])
def test_with_two_workers_one_call_ends_with_the_question_as_an_error(data: Path, tmp_path: Path, sticky: bool) -> None:
    result = go(data, tmp_path / "out", DeadlyLoader(sticky), workers=2)
    (error,) = [json.loads(line) for line in (result.path / "errors.jsonl").read_text().splitlines()]
    assert error["index"] == INDEX and error["cause"] == "death" and result.metrics["answered"] == 19


def test_a_device_that_fails_at_a_picture_is_no_damaged_picture(data: Path, tmp_path: Path) -> None:
    class Blind(FakeHost):
        def encode(self, images: Any) -> Any:
            raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(DeviceFailed, match=r"0\.png"):
        go(data, tmp_path, lambda *_: Blind())
