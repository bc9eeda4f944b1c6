"""A Ray driver that is killed leaves nothing behind. Run: `pytest tests/test_orphans.py`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes import Loader, config, make_place

from llava_consensus.evaluation.runs import loop
from llava_consensus.evaluation.runs.execution import Execution
from llava_consensus.evaluation.runs.workers import orphans
from llava_consensus.evaluation.runs.workers.base import WorkerError


def _slowly(data: Path, out: Path) -> None:
    execution = Execution(2, 2, engine="ray", progress=False)
    loop.run(config(data, data / "model"), out, execution, Loader(seconds=1.0))


def wait_for(what: object, seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while not what() and time.monotonic() < limit:  # type: ignore[operator]
        time.sleep(0.1)
    return bool(what())  # type: ignore[operator]


def _driver(data: Path, out: Path, said: Path) -> subprocess.Popen[bytes]:
    """A driver in a fresh interpreter: a fork of this one would inherit threads of a cluster that ran in it before."""
    code = "import sys; from pathlib import Path; from test_orphans import _slowly; _slowly(*map(Path, sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with said.open("wb") as log:
        command = [sys.executable, "-c", code, str(data), str(out)]
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def test_nothing_outlives_a_killed_ray_driver_by_more_than_seconds(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    data, said = make_place(tmp_path / "data"), tmp_path / "driver.log"
    driver = _driver(data, tmp_path / "out", said)
    try:
        finished = lambda: list((tmp_path / "out").glob("*/shards/*.jsonl"))  # noqa: E731
        wait_for(lambda: finished() or driver.poll() is not None, 240)
        if not finished() and "Ray does not start" in said.read_text():
            pytest.skip(
                "Ray, which allows its daemons 30 s, did not start on so busy a machine; test_engines.py needs it"
            )
        assert finished(), f"no shard was finished (exit code {driver.poll()}): {said.read_text()[-3000:]}"
        assert len(list(orphans._processes(driver.pid))) > 2
    finally:
        driver.kill()
        driver.wait()
    assert wait_for(lambda: not list(orphans._processes(driver.pid)), 10), "some of the cluster lives on"
    assert loop.run(config(data, data / "model"), tmp_path / "out", Execution(2, progress=False), Loader()).asked < 20


def test_a_cluster_that_does_not_start_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    data = make_place(tmp_path / "data")
    with pytest.raises(WorkerError, match=r"Ray does not start \(The current node timed out"):
        _slowly(data, tmp_path / "out")


def test_processes_of_other_sessions_are_left_alone(tmp_path: Path) -> None:
    session = tmp_path / "session_2026_77"
    session.mkdir()
    with open(session / "log", "w") as log:
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=log)
    try:
        orphans.end(7)
        assert other.poll() is None
        orphans.end(77)
        assert other.wait(5) == -signal.SIGKILL
    finally:
        other.kill()
