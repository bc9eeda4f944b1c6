"""A full disk, a vanished or unusable folder while two workers are at it: one clear line, and nothing is lost.

Run: `pytest tests/test_storage_of_workers.py`.
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeHost, Loader, config, make_place

from llava_consensus.errors import BusyError, DataError
from llava_consensus.evaluation import files
from llava_consensus.evaluation.runs import loop
from llava_consensus.evaluation.runs.execution import Execution

TESTS = str(Path(__file__).parents[1])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_place(tmp_path / "data", pictures=8)


def go(data: Path, out: Path, loader: Any) -> loop.RunResult:
    return loop.run(config(data, data / "model"), out, Execution(2, 2, progress=False), loader)


class Meddled(FakeHost):
    """Does something to the run, in the worker's process, after a few answers."""

    def __init__(self, out: Path, what: str) -> None:
        super().__init__()
        self.out, self.what = out, what

    def answer(self, encoded: Any, prompts: Any) -> Any:
        if len(self.asked) >= 10:
            (run,) = self.out.glob("*/lock")
            getattr(self, self.what)(run.parent)
        return super().answer(encoded, prompts)

    def fill(self, run: Path) -> None:
        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        files.os.fsync = full  # type: ignore[assignment]

    def remove(self, run: Path) -> None:
        shutil.rmtree(run, ignore_errors=True)

    def block(self, run: Path) -> None:
        """As a folder that can be read and not written, for root too."""
        shutil.rmtree(run / "shards", ignore_errors=True)
        (run / "shards").touch()


@dataclass(frozen=True)
class Meddling:
    out: Path
    what: str

    def __call__(self, *_: str) -> Meddled:
        return Meddled(self.out, self.what)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("fill", "No space left on device.*the same command goes on"),
        ("remove", "was deleted while this process worked"),
        ("block", "cannot be (made|written)"),
    ],
)
def test_it_is_one_line_and_nothing_is_lost(data: Path, tmp_path: Path, what: str, words: str) -> None:
    out = tmp_path / "out"
    with pytest.raises((DataError, BusyError), match=words):
        go(data, out, Meddling(out, what))
    for blocked in out.glob("*/shards"):
        if blocked.is_file():
            blocked.unlink()
    left = sum(len(path.read_bytes().splitlines()) for path in out.glob("*/shards/*.jsonl"))
    result = go(data, out, Loader())
    whole = go(data, tmp_path / "whole", Loader())
    assert result.asked == 40 - left and (what != "fill" or left > 0)
    assert (result.path / "answers.jsonl").read_bytes() == (whole.path / "answers.jsonl").read_bytes()


def test_a_signal_to_all_of_them_says_what_was_done(data: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from argparse import Namespace; from pathlib import Path; from fakes import *\n"
        "from llava_consensus import cli; from llava_consensus.evaluation.runs import loop\n"
        "from llava_consensus.evaluation.runs.execution import Execution\n"
        "data, out = Path(sys.argv[2]), Path(sys.argv[3])\n"
        "def work(given):\n"
        "    loop.run(config(data, data / 'model'), out, Execution(2, 2, progress=False), Loader(seconds=0.3))\n"
        "    return iter(())\n"
        "cli.parser = lambda _: Namespace(parse_args=lambda _: Namespace(lines=work))\n"
        "if __name__ == '__main__': sys.exit(cli.main([]))\n"
    )
    script = tmp_path / "go.py"
    script.write_text(code)
    place = [TESTS, str(data), str(tmp_path / "out")]
    path = os.pathsep.join((TESTS, *filter(None, sys.path)))
    child = subprocess.Popen(
        [sys.executable, str(script), *place],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert child.stderr
    while child.poll() is None and not list((tmp_path / "out").glob("*/shards/*.jsonl")):
        try:
            child.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
    os.killpg(child.pid, signal.SIGTERM)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM, said
    assert "of 40 questions. The same command goes on" in said and "Traceback" not in said
