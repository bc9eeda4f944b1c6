"""Shards and workers: real processes and a real Ray cluster, killed on purpose; the files must be those of one process.

Run: `pytest tests/test_engines.py`.
"""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fakes import Fake, FakeHost, Loader, config, make_place

from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation.benchmarks import Question
from llava_consensus.evaluation.files import read_lines
from llava_consensus.evaluation.runs import loop
from llava_consensus.evaluation.runs.configuration import prepare
from llava_consensus.evaluation.runs.execution import Execution
from llava_consensus.evaluation.runs.kept import Kept, kind, source_of
from llava_consensus.evaluation.runs.loop import RunResult
from llava_consensus.evaluation.runs.store import open_run
from llava_consensus.evaluation.runs.sweep import cells, sweep
from llava_consensus.evaluation.runs.workers import ENGINES, Result, Shard, check_engine
from llava_consensus.evaluation.runs.workers.base import Died, WorkerError
from llava_consensus.evaluation.runs.workers.schedule import schedule
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget

FORK = multiprocessing.get_context("fork")
FILES = ("config.json", "answers.jsonl", "errors.jsonl")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    made = make_place(tmp_path / "data", pictures=8)
    (made / "eval" / "fake" / "images" / "5.png").write_bytes(b"no picture")
    return made


def go(data: Path, out: Path, workers: int = 1, loader: Loader | None = None, engine: str = "local") -> RunResult:
    execution = Execution(batch=2, workers=workers, engine=engine, progress=False)
    return loop.run(config(data, data / "model"), out, execution, loader or Loader())


def content(result: RunResult) -> list[bytes]:
    return [(result.path / name).read_bytes() for name in FILES]


class Puppets:
    """A crew without processes; `fate` says what becomes of each shard that is given out, in turn."""

    def __init__(self, fate: Sequence[Any]) -> None:
        self.fate, self.hired, self.given = list(fate), list[int](), list[tuple[int, Shard]]()
        self.busy: list[int] = []

    def hire(self, worker: int) -> None:
        self.hired.append(worker)

    def give(self, worker: int, shard: Shard) -> None:
        assert worker in self.hired and worker not in self.busy
        self.given.append((worker, shard))
        self.busy.append(worker)

    def wait(self) -> list[tuple[int, Any]]:
        return [(self.busy.pop(0), self.fate.pop(0))]

    def dismiss(self) -> None: ...


SHARDS = [Shard((0, 1)), Shard((2, 3)), Shard((4,))]
DONE = Result([], [])


def test_a_shard_of_a_dead_worker_goes_to_a_new_one() -> None:
    crew = Puppets([Died("killed"), DONE, DONE, DONE])
    assert [shard for shard, _ in schedule(crew, SHARDS, 2)] == [SHARDS[1], SHARDS[0], SHARDS[2]]
    assert crew.hired == [0, 1, 2] and crew.given[2] == (2, SHARDS[0])


def test_of_a_shard_that_kills_workers_only_the_question_that_does_is_given_up() -> None:
    died = Died("exit code -11")
    crew = Puppets([died, died, died, died, DONE, DONE])
    assert list(schedule(crew, SHARDS[:2], 1)) == [(Shard((0,)), died), (Shard((1,)), DONE), (SHARDS[1], DONE)]
    assert [shard for _, shard in crew.given[:4]] == [SHARDS[0], SHARDS[0], Shard((0,)), Shard((0,))]


def test_workers_that_die_of_everything_stop_the_run() -> None:
    with pytest.raises(WorkerError, match=r"8 workers died one after another, .* \(out of memory\)"):
        list(schedule(Puppets([Died("out of memory")] * 9), [Shard(tuple(range(9)))], 2))


def test_an_error_in_a_worker_is_raised_as_it_is() -> None:
    with pytest.raises(DataError, match="broken"):
        list(schedule(Puppets([DONE, DataError("broken")]), SHARDS, 1))


def test_engines_are_checked_by_name() -> None:
    with pytest.raises(OptionError, match="Did you mean 'local'"):
        check_engine("locall")
    with pytest.raises(OptionError, match="workers=0 must be at least 1"):
        Execution(workers=0).check()


@pytest.mark.parametrize("engine", ENGINES)
def test_two_workers_one_killed_give_the_bytes_of_one_process(engine: str, data: Path, tmp_path: Path) -> None:
    if engine == "ray":
        pytest.importorskip("ray")
    alone = go(data, tmp_path / "alone")
    marker = tmp_path / "killed"
    try:
        together = go(data, tmp_path / "together", 2, Loader(marker), engine)
    except WorkerError as error:
        if "The current node timed out" in str(error):
            pytest.skip("Ray's own daemons do not start within the 30 s that it gives them on this busy machine")
        raise
    assert marker.exists() and together.asked == 40
    assert content(together) == content(alone) and len(read_lines(together.path / "scores.jsonl", ("correct",))) == 35
    assert {key: together.metrics[key] for key in ("score", "tokens", "errors")} == {
        key: alone.metrics[key] for key in ("score", "tokens", "errors")
    }
    assert sorted(path.name for path in together.path.iterdir()) == sorted(
        [*FILES, "scores.jsonl", "metrics.json", "lock"]
    )


def _slowly(data: Path, out: Path) -> None:
    go(data, out, 2, Loader(seconds=0.4))


def test_killed_half_way_another_number_of_workers_goes_on(data: Path, tmp_path: Path) -> None:
    alone, out = go(data, tmp_path / "alone"), tmp_path / "out"
    process = FORK.Process(target=_slowly, args=(data, out))
    process.start()
    limit = time.monotonic() + 120
    while not list(out.glob("*/shards/*.jsonl")) and time.monotonic() < limit:
        time.sleep(0.02)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    finished = sum(len(path.read_bytes().splitlines()) for path in out.glob("*/shards/*.jsonl"))
    assert 0 < finished < 40
    time.sleep(1.0)  # its workers see that it is gone
    again = go(data, out, 3)
    assert again.asked <= 40 - finished and content(again) == content(alone)


