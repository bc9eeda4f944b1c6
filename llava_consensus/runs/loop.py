"""The whole evaluation loop on one page: check, load, attach, ask, append, score; and go on where a killed run stopped.

`run(RunConfig("gqa", tokens=64), Path("results"))` is what `llava-consensus eval gqa --tokens 64` does.
Everything cheap is checked before weights load (`plan.py`). The vision tower runs once per picture, however many
questions there are about it (`asking.py`). With several workers the questions are asked in shards (`engines/`), and the
run ends with the same files. Stopped at any moment, the same call goes on, with as many workers as it is told, asks
nothing twice and ends with the metrics of an undisturbed run (`records.py`).
"""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from llava_consensus.benchmarks import Question
from llava_consensus.errors import ConsensusError, OptionError
from llava_consensus.hosts.base import Host
from llava_consensus.runs import metrics
from llava_consensus.runs.asking import Asker, HostLoader, Worker, load_host
from llava_consensus.runs.configuration import Plan, RunConfig, prepare
from llava_consensus.runs.store import Record, Run, open_run
from llava_consensus.runs.workers import Shard, check_engine, conduct

log = logging.getLogger(__name__)

SHARD = 4  # batches


class Interrupted(ConsensusError):
    """Ctrl-C: the run is intact and can go on."""

    exit_code = 130


@dataclass(frozen=True)
class Pace:
    """How fast a run goes. Nothing of it changes an answer, so nothing of it is in the run's name.

    Args:
        batch: questions answered together.
        workers: processes, each with a model of its own, on a device of its own where there are several.
        engine: name in ENGINES, where the workers are; looked at only where there are several.
        progress: whether a bar with questions per second is shown.
    """

    batch: int = 16
    workers: int = 1
    engine: str = "local"
    progress: bool = True

    def check(self) -> None:
        """Raises OptionError for numbers below 1 or an engine that is not there."""
        for name in ("batch", "workers"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)} must be at least 1")
        check_engine(self.engine)


@dataclass(frozen=True)
class RunResult:
    """Where a run is, what it measured (the content of metrics.json) and how many questions this call asked."""

    path: Path
    metrics: Record
    asked: int


def run(config: RunConfig, out: Path, pace: Pace | None = None, host_loader: HostLoader = load_host) -> RunResult:
    """Evaluates one configuration, or goes on with it, or reads what is complete.

    Args:
        config: what is measured.
        out: folder of all runs; this one gets a folder of its own in it.
        pace: how fast.
        host_loader: instead of `hosts.load`; with several workers it must be importable from their processes.
    Raises:
        ConsensusError: everything the user can mend, see `errors.py`; Interrupted on Ctrl-C.
    """
    pace = pace or Pace()
    pace.check()
    plan = prepare(config)
    with open_run(out, plan.description, {question.index for question in plan.questions}) as folder:
        for repair in folder.repairs:
            log.warning("%s", repair)
        done = folder.done
        pending = [question for question in plan.questions if question.index not in done]
        stored = folder.metrics()
        if stored is not None and not pending:
            log.info("%s: complete already, nothing was asked", folder.path)
            if stored.get("choices", {}) != plan.benchmark.chosen or not folder.scored:  # asked the same, score again
                folder.finish(metrics.measure(plan, folder) | {key: stored[key] for key in ("timing", "environment")})
            return RunResult(folder.path, folder.metrics() or {}, 0)
        if pending and done:
            log.info("%s: going on after %d of %d questions", folder.path, len(done), len(plan.questions))
        seconds = 0.0
        if pending:
            try:
                seconds = _ask(plan, folder, pending, pace, host_loader)
            except KeyboardInterrupt:
                count = f"{len(folder.done)} of {len(plan.questions)}"
                raise Interrupted(f"stopped after {count} questions. The same command goes on: {folder.path}") from None
        timing = metrics.timing(len(pending), seconds, pace.workers)
        folder.finish(metrics.measure(plan, folder) | {"timing": timing, "environment": metrics.environment(plan)})
        return RunResult(folder.path, folder.metrics() or {}, len(pending))


def _ask(plan: Plan, folder: Run, pending: list[Question], pace: Pace, loader: HostLoader) -> float:
    """Asks what is pending and stores it as it comes. Returns the seconds it took; loading is counted only where
    several workers load at different times.
    """
    if pace.workers == 1:
        host = loader(plan.description["model"], plan.device, plan.description["dtype"])
        _say_full(plan, host)
        steps = _alone(plan, folder, pending, pace, host)
    else:
        steps = _together(plan, folder, pending, pace, loader)
    done, total = len(folder.done), len(plan.questions)
    start = time.perf_counter()
    with tqdm(total=total, initial=done, unit="q", desc=plan.benchmark.name, disable=not pace.progress) as bar:
        for count in steps:
            bar.update(count)
    return time.perf_counter() - start


def _alone(plan: Plan, folder: Run, pending: list[Question], pace: Pace, host: Host) -> Iterator[int]:
    """In this process, in file order, each batch appended; yields how many questions it was."""
    for answers, errors in Asker(plan, host).batches(pending, pace.batch):
        folder.add(answers, errors)
        yield len(answers) + len(errors)


def _together(plan: Plan, folder: Run, pending: list[Question], pace: Pace, loader: HostLoader) -> Iterator[int]:
    """By several workers, each shard stored in one step; yields how many questions it was."""
    shards = cut(pending, SHARD * pace.batch)
    factory = Worker(plan, folder.path.resolve(), pace.batch, pace.workers, loader)
    for shard, result in conduct(pace.engine, pace.workers, factory, shards):
        folder.add_shard(shard.name, *result)
        yield len(shard.indexes)


def cut(questions: Sequence[Question], size: int) -> list[Shard]:
    """Shards of at most `size` questions in their order."""
    indexes = [question.index for question in questions]
    return [Shard(tuple(indexes[first : first + size])) for first in range(0, len(indexes), size)]


def _say_full(plan: Plan, host: Host) -> None:
    if plan.budget.tokens >= host.visual_tokens:
        log.info(
            "tokens=%d: this model has %d visual tokens per image, so this is the full model",
            plan.budget.tokens,
            host.visual_tokens,
        )
