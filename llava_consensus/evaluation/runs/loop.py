"""The evaluation loop: check, load, match, attach, ask, append, score; and resume a killed run.

`run(RunConfig(make("gqa"), make("consensusdrop"), Budget(64)), Path("results"))` is what `llava-consensus eval gqa
--tokens 64` does. Everything cheap is checked before weights load (`configuration.py`). The vision tower runs once per
image, however many questions there are about it (`pictures.py`). With several workers each has an `Asker` of its own
for its shards (`workers.py`), and the run ends with the same files. Stopped at any moment, the same call resumes, with
any number of workers, asks nothing twice and ends with the metrics of an undisturbed run (`store.py`).
"""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from llava_consensus.errors import ConsensusError, DataError, ImageError, OptionError, QuestionError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.benchmarks import Question, known_benchmarks
from llava_consensus.evaluation.checksums import changed_pictures, picture_checksums
from llava_consensus.evaluation.files import ANSWERS, CONFIG, METRICS, SCORES, Record, misread
from llava_consensus.evaluation.models import CLIPS, Answer, Encoding, Loading, Runner
from llava_consensus.evaluation.progress import counted
from llava_consensus.evaluation.runs import metrics
from llava_consensus.evaluation.runs.configuration import RunConfig, RunPlan, prepare
from llava_consensus.evaluation.runs.execution import (
    DEATH,
    LONGEST,
    Execution,
    Result,
    RunResult,
    check_progress,
    describe,
    error_record,
    raise_if_device_failed,
)
from llava_consensus.evaluation.runs.metrics import AnswerCosts, budget_of, shape_of
from llava_consensus.evaluation.runs.pictures import CAPACITY, EncodingCache, ModelFailed, reader
from llava_consensus.evaluation.runs.store import AGAIN, Run, answer_record, open_run, run_name
from llava_consensus.evaluation.runs.workers import Outcome, Shard, is_picklable, one_by_one, run_shards
from llava_consensus.reduction.budget import Budget, Share

log = logging.getLogger(__name__)

BATCHES = 4  # in a shard
DECIMALS = 6  # of measures

RunnerLoader = Callable[[str, Loading, Mapping[str, str]], Runner]  # model, loading, options of the host


def run(
    config: RunConfig, out: Path, execution: Execution | None = None, runner_loader: RunnerLoader | None = None
) -> RunResult:
    """Evaluates one configuration, resumes it, or reads its complete result.

    Args:
        config: what is measured.
        out: folder of all runs; this one gets a folder of its own in it.
        execution: how it is carried out.
        runner_loader: instead of `models.load`; importable from other processes, for several workers and to isolate a
            question that kills its process.
    Raises:
        ConsensusError: everything the user can mend, see `errors.py`; Interrupted on Ctrl-C.
    """
    execution = execution or Execution()
    execution.check()
    return evaluate(prepare(config), out, execution, runner_loader or models.load)


def evaluate(plan: RunPlan, out: Path, execution: Execution, runner_loader: RunnerLoader) -> RunResult:
    """Like `run`, for a configuration that is checked already."""
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
        stored = folder.metrics()
        if folder.kept and stored is not None:
            return _complete(plan, folder, stored)
        for other in execution.merge:
            _merge(plan, folder, other)
        again = _questions_to_retry(plan, folder, execution)
        done = folder.done - again
        pending = [question for question in execution.part(plan.questions) if question.index not in done]
        stored = folder.metrics()
        if stored is not None and not pending:
            return _complete(plan, folder, stored)
        seconds = 0.0
        if pending:
            if done:
                log.info("%s: going on after %d of %d questions", folder.path, len(done), len(plan.questions))
            _warn_missing(plan, pending)
            with folder.asking(len(plan.questions)):
                seconds = _ask(plan, folder, pending, again, execution, runner_loader)
        if len(folder.done) < len(plan.questions):  # a shard
            return RunResult(folder.path, {}, len(pending))
        timing = metrics.timing(len(pending), seconds, execution.workers)
        environment = metrics.environment(plan.loading.device)
        folder.finish(metrics.measure(plan, folder) | {"timing": timing, "environment": environment})
        return RunResult(folder.path, folder.metrics() or {}, len(pending))


def _merge(plan: RunPlan, folder: Run, out: Path) -> None:
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


def _warn_missing(plan: RunPlan, pending: Sequence[Question]) -> None:
    if plan.content is not None:  # they are inside a file
        return
    folder = plan.benchmark.place(plan.data) / plan.benchmark.images
    names = dict.fromkeys(name for question in pending for name in question.images)
    absent = [name for name in names if not os.path.exists(folder / name)]  # also for a name that no file can have
    if absent:
        name = plan.benchmark.name
        command = f". What is missing: llava-consensus data check {name} --data {plan.data}"
        log.warning(
            "%s: %d of %d images or videos are not there, %s first, and questions about them get no answer%s",
            folder, len(absent), len(names), absent[0], command if name in known_benchmarks() else "",
        )  # fmt: skip


