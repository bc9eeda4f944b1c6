"""The steps of every run, local or by URL: open, resume, ask, store, score. Needs no torch: runs by URL use it too."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import Question
from llava_consensus.evaluation.files import CONFIG, METRICS, SCORES, Record, misread
from llava_consensus.evaluation.runs import metrics
from llava_consensus.evaluation.runs.execution import Execution, Result, RunResult, check_progress
from llava_consensus.evaluation.runs.questions import Plan
from llava_consensus.evaluation.runs.store import AGAIN, Run, open_run

Ask = Callable[[Sequence[Question]], Iterable[Result]]  # the results of pending questions as they come

log = logging.getLogger(__name__)


def carry_out(
    plan: Plan, out: Path, execution: Execution, ask: Ask, device: str, check: Callable[[Run], None] | None = None
) -> RunResult:
    """Asks the open questions and scores the answers; a complete run is read.

    Args:
        plan: of the run.
        out: folder of all runs.
        execution: how it is carried out.
        ask: answers questions.
        device: that answers, for the record.
        check: is given a run that has answers before it is continued or read.
    """
    with open_run(out, plan.description, {question.index for question in plan.questions}) as folder:
        for repair in folder.repairs:
            log.warning("%s", repair)
        if check is not None and folder.answers:
            check(folder)
        for other in execution.merge:
            _merge(plan, folder, other)
        again = set(folder.errors) if execution.retry_errors else set()
        done = folder.done - again
        pending = [question for question in execution.part(plan.questions) if question.index not in done]
        stored = folder.metrics()
        if stored is not None and not pending:
            return _complete(plan, folder, stored)
        seconds = 0.0
        if pending:
            if done:
                log.info("%s: going on after %d of %d questions", folder.path, len(done), len(plan.questions))
            with folder.asking(len(plan.questions)):
                results = ask(pending)
                begun = time.perf_counter()  # one process has loaded its model by now
                _store(plan, folder, results, again, execution.progress)
                seconds = time.perf_counter() - begun
        if len(folder.done) < len(plan.questions):  # a shard
            return RunResult(folder.path, {}, len(pending))
        timing = metrics.timing(len(pending), seconds, execution.workers)
        told = {"timing": timing, "environment": metrics.environment(device)}
        folder.finish(metrics.measure(plan, folder) | told)
        return RunResult(folder.path, folder.metrics() or {}, len(pending))


def _store(plan: Plan, folder: Run, results: Iterable[Result], again: set[int], progress: bool) -> None:
    """Stores results as they come; records of questions that are asked `again` go when the first new one is there."""
    done, row = len(folder.done - again), 0
    disable = None if progress else True  # None: only on a terminal
    with tqdm(total=len(plan.questions), initial=done, unit="q", desc=plan.benchmark.name, disable=disable) as bar:
        for result in results:
            if again:
                folder.forget(again)
                again = set()
            folder.add(*result)
            row = check_progress(row, result)
            bar.update(len(result.answers) + len(result.errors))


def _merge(plan: Plan, folder: Run, out: Path) -> None:
    if not (out / folder.path.name / CONFIG).is_file():
        raise DataError(f"--merge {out}: no {folder.path.name} in it, the folder of the same run")
    if (out / folder.path.name).samefile(folder.path):
        raise DataError(f"--merge {out}: is the folder of this run itself. Give those of the other shards")
    with open_run(out, plan.description, {question.index for question in plan.questions}) as other:
        answers, errors = (
            [records[index] for index in sorted(records.keys() - folder.done)]
            for records in (other.answers, other.errors)
        )
    folder.add(answers, errors)
    log.info("%s: %d answers and %d errors of %s", folder.path, len(answers), len(errors), out)


def _complete(plan: Plan, folder: Run, stored: Record) -> RunResult:
    """Metrics of a complete run; scored again if only the scoring options differ."""
    log.info("%s: complete already, nothing was asked", folder.path)
    rescored = stored.get("choices", {}) != plan.benchmark.chosen
    if rescored or not (folder.path / SCORES).exists():
        with misread(str(folder.path / METRICS), AGAIN):
            folder.finish(metrics.measure(plan, folder) | {key: stored[key] for key in ("timing", "environment")})
    return RunResult(folder.path, folder.metrics() or {}, 0)
