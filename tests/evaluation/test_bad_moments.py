"""What can happen to a run at work: its lock deleted, the disk full, the folder gone, a signal, a damaged neighbour.

Run: `pytest tests/test_bad_moments.py`.
"""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeHost, Loader, config, make_place

from llava_consensus import cli, hosts
from llava_consensus.errors import BusyError, DataError
from llava_consensus.evaluation.runs import loop
from llava_consensus.evaluation.runs.execution import Execution

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_place(tmp_path / "data")


def go(data: Path, out: Path, host: Any = None, workers: int = 1) -> loop.RunResult:
    loader = (lambda *_: host or FakeHost()) if workers == 1 else Loader()
    return loop.run(config(data, data / "model"), out, Execution(2, workers, progress=False), loader)


class Meddled(FakeHost):
    """Does something to the run after its first answers."""

    def __init__(self, out: Path, meddle: Any) -> None:
        super().__init__()
        self.out, self.meddle = out, meddle

    def answer(self, encoded: Any, prompts: Any) -> Any:
        if len(self.asked) == 4:
            self.meddle(next(self.out.glob("*/lock")).parent)
        return super().answer(encoded, prompts)


def test_a_deleted_lock_stops_the_run_before_another_line(data: Path, tmp_path: Path) -> None:
    with pytest.raises(BusyError, match="was deleted while this process worked"):
        go(data, tmp_path / "out", Meddled(tmp_path / "out", lambda run: (run / "lock").unlink()))
    result = go(data, tmp_path / "out")
    assert result.asked == 16
    assert (result.path / "answers.jsonl").read_bytes() == (
        go(data, tmp_path / "whole").path / "answers.jsonl"
    ).read_bytes()


def test_two_processes_never_write_to_one_run(data: Path, tmp_path: Path) -> None:
    def second(run: Path) -> None:
        (run / "lock").unlink()
        go(data, tmp_path / "out")

    with pytest.raises(BusyError):
        go(data, tmp_path / "out", Meddled(tmp_path / "out", second))
    lines = next((tmp_path / "out").glob("*/answers.jsonl")).read_text().splitlines()
    assert sorted(json.loads(line)["metadata"]["index"] for line in lines) == list(range(20))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_folder_that_vanishes_is_a_message(data: Path, tmp_path: Path, workers: int) -> None:
    out = tmp_path / "out"
    if workers == 1:
        with pytest.raises((BusyError, DataError)):
            go(data, out, Meddled(out, shutil.rmtree))
        return
    out.mkdir()
    out.chmod(0o500)
    try:
        if os.access(out, os.W_OK):
            pytest.skip("root writes anywhere")
        with pytest.raises(DataError, match="Choose another folder"):
            go(data, out, workers=2)
    finally:
        out.chmod(0o700)


def test_a_full_disk_is_one_line_and_nothing_is_lost(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    left = [1500]

    def short(file: int, content: bytes) -> int:
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= len(content)
        return write(file, content[: max(1, len(content) // 2)] if left[0] <= 0 else content)

    with monkeypatch.context() as full:
        full.setattr(os, "write", short)
        with pytest.raises(DataError, match=r"No space left on device.*the same command goes on"):
            go(data, tmp_path / "out")
    result = go(data, tmp_path / "out")
    assert 0 < result.asked < 20
    whole = go(data, tmp_path / "whole")
    assert (result.path / "answers.jsonl").read_bytes() == (whole.path / "answers.jsonl").read_bytes()


def test_a_damaged_neighbour_does_not_hide_a_result(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    monkeypatch.setattr(hosts, "load", lambda *_: FakeHost())
    neighbour = tmp_path / "out" / "gqa-full-all-000000000000"
    neighbour.mkdir(parents=True)
    for name in ("config.json", "metrics.json"):
        (neighbour / name).write_text("{")
    given = ["eval", "gqa", "--limit", "4", "--device", "cpu", "--out", str(tmp_path / "out"), "--no-progress"]
    assert cli.main(given) == 0
    output = capsys.readouterr()
    assert "on 4 of 4 questions" in output.out and "another run is damaged" in output.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_says_what_was_done(data: Path, tmp_path: Path, number: int) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from pathlib import Path; from fakes import *; from llava_consensus import cli;"
        "from llava_consensus.evaluation.runs import loop;"
        "from llava_consensus.evaluation.runs.execution import Execution;"
        "data, out = Path(sys.argv[2]), Path(sys.argv[3]);"
        "work = lambda given: loop.run(config(data, data / 'model'), out, Execution(2, progress=False),"
        " lambda *_: FakeHost(0.5)) and iter(());"
        "from argparse import Namespace; cli.parser = lambda _: Namespace(parse_args=lambda _: Namespace(lines=work));"
        "sys.exit(cli.main([]))"
    )
    place = [str(Path(__file__).parents[1]), str(data), str(tmp_path / "out")]
    child = subprocess.Popen([sys.executable, "-c", code, *place], stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + 60
    while not any(path.stat().st_size for path in (tmp_path / "out").glob("*/answers.jsonl")):
        assert time.monotonic() < limit and child.poll() is None
        time.sleep(0.02)
    child.send_signal(number)
    _, said = child.communicate(timeout=30)
    assert child.returncode == 128 + number and "of 20 questions. The same command goes on" in said, said
    assert "Traceback" not in said


def _slowly(data: Path, out: Path) -> None:
    execution = Execution(2, 2, progress=False)
    loop.run(config(data, data / "model"), out, execution, Loader(seconds=30.0))


def _workers_of(parent: int) -> set[str]:
    found = set()
    for one in Path("/proc").glob("[0-9]*"):
        try:
            started = int((one / "stat").read_text().rpartition(")")[2].split()[1])
            found |= {one.name} if started == parent and b"spawn_main" in (one / "cmdline").read_bytes() else set()
        except OSError:  # gone meanwhile
            continue
    return found


def test_workers_end_at_once_when_their_parent_is_killed(data: Path, tmp_path: Path) -> None:
    process = FORK.Process(target=_slowly, args=(data, tmp_path / "out"))
    process.start()
    limit = time.monotonic() + 60
    children: set[str] = set()
    while len(children) < 2 and time.monotonic() < limit:
        children = _workers_of(process.pid or 0)
        time.sleep(0.05)
    time.sleep(3)  # they have begun their first shard, which takes half a minute
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    limit = time.monotonic() + 5
    while any(Path("/proc", pid).exists() for pid in children) and time.monotonic() < limit:
        time.sleep(0.05)
    assert children and not any(Path("/proc", pid).exists() for pid in children)
