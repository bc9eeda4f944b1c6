"""Workers: real processes, killed on purpose; the files of a run must be those of one process, and nothing is lost."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fakes import CrashAt, Loader, config, make_place
from worker_kinds import Dying, answered, broken

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import read_lines
from llava_consensus.evaluation.runs import loop
from llava_consensus.evaluation.runs.execution import Execution
from llava_consensus.evaluation.runs.loop import RunResult
from llava_consensus.evaluation.runs.workers import WorkerError, run_shards

FORK = multiprocessing.get_context("fork")
FILES = ("config.json", "answers.jsonl", "errors.jsonl")
TESTS = Path(__file__).parents[2]
SHARDS = [(0, 1), (2, 3), (4,)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    made = make_place(tmp_path / "data", pictures=8)
    (made / "eval" / "fake" / "images" / "5.png").write_bytes(b"no image")
    return made


def go(data: Path, out: Path, workers: int = 1, loader: Any = None) -> RunResult:
    execution = Execution(batch=2, workers=workers, progress=False)
    return loop.run(config(data, data / "model"), out, execution, loader or Loader())


def content(result: RunResult) -> list[bytes]:
    return [(result.path / name).read_bytes() for name in FILES]


def lines(out: Path) -> list[bytes]:
    return [line for path in out.glob("*/answers.jsonl") for line in path.read_bytes().splitlines()]


def test_a_worker_that_dies_ends_the_run_after_what_others_finished() -> None:
    results = run_shards(Dying(of=(4,)), 1, SHARDS)
    finished = [next(results), next(results)]
    assert all(answered(shard) in finished for shard in SHARDS[:2])
    with pytest.raises(WorkerError, match=r"a worker died.*the same command resumes"):
        next(results)


def test_errors_in_a_worker_are_raised_as_they_are() -> None:
    with pytest.raises(DataError, match="broken 0"):
        list(run_shards(broken, 1, SHARDS))


def test_two_workers_one_killed_give_the_bytes_of_one_process(data: Path, tmp_path: Path) -> None:
    alone, marker = go(data, tmp_path / "alone"), tmp_path / "killed"
    with pytest.raises(WorkerError):
        go(data, tmp_path / "together", 2, Loader(marker))
    together = go(data, tmp_path / "together", 2, Loader(marker))
    assert marker.exists() and 0 < together.asked <= 40
    assert content(together) == content(alone) and len(read_lines(together.path / "scores.jsonl", ("correct",))) == 35
    for key in ("score", "tokens", "errors"):
        assert together.metrics[key] == alone.metrics[key]
    assert {path.name for path in together.path.iterdir()} == {*FILES, "scores.jsonl", "metrics.json", "lock"}


def _workers_of(parent: int) -> set[str]:
    found = set()
    for one in Path("/proc").glob("[0-9]*"):
        try:
            started = int((one / "stat").read_text().rpartition(")")[2].split()[1])
            found |= {one.name} if started == parent and b"spawn_main" in (one / "cmdline").read_bytes() else set()
        except OSError:  # gone meanwhile
            continue
    return found


def test_killed_half_way_the_workers_end_at_once_and_another_number_goes_on(data: Path, tmp_path: Path) -> None:
    alone, out = go(data, tmp_path / "alone"), tmp_path / "out"
    process = FORK.Process(target=go, args=(data, out, 2, Loader(seconds=0.4)))
    process.start()
    limit = time.monotonic() + 120
    while not lines(out) and time.monotonic() < limit:
        time.sleep(0.02)
    children = _workers_of(process.pid or 0)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    limit = time.monotonic() + 5
    while any(Path("/proc", pid).exists() for pid in children) and time.monotonic() < limit:
        time.sleep(0.05)
    assert len(children) == 2 and not any(Path("/proc", pid).exists() for pid in children)
    finished = len(lines(out))
    assert 0 < finished < 40
    again = go(data, out, 3)
    assert again.asked <= 40 - finished and content(again) == content(alone)


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
        "cli.parser = lambda _: Namespace(parse_known_args=lambda _: (Namespace(lines=work), []))\n"
        "if __name__ == '__main__': sys.exit(cli.main([]))\n"
    )
    script = tmp_path / "go.py"
    script.write_text(code)
    place = [str(TESTS), str(data), str(tmp_path / "out")]
    path = os.pathsep.join((str(TESTS), *filter(None, sys.path)))
    own = {"start_new_session": True, "env": {**os.environ, "PYTHONPATH": path}}
    child: Any = subprocess.Popen([sys.executable, str(script), *place], stderr=subprocess.PIPE, text=True, **own)
    while child.poll() is None and not lines(tmp_path / "out"):
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGTERM)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM, said
    assert "of 40 questions. The same command resumes" in said and "Traceback" not in said


@pytest.mark.parametrize("workers", [1, 2])
def test_a_question_that_ends_its_process_is_recorded_and_the_others_are_answered(
    data: Path, tmp_path: Path, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    out, crash = tmp_path / "out", CrashAt("what 3 1")
    first = FORK.Process(target=go, args=(data, out, workers, crash))
    first.start()
    first.join(120)
    assert first.exitcode and not list(out.glob("*/metrics.json"))
    result = go(data, out, workers, crash)
    go(data, tmp_path / "plain")
    errors = {record["index"]: record["error"] for record in read_lines(result.path / "errors.jsonl", ("index",))}
    assert "every process that asked it ended" in errors.pop(16) and sorted(errors) == [25, 26, 27, 28, 29]
    answers = [line for line in lines(tmp_path / "plain") if b"what 3 1" not in line]
    assert lines(out) == answers and len(answers) == 34
    assert "each is asked in a process apart" in caplog.text and not (result.path / "asking").exists()
    assert go(data, out, workers, crash).asked == 0
