"""The evaluation loop: check, load, match, attach, ask, append, score; and resume a killed run.

`run(RunConfig(make("gqa"), make("consensusdrop"), Budget(64)), Path("results"))` does the same as `llava-consensus eval
gqa --tokens 64`. Everything cheap is checked before weights load (`configuration.py`). The vision tower runs once per
image, however many questions there are about it (`images.py`). With several workers each has its own `Asker`
for its shards (`workers.py`), and the run ends with the same files. Stopped at any moment, the same call resumes, with
any number of workers, asks nothing twice and ends with the metrics of an undisturbed run (`store.py`).
"""

import logging
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from llava_consensus.errors import ConsensusError, ImageError, OptionError, QuestionError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.benchmarks import Question
from llava_consensus.evaluation.files import Record
from llava_consensus.evaluation.models import CLIPS, Answer, Encoding, Loading, Runner
from llava_consensus.evaluation.runs.configuration import RunConfig, RunPlan, prepare
from llava_consensus.evaluation.runs.driver import carry_out
from llava_consensus.evaluation.runs.execution import (
    LONGEST,
    Execution,
    Result,
    RunResult,
    describe,
    error_record,
    raise_if_device_failed,
)
from llava_consensus.evaluation.runs.images import CAPACITY, EncodingCache, ModelFailed, reader
from llava_consensus.evaluation.runs.metrics import AnswerCosts, budget_of, shape_of
from llava_consensus.evaluation.runs.store import ASKING, answer_record, run_name
from llava_consensus.evaluation.runs.workers import Shard, run_apart, run_shards
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
        config: model, method, budget and benchmark.
        out: folder of all runs; this one gets a subfolder.
        execution: how it is carried out.
        runner_loader: instead of `models.load`; importable from other processes, for several workers.
    Raises:
        ConsensusError: everything the user can mend, see `errors.py`; Interrupted on Ctrl-C.
    """
    execution = execution or Execution()
    execution.check()
    return evaluate(prepare(config), out, execution, runner_loader or models.load)


def evaluate(plan: RunPlan, out: Path, execution: Execution, runner_loader: RunnerLoader) -> RunResult:
    """Like `run`, for a configuration that is checked already."""
    if plan.benchmark.read_image is None and not execution.allow_outside:
        plan.check_inside()
    if plan.loading.device_map and execution.workers > 1:
        raise OptionError(
            f"workers={execution.workers} and device_map={plan.loading.device_map!r}: a map takes all devices for one "
            "model. Take one worker"
        )

    asking = out / run_name(plan.description) / ASKING
    factory = WorkerFactory(plan, asking, execution.batch, execution.workers, runner_loader)

    def ask(pending: Sequence[Question]) -> Iterator[Result]:
        _warn_missing(plan, pending)
        suspects = _suspects(asking, pending, runner_loader)
        if suspects:
            return _suspects_first(pending, suspects)
        if execution.workers > 1:
            size, indexes = BATCHES * execution.batch, tuple(question.index for question in pending)
            shards = [indexes[first : first + size] for first in range(0, len(indexes), size)]
            return run_shards(factory, execution.workers, shards)
        runner = runner_loader(plan.model, plan.loading, plan.host_options)
        return Asker(plan, runner, budget_of(plan, runner), asking).batches(pending, execution.batch)

    def _suspects_first(pending: Sequence[Question], suspects: Mapping[int, Question]) -> Iterator[Result]:
        log.warning("a process ended at one of %d questions: each is asked in a process apart first", len(suspects))
        for result in run_apart(replace(factory, workers=1), list(suspects), asking):
            if isinstance(result, int):
                said = "every process that asked it ended: a crash, or too little memory"
                result = Result([], [error_record(suspects[result], said, "model")])
            yield result
        others = [question for question in pending if question.index not in suspects]
        if others:
            yield from ask(others)

    return carry_out(plan, out, execution, ask, plan.loading.device)


def _warn_missing(plan: RunPlan, pending: Sequence[Question]) -> None:
    if plan.benchmark.read_image is not None:  # they are inside a file
        return
    names = dict.fromkeys(name for question in pending for name in question.images)
    absent = [name for name in names if not os.path.exists(plan.folder / name)]
    if absent:
        log.warning(
            "%s: %d of %d images or videos are not there, %s first, and questions about them get no answer. When they "
            "are there, --retry-errors asks these questions",
            *(plan.folder, len(absent), len(names), absent[0]),
        )


def _suspects(asking: Path, pending: Sequence[Question], load: RunnerLoader) -> dict[int, Question]:
    """The pending questions at which a process that is gone was; none if another process cannot load the model."""
    try:
        pickle.dumps(load)
        asked = {int(index) for index in asking.read_bytes().split()}
    except (OSError, ValueError, AttributeError, TypeError, pickle.PicklingError):
        return {}
    return {question.index: question for question in pending if question.index in asked}


@dataclass(frozen=True)
class Asker:
    """A run, the runner that answers for it, its budget there, and the file that lists its questions."""

    plan: RunPlan
    runner: Runner
    budget: Budget | Share
    asking: Path

    def batches(self, questions: Sequence[Question], size: int) -> Iterator[Result]:
        """Answers and errors of each `size` questions, in their order, with the run's method attached."""
        files = [self.plan.images(question) for question in questions]
        capacity = CAPACITY // max(1, self.plan.benchmark.frames)
        cache = EncodingCache(self.runner, files, reader(self.plan), capacity)
        with self.runner.attach(self.plan.method, self.budget):
            for first in range(0, len(questions), size):
                group = questions[first : first + size]
                with self.asking.open("ab") as file:  # in one write: workers share the file
                    file.write("".join(f"{question.index}\n" for question in group).encode())
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
        return _joined([Result([], errors), self._ask(asked)])

    def _ask(self, asked: Sequence[tuple[Question, list[Encoding]]], single: bool = False) -> Result:
        """Answers to questions, asked together or, if that fails, each as a `single` one."""
        try:
            return Result(self._answer(asked), [])
        except QuestionError as error:
            said, cause = str(error), "question"
        except ConsensusError:
            raise
        except Exception as error:  # one of them, or all together, is more than the model can do
            if single:
                raise_if_device_failed(error, f"question {asked[0][0].index}")
            else:
                log.info("a batch of %d questions failed; each is asked alone", len(asked))
            said, cause = describe(error), "model"
        if single:
            return Result([], [error_record(asked[0][0], said, cause)])
        return _joined(self._ask([one], single=True) for one in asked)

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
            **({} if answer.logprob is None else {"logprob": answer.logprob}),
            **({"videos": CLIPS if plan.clips else "frames"} if plan.benchmark.frames else {}),
            **self._costs.of(answer.prefill, plan.shown(question), budgets, answer.outcomes),
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
    images = [
        {name: values[0].double().round(decimals=DECIMALS).tolist() for name, values in measures.items()}
        for measures in measured
        if measures
    ]
    return {"measures": images} if images else {}


@dataclass(frozen=True)
class WorkerFactory:
    """Creates a worker's task, in the worker's process: it loads its runner, then asks shards."""

    plan: RunPlan
    asking: Path
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
        asker = Asker(plan, runner, budget_of(plan, runner), self.asking)
        questions = {question.index: question for question in plan.questions}
        return lambda shard: _joined(asker.batches([questions[index] for index in shard], self.batch))
