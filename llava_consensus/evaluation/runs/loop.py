"""The whole evaluation loop on one page: check, load, match, attach, ask, append, score; and go on where a killed run
stopped.

`run(RunConfig(make("gqa"), make("consensusdrop"), Budget(64)), Path("results"))` is what `llava-consensus eval gqa
--tokens 64` does. Everything cheap is checked before weights load (`configuration.py`). The vision tower runs once per
picture, however many questions there are about it (`pictures.py`). With several workers the questions are asked in
shards (`workers.py`), and the run ends with the same files. Stopped at any moment, the same call goes on, with as many
workers as it is told, asks nothing twice and ends with the metrics of an undisturbed run (`store.py`).
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from llava_consensus.errors import ConsensusError, DataError, Interrupted, OptionError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.benchmarks import Question
from llava_consensus.evaluation.files import ANSWERS, METRICS, SCORES, Record, check_shape
from llava_consensus.evaluation.runs import metrics
from llava_consensus.evaluation.runs.batches import Asker, HostLoader, WorkerFactory
from llava_consensus.evaluation.runs.configuration import RunConfig, RunPlan, changed_pictures, prepare
from llava_consensus.evaluation.runs.execution import Execution, Result, check_progress, death_records
from llava_consensus.evaluation.runs.store import AGAIN, Deaths, Run, open_run, problems
from llava_consensus.evaluation.runs.workers import Died, conduct

log = logging.getLogger(__name__)

BATCHES = 4  # in a shard


@dataclass(frozen=True)
class RunResult:
    """Where a run is, what it measured (the content of metrics.json) and how many questions this call asked."""

    path: Path
    metrics: Record
    asked: int


def run(
    config: RunConfig, out: Path, execution: Execution | None = None, host_loader: HostLoader | None = None
) -> RunResult:
    """Evaluates one configuration, or goes on with it, or reads what is complete.

    Args:
        config: what is measured.
        out: folder of all runs; this one gets a folder of its own in it.
        execution: how it is carried out.
        host_loader: instead of `models.load`; with several workers it must be importable from their processes.
    Raises:
        ConsensusError: everything the user can mend, see `errors.py`; Interrupted on Ctrl-C.
    """
    execution = execution or Execution()
    execution.check()
    return evaluate(prepare(config), out, execution, host_loader or models.load)


def evaluate(plan: RunPlan, out: Path, execution: Execution, host_loader: HostLoader) -> RunResult:
    """As `run`, for a configuration that is checked already."""
    if plan.content is None and not execution.allow_outside:
        plan.check_inside()
    if plan.loading.device_map and execution.workers > 1:
        raise OptionError(
            f"workers={execution.workers} and device_map={plan.loading.device_map!r}: a map takes all devices for one "
            "model. Take one worker"
        )
    with open_run(out, plan.description, {question.index for question in plan.questions}) as folder:
        for repair in folder.repairs:
            log.warning("%s", repair)
        _forget(plan, folder, execution)
        done = folder.done
        pending = [question for question in plan.questions if question.index not in done]
        stored = folder.metrics()
        if stored is not None and not pending:
            return _complete(plan, folder, stored, execution)
        seconds = 0.0
        if pending:
            if done:
                log.info("%s: going on after %d of %d questions", folder.path, len(done), len(plan.questions))
            try:
                seconds = _ask(plan, folder, pending, execution, host_loader)
            except KeyboardInterrupt:
                count = f"{len(folder.done)} of {len(plan.questions)}"
                raise Interrupted(f"stopped after {count} questions. The same command goes on: {folder.path}") from None
            except ConsensusError:
                folder.leave_nothing()
                raise
        timing = metrics.timing(len(pending), seconds, execution.workers)
        folder.finish(metrics.measure(plan, folder) | {"timing": timing, "environment": metrics.environment(plan)})
        execution.check_errors(len(folder.errors), len(plan.questions))
        return RunResult(folder.path, folder.metrics() or {}, len(pending))


def _forget(plan: RunPlan, folder: Run, execution: Execution) -> None:
    """Leaves to be asked again what failed, if that is wished, and what was asked about pictures since changed."""
    failed = list(folder.errors) if execution.retry_errors else []
    answered = (question for question in plan.questions if question.index in folder.answers)
    pictures = {question.index: plan.pictures(question) for question in answered}
    changed = changed_pictures((folder.path / ANSWERS).stat().st_mtime_ns, pictures, folder.answers)
    if changed:
        log.warning(
            "%s: the pictures of %d questions were changed since; they are asked again", folder.path, len(changed)
        )
    if failed or changed:
        folder.forget([*failed, *changed])


def _complete(plan: RunPlan, folder: Run, stored: Record, execution: Execution) -> RunResult:
    """What a complete run measured; scored anew where only the way of scoring is another one."""
    check_shape(stored, metrics.SHAPE, folder.path / METRICS, AGAIN)
    scored = (folder.path / SCORES).exists()
    changed = problems(folder.path) if scored else []
    if changed:
        raise DataError(f"{changed[0]}. llava-consensus report verify {folder.path} tells all")
    log.info("%s: complete already, nothing was asked", folder.path)
    if stored.get("choices", {}) != plan.benchmark.chosen or not scored:
        folder.finish(metrics.measure(plan, folder) | {key: stored[key] for key in ("timing", "environment")})
    execution.check_errors(len(folder.errors), len(plan.questions))
    return RunResult(folder.path, folder.metrics() or {}, 0)


def _ask(plan: RunPlan, folder: Run, pending: list[Question], execution: Execution, load: HostLoader) -> float:
    """Asks what is pending and stores it as it comes. Returns the seconds it took; loading is counted only where
    several workers load at different times.
    """
    if execution.workers == 1:
        host = load(plan.model, plan.loading, plan.host_options)
        results = _alone(Asker(plan, host, metrics.budget_of(plan, host)), folder, pending, execution.batch)
    else:
        results = _together(plan, pending, execution, load)
    done, total, row = len(folder.done), len(plan.questions), 0
    start = time.perf_counter()
    with tqdm(total=total, initial=done, unit="q", desc=plan.benchmark.name, disable=not execution.progress) as bar:
        for result in results:
            folder.add(*result)
            row = check_progress(row, result)
            execution.check_errors(len(folder.errors), total)
            bar.update(len(result.answers) + len(result.errors))
    Deaths(folder.path).forget()
    return time.perf_counter() - start


def _alone(asker: Asker, folder: Run, pending: list[Question], batch: int) -> Iterator[Result]:
    """In this process, in file order. What a former process died of comes first, each question alone."""
    deaths = Deaths(folder.path)
    fatal, suspects = deaths.fatal(pending), deaths.suspects(pending)
    if fatal:
        yield Result([], death_records(fatal, "see the log of the system"))
    others = [question for question in pending if question not in (*fatal, *suspects)]
    for questions, size in ((suspects, 1), (others, batch)):
        results = asker.batches(questions, size)
        for first in range(0, len(questions), size):
            with deaths.asking(questions[first : first + size]):
                result = next(results)
                yield result  # it is written down while the note still stands


def _together(plan: RunPlan, pending: list[Question], execution: Execution, load: HostLoader) -> Iterator[Result]:
    """By several workers, as their shards are done."""
    size = BATCHES * execution.batch
    shards = [
        tuple(question.index for question in pending[first : first + size]) for first in range(0, len(pending), size)
    ]
    factory = WorkerFactory(plan, execution.batch, execution.workers, load)
    questions = {question.index: question for question in pending}
    for shard, outcome in conduct(factory, execution.workers, shards):
        if isinstance(outcome, Died):
            outcome = Result([], death_records([questions[index] for index in shard], outcome.reason))
        yield outcome