def _questions_to_retry(plan: RunPlan, folder: Run, execution: Execution) -> set[int]:
    """Indexes of questions to ask again: their images have changed since or can be read now, or the model failed at
    them and `retry_errors` is set.
    """
    failed = {
        question.index
        for question in plan.questions
        if (error := folder.errors.get(question.index)) is not None
        and (execution.retry_errors or ("cause" not in error and _opens(plan, question)))
    }
    answered = (question for question in plan.questions if question.index in folder.answers)
    pictures = {question.index: plan.pictures(question) for question in answered}
    changed = changed_pictures((folder.path / ANSWERS).stat().st_mtime_ns, pictures, folder.answers)
    if changed:
        log.warning(
            "%s: the images of %d questions were changed since; they are asked again", folder.path, len(changed)
        )
    return {*failed, *changed}


def _opens(plan: RunPlan, question: Question) -> bool:
    try:
        for path in plan.pictures(question):
            reader(plan)(path)
    except ImageError:
        return False
    return True


def _complete(plan: RunPlan, folder: Run, stored: Record) -> RunResult:
    """Metrics of a complete run; scored anew if only the scoring options differ."""
    log.info("%s: complete already, nothing was asked", folder.path)
    rescored = stored.get("choices", {}) != plan.benchmark.chosen
    if folder.kept and rescored:
        raise DataError(
            f"{folder.path}: was scored with other options and kept without its answers, so it cannot be scored "
            "again. Give another --out"
        )
    if rescored or not (folder.path / SCORES).exists():
        with misread(str(folder.path / METRICS), AGAIN):
            folder.finish(metrics.measure(plan, folder) | {key: stored[key] for key in ("timing", "environment")})
    return RunResult(folder.path, folder.metrics() or {}, 0)


def _ask(
    plan: RunPlan, folder: Run, pending: list[Question], again: set[int], execution: Execution, load: RunnerLoader
) -> float:
    """Asks what is pending and stores it as it comes. Returns the seconds it took; loading is counted only if several
    workers load at different times.

    Args:
        plan, folder, pending, execution, load: see `evaluate`.
        again: questions of which the folder has a record, which goes when the first new one comes.
    """
    start = time.perf_counter()
    questions = {question.index: question for question in pending}
    if execution.workers > 1:
        size = BATCHES * execution.batch
        shards = [tuple(questions)[first : first + size] for first in range(0, len(pending), size)]
        outcomes = run_shards(WorkerFactory(plan, execution.batch, execution.workers, load), execution.workers, shards)
        _store(plan, folder, _recorded(outcomes, questions), again, execution.progress)
        return time.perf_counter() - start
    deadly = {*folder.in_flight(), *(index for index, one in folder.errors.items() if one.get("cause") == DEATH)}
    alone = [question for question in pending if question.index in deadly]
    rest = [question for question in pending if question.index not in deadly]
    if alone and is_picklable(load):
        outcomes = one_by_one(WorkerFactory(plan, 1, 1, load), [question.index for question in alone])
        _store(plan, folder, _recorded(outcomes, questions), again, execution.progress)
        alone = []
    if alone or rest:
        runner = load(plan.model, plan.loading, plan.host_options)
        start = time.perf_counter()
        asker = Asker(plan, runner, metrics.budget_of(plan, runner))
        for group, size in ((alone, 1), (rest, execution.batch)):
            _store(plan, folder, _in_this_process(asker, folder, group, size), again, execution.progress)
    folder.clear_note()
    return time.perf_counter() - start


def _store(plan: RunPlan, folder: Run, results: Iterator[Result], again: set[int], progress: bool) -> None:
    done, total, row = len(folder.done - again), len(plan.questions), 0
    with counted(total=total, initial=done, unit="q", desc=plan.benchmark.name, shown=progress) as bar:
        for result in results:
            if again:
                folder.forget(again)
                again.clear()
            folder.add(*result)
            row = check_progress(row, result)
            bar.update(len(result.answers) + len(result.errors))


def _in_this_process(asker: "Asker", folder: Run, questions: list[Question], batch: int) -> Iterator[Result]:
    """Results in file order; a note on disk holds the questions in flight."""
    results = asker.batches(questions, batch)
    for first in range(0, len(questions), batch):
        with folder.noting([question.index for question in questions[first : first + batch]]):
            yield next(results)  # stored while the note is still there


def _recorded(outcomes: Iterable[Outcome], questions: Mapping[int, Question]) -> Iterator[Result]:
    """Results of workers; an error record for a question that kills them."""
    said = "the process that asks only this question dies"
    for shard, result in outcomes:
        yield result or Result([], [error_record(questions[index], said, DEATH) for index in shard])