def test_a_single_process_goes_on_with_what_workers_left(data: Path, tmp_path: Path) -> None:
    alone = go(data, tmp_path / "alone")
    lines = [json.loads(line) for line in (alone.path / "answers.jsonl").read_bytes().splitlines()]
    plan = prepare(config(data, data / "model"))
    with open_run(tmp_path / "out", plan.description, range(40)) as folder:
        folder.add_shard("00000008-00000011", lines[8:12], [])
    again = go(data, tmp_path / "out")
    assert again.asked == 36 and content(again) == content(alone)


def test_damage_in_a_shard_stops_with_file_and_line(data: Path, tmp_path: Path) -> None:
    plan = prepare(config(data, data / "model"))
    with open_run(tmp_path / "out", plan.description, range(40)) as folder:
        (folder.path / "shards").mkdir()
        (folder.path / "shards" / "00000000-00000001.jsonl").write_text('{"question_id": 1, "te')
    with pytest.raises(DataError, match=r"00000000-00000001\.jsonl, line 1: damaged"):
        go(data, tmp_path / "out")


def test_sweep_checks_first_loads_once_and_goes_on_past_a_failure(data: Path, tmp_path: Path) -> None:
    loads: list[str] = []

    def load(*key: Any) -> FakeHost:
        loads.append(key[0])
        return FakeHost()

    methods = [make("full"), make("consensusdrop", alpha=1.0, fuser="convex"), make("random")]
    full = config(data, data / "model", method="full")
    grid = cells([full], methods, [Budget(32), Budget(64), Budget(64)])
    assert [(cell.plan.description["method"], cell.plan.description["tokens"]) for cell in grid] == [
        ("full", None),
        *((name, count) for count in (64, 32) for name in ("consensusdrop", "random")),
    ]
    assert grid[1].plan.description == prepare(replace(full, method=methods[1], budget=Budget(64))).description
    still = Execution(progress=False)
    done = list(sweep(grid, tmp_path / "out", still, load))
    assert loads == [str(data / "model")] and len(done) == 5 and all(cell.result for cell in done)
    assert (done[0].name, done[1].name) == ("fake full all", "fake consensusdrop:alpha=1.0 64")
    again = list(sweep(grid, tmp_path / "out", still, load))
    assert len(loads) == 1 and [cell.result.asked for cell in again if cell.result] == [0] * 5
    damaged = done[1].result
    assert damaged
    (damaged.path / "answers.jsonl").write_text("{}\n{}\n")
    third = list(sweep(grid, tmp_path / "out", still, load))
    assert [bool(cell.error) for cell in third] == [False, True, False, False, False]


def test_a_sweep_reads_the_questions_of_a_benchmark_once(data: Path) -> None:
    reads: list[Path] = []

    class Counted(Fake):
        def load(self, data: Path) -> list[Question]:
            reads.append(data)
            return super().load(data)

    counted = Counted()
    full = config(data, data / "model", method="full", benchmark=counted)
    grid = cells([full], [make("consensusdrop"), make("random")], [Budget(64), Budget(32)])
    assert len(grid) == 5 and reads == [data]


def test_a_sweep_matches_every_method_but_the_full_model(data: Path) -> None:
    full = config(data, data / "model", method="full", match="flops")
    found = [cell.plan for cell in cells([full], [make("random")], [Budget(64)])]
    assert [plan.match for plan in found] == ["kept", "flops"]
    assert ["match" in plan.description for plan in found] == [False, True]


def test_a_wrong_cell_stops_a_sweep_before_anything_is_loaded(data: Path) -> None:
    full = config(data, data / "model", method="full")
    with pytest.raises(DataError, match="missing file"):
        cells([full, replace(full, data=data / "nowhere")], [make("random")], [Budget(64)])


def test_the_runs_of_a_sweep_share_encodings(data: Path, tmp_path: Path) -> None:
    host = FakeHost()
    methods = [make(name) for name in ("consensusdrop", "vispruner", "random")]
    grid = cells([config(data, data / "model", method="full")], methods, [Budget(64), Budget(32)])
    done = list(sweep(grid, tmp_path / "out", Execution(progress=False), lambda *_: host))
    assert all(cell.result for cell in done)
    pictures = sorted(set(host.encoded))
    kinds = 3  # all tokens; attention and features, of two methods and budgets; fingerprints, at two budgets
    assert sorted(host.encoded) == sorted(pictures * kinds)
    assert kind(make("tome")) is None  # it merges inside the tower, so that its encodings depend on the budget


def test_shared_encodings_are_bounded_and_go_after_the_last_run_that_needs_them(data: Path) -> None:
    plans = [prepare(config(data, data / "model", tokens=tokens)) for tokens in (64, 32)]
    path = data / "eval" / "fake" / "images" / "0.png"
    kept = Kept(map(source_of, plans), memory=24)
    with kept.run(plans[0]) as shelf:
        assert shelf is not None and shelf.get(path) is None
        shelf.put(path, cast(Any, [torch.zeros(4)]))
        shelf.put(path.with_name("1.png"), cast(Any, [torch.zeros(4)]))  # 16 bytes that have no room
    with kept.run(plans[1]) as shelf:
        assert shelf is not None and shelf.get(path) is not None and shelf.get(path.with_name("1.png")) is None
    with kept.run(plans[1]) as shelf:
        assert shelf is not None and shelf.get(path) is None
