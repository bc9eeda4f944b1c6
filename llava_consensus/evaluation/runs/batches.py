"""Asks a host the questions of a run, in batches: pictures in, records out. One process's share of a run.

`Asker(plan, host, budget).batches(questions, size)` yields answers and errors batch by batch; a `WorkerFactory` does
the same in a process of its own, shard by shard (`workers.py`).
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import shortuuid

from llava_consensus.errors import ConsensusError, ImageError
from llava_consensus.evaluation.benchmarks import Question
from llava_consensus.evaluation.files import Record
from llava_consensus.evaluation.models import CLIPS, Answer, Encoded, Host, Loading
from llava_consensus.evaluation.runs.configuration import RunPlan, of_pictures
from llava_consensus.evaluation.runs.execution import (
    LONGEST,
    Result,
    describe,
    error_record,
    raise_if_device_failed,
)
from llava_consensus.evaluation.runs.metrics import AnswerCosts, budget_of, shape_of
from llava_consensus.evaluation.runs.pictures import CAPACITY, EncodingCache, reader
from llava_consensus.evaluation.runs.store import run_name
from llava_consensus.evaluation.runs.workers import Shard
from llava_consensus.reduction.budget import Budget, Share

log = logging.getLogger(__name__)

DECIMALS = 6  # of measures

HostLoader = Callable[[str, Loading, Mapping[str, str]], Host]  # model, loading, options of the host


@dataclass(frozen=True)
class Asker:
    """A run, the host that answers for it, and the budget its method is given there."""

    plan: RunPlan
    host: Host
    budget: Budget | Share

    def batches(self, questions: Sequence[Question], size: int) -> Iterator[Result]:
        """Answers and errors of each `size` questions, in their order, with the run's method attached."""
        files = [self.plan.pictures(question) for question in questions]
        capacity = CAPACITY // max(1, self.plan.benchmark.frames)
        cache = EncodingCache(self.host, files, reader(self.plan), capacity)
        with self.host.attach(self.plan.method, self.budget):
            for first in range(0, len(questions), size):
                group = questions[first : first + size]
                yield self._results(group, cache.fetch(files[first : first + size]))

    def _results(self, questions: Sequence[Question], encodings: Sequence[list[Encoded] | ImageError]) -> Result:
        """Answers, and a record of each question that cannot be asked or that the model fails at."""
        errors, asked = [], []
        for question, own in zip(questions, encodings, strict=True):
            if isinstance(own, ImageError):
                errors.append(error_record(question, str(own)))
            elif len(question.text) > LONGEST:
                said = f"the question has {len(question.text):,} characters, and at most {LONGEST:,} are asked"
                errors.append(error_record(question, said, "length"))
            else:
                asked.append((question, own))
        try:
            return Result(self._answer(asked), errors)
        except ConsensusError:
            raise
        except Exception:  # one of them, or all together, is more than the model can do
            log.info("a batch of %d questions failed; each is asked alone", len(asked))
        answers = []
        for question, own in asked:
            try:
                answers += self._answer([(question, own)])
            except ConsensusError:
                raise
            except Exception as error:  # anything a model can raise about one question
                raise_if_device_failed(error, f"question {question.index}")
                errors.append(error_record(question, describe(error), "model"))
        return Result(answers, errors)

    def _answer(self, asked: Sequence[tuple[Question, list[Encoded]]]) -> list[Record]:
        if not asked:
            return []
        prompts = [self.plan.prompt(question) for question, _ in asked]
        answers = self.host.answer([encoded for _, encoded in asked], prompts)
        return [self._record(question, answer) for (question, _), answer in zip(asked, answers, strict=True)]

    def _record(self, question: Question, answer: Answer) -> Record:
        """LLaVA's answer record; metadata says how many visual tokens went in and came out, and what that cost. The id
        follows from the run and the question, so that a run done twice gives the same bytes.
        """
        plan, budget = self.plan, self.budget
        budgets = [budget.of(outcome.before).tokens for outcome in answer.outcomes] if isinstance(budget, Share) else []
        return {
            "question_id": question.question_id,
            "prompt": question.text if question.prompt is None else question.prompt,
            "text": answer.text,
            "answer_id": shortuuid.uuid(f"{self._run}/{question.index}"),
            "model_id": Path(plan.model).name,
            "metadata": {
                "index": question.index,
                "before": answer.before,
                "after": answer.after,
                "structural": answer.structural,
                **({"share": budget.share, "budgets": budgets} if isinstance(budget, Share) else {}),
                **_measures(answer),
                "notes": list(answer.notes),
                **({"videos": CLIPS if plan.clips else "frames"} if plan.benchmark.frames else {}),
                **self._costs.of(answer.prefill, plan.shown(question), budgets),
                **(of_pictures(plan.pictures(question)) if plan.content is None else {}),
            },
        }

    @cached_property
    def _run(self) -> str:
        return run_name(self.plan.description)

    @cached_property
    def _costs(self) -> AnswerCosts:
        return AnswerCosts(self.plan.method, self.budget, shape_of(self.plan, self.host))


def _measures(answer: Answer) -> Record:
    """What the method says of its choices, picture by picture; nothing for a method that says nothing."""
    told = [reduction.measures for outcome in answer.outcomes for _, reduction in outcome.reductions]
    pictures = [
        {name: values[0].double().round(decimals=DECIMALS).tolist() for name, values in measures.items()}
        for measures in told
        if measures
    ]
    return {"measures": pictures} if pictures else {}


@dataclass(frozen=True)
class WorkerFactory:
    """Makes what a worker does, in the worker's process: it loads a host of its own, then asks shards."""

    plan: RunPlan
    batch: int
    workers: int
    loader: HostLoader

    def __call__(self, number: int) -> Callable[[Shard], Result]:
        """The function from a shard to its records. Workers share the GPUs, or the cores of the CPU."""
        import torch

        plan, device = self.plan, self.plan.loading.device
        if device == "cuda":
            device = f"cuda:{number % torch.cuda.device_count()}"
        if device == "cpu":
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.workers))
        host = self.loader(plan.model, replace(plan.loading, device=device), plan.host_options)
        asker = Asker(plan, host, budget_of(plan, host))
        questions = {question.index: question for question in plan.questions}

        def work(shard: Shard) -> Result:
            results = list(asker.batches([questions[index] for index in shard], self.batch))
            return Result([one for part in results for one in part.answers], [one for p in results for one in p.errors])

        return work