@dataclass(frozen=True)
class Asker:
    """A run, the runner that answers for it, and the budget its method is given there."""

    plan: RunPlan
    runner: Runner
    budget: Budget | Share

    def batches(self, questions: Sequence[Question], size: int) -> Iterator[Result]:
        """Answers and errors of each `size` questions, in their order, with the run's method attached."""
        files = [self.plan.pictures(question) for question in questions]
        capacity = CAPACITY // max(1, self.plan.benchmark.frames)
        cache = EncodingCache(self.runner, files, reader(self.plan), capacity)
        with self.runner.attach(self.plan.method, self.budget):
            for first in range(0, len(questions), size):
                group = questions[first : first + size]
                yield self._results(group, cache.fetch(files[first : first + size]))

    def _results(self, questions: Sequence[Question], encodings: Sequence[list[Encoding] | ImageError]) -> Result:
        """Answers, and a record of each question that cannot be asked or that the model fails at."""
        errors, asked = [], []
        for question, own in zip(questions, encodings, strict=True):
            if isinstance(own, ImageError):
                errors.append(error_record(question, str(own), "model" if isinstance(own, ModelFailed) else None))
            elif len(question.text) > LONGEST:
                said = f"the question has {len(question.text):,} characters, and at most {LONGEST:,} are asked"
                errors.append(error_record(question, said, "length"))
            else:
                asked.append((question, own))
        try:
            return Result(self._answer(asked), errors)
        except QuestionError:
            pass
        except ConsensusError:
            raise
        except Exception:  # one of them, or all together, is more than the model can do
            log.info("a batch of %d questions failed; each is asked alone", len(asked))
        return _joined([Result([], errors), *(self._one(question, own) for question, own in asked)])

    def _one(self, question: Question, own: list[Encoding]) -> Result:
        try:
            return Result(self._answer([(question, own)]), [])
        except QuestionError as error:
            return Result([], [error_record(question, str(error), "question")])
        except ConsensusError:
            raise
        except Exception as error:  # anything a model can raise about one question
            raise_if_device_failed(error, f"question {question.index}")
            return Result([], [error_record(question, describe(error), "model")])

    def _answer(self, asked: Sequence[tuple[Question, list[Encoding]]]) -> list[Record]:
        if not asked:
            return []
        prompts = [self.plan.prompt(question) for question, _ in asked]
        answers = self.runner.answer([encoded for _, encoded in asked], prompts)
        return [self._record(question, answer) for (question, _), answer in zip(asked, answers, strict=True)]

    def _record(self, question: Question, answer: Answer) -> Record:
        """The answer's line; its metadata has visual tokens before and after, and costs."""
        plan, budget = self.plan, self.budget
        budgets = [budget.of(outcome.before).tokens for outcome in answer.outcomes] if isinstance(budget, Share) else []
        metadata = {
            "before": answer.before,
            "after": answer.after,
            "structural": answer.structural,
            **({"share": budget.share, "budgets": budgets} if isinstance(budget, Share) else {}),
            **_measures(answer),
            "notes": list(answer.notes),
            **({"videos": CLIPS if plan.clips else "frames"} if plan.benchmark.frames else {}),
            **self._costs.of(answer.prefill, plan.shown(question), budgets, answer.outcomes),
            **(picture_checksums(plan.pictures(question)) if plan.content is None else {}),
        }
        return answer_record(self._run, question, plan.model, answer.text, metadata)

    @cached_property
    def _run(self) -> str:
        return run_name(self.plan.description)

    @cached_property
    def _costs(self) -> AnswerCosts:
        return AnswerCosts(self.plan.method, self.budget, shape_of(self.plan, self.runner))


def _joined(results: Iterable[Result]) -> Result:
    parts = list(results)
    return Result([one for part in parts for one in part.answers], [one for part in parts for one in part.errors])


def _measures(answer: Answer) -> Record:
    """Measures that the method reports of its choices, per image; empty for a method that reports none."""
    measured = [reduction.measures for outcome in answer.outcomes for _, reduction in outcome.reductions]
    pictures = [
        {name: values[0].double().round(decimals=DECIMALS).tolist() for name, values in measures.items()}
        for measures in measured
        if measures
    ]
    return {"measures": pictures} if pictures else {}


@dataclass(frozen=True)
class WorkerFactory:
    """Makes what a worker does, in the worker's process: it loads a runner of its own, then asks shards."""

    plan: RunPlan
    batch: int
    workers: int
    loader: RunnerLoader

    def __call__(self, number: int) -> Callable[[Shard], Result]:
        """The function from a shard to its records. Workers share the GPUs, or the cores of the CPU."""
        import torch

        plan, device = self.plan, self.plan.loading.device
        if device == "cuda":
            device = f"cuda:{number % torch.cuda.device_count()}"
        if device == "cpu":
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.workers))
        runner = self.loader(plan.model, replace(plan.loading, device=device), plan.host_options)
        asker = Asker(plan, runner, budget_of(plan, runner))
        questions = {question.index: question for question in plan.questions}
        return lambda shard: _joined(asker.batches([questions[index] for index in shard], self.batch))
