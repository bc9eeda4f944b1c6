"""Asks a host the questions of a plan, in batches: pictures in, records out. One process's share of a run.

`Asker(plan, host, budget).batches(questions, size)` yields answers and errors batch by batch; a `WorkerFactory` makes
what does the same in a process of its own, shard by shard (`workers/`).
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
from llava_consensus.evaluation.runs import failures
from llava_consensus.evaluation.runs.checksums import of_pictures, signed
from llava_consensus.evaluation.runs.configuration import Plan
from llava_consensus.evaluation.runs.costs import AnswerCosts
from llava_consensus.evaluation.runs.encodings import CAPACITY, EncodingCache, reader
from llava_consensus.evaluation.runs.kept import Shelf
from llava_consensus.evaluation.runs.matching import budget_of, shape_of
from llava_consensus.evaluation.runs.store import run_name, write_shard
from llava_consensus.evaluation.runs.workers import Result, Shard
from llava_consensus.hosts import CLIPS, Answer, Encoded, Host, Loading
from llava_consensus.reduction.budget import Budget, Share

log = logging.getLogger(__name__)

DECIMALS = 6  # of measures

HostLoader = Callable[[str, Loading, Mapping[str, str]], Host]  # model, loading, options of the host


@dataclass(frozen=True)
class Asker:
    """A plan, the host that answers for it, and the budget its method is given there."""

    plan: Plan
    host: Host
    budget: Budget | Share
    shelf: Shelf | None = None  # encodings that other runs share

    def batches(self, questions: Sequence[Question], size: int) -> Iterator[Result]:
        """Answers and errors of each `size` questions, in their order, with the plan's method attached."""
        plan = self.plan
        files = [plan.pictures(question) for question in questions]
        capacity = CAPACITY // max(1, plan.benchmark.frames)
        shelf = None if self.shelf is None else self.shelf.given(plan.method, self.budget)
        cache = EncodingCache(self.host, files, reader(plan), capacity, shelf)
        with self.host.attach(plan.method, self.budget):
            for first in range(0, len(questions), size):
                group = questions[first : first + size]
                pairs = list(zip(group, cache.fetch(files[first : first + size]), strict=True))
                yield self._results(pairs)

    def _results(self, pairs: list[tuple[Question, list[Encoded] | ImageError]]) -> Result:
        """Answers, and a record of each question that cannot be asked or that the model fails at."""
        errors, asked = [], []
        for question, own in pairs:
            if isinstance(own, ImageError):
                errors.append(failures.of_picture(question, own))
            elif len(question.text) > failures.LONGEST:
                errors.append(failures.of_length(question))
            else:
                asked.append((question, own))
        try:
            return Result(self._answer(asked), errors)
        except ConsensusError:
            raise
        except Exception:  # one of them, or all together, is more than the model can do
            log.info("a batch of %d questions failed; each is asked alone", len(asked))
        answers = []
        for one in asked:
            try:
                answers += self._answer([one])
            except ConsensusError:
                raise
            except Exception as error:  # anything a model can raise about one question
                errors.append(failures.of_model(one[0], error))
        return Result(answers, errors)

    def _answer(self, asked: list[tuple[Question, list[Encoded]]]) -> list[Record]:
        if not asked:
            return []
        prompts = [self.plan.prompt(question) for question, _ in asked]
        answers = self.host.answer([encoded for _, encoded in asked], prompts)
        return [self._record(question, answer) for (question, _), answer in zip(asked, answers, strict=True)]

    def _record(self, question: Question, answer: Answer) -> Record:
        """LLaVA's answer record; metadata says how many visual tokens went in and came out, and what that cost. The id
        follows from the run and the question, so that a run done twice gives the same bytes.
        """
        record = {
            "question_id": question.question_id,
            "prompt": question.text if question.prompt is None else question.prompt,
            "text": answer.text,
            "answer_id": shortuuid.uuid(f"{self._run}/{question.index}"),
            "model_id": Path(self.plan.model).name,
            "metadata": {
                "index": question.index,
                "before": answer.before,
                "after": answer.after,
                "structural": answer.structural,
                **self._resolved(answer),
                **_measures(answer),
                "notes": list(answer.notes),
                **({"videos": CLIPS if self.plan.clips else "frames"} if self.plan.benchmark.frames else {}),
                **self._costs.of(answer.prefill, self.plan.shown(question), self._tokens(answer)),
                **(of_pictures(self.plan.pictures(question)) if self.plan.content is None else {}),
            },
        }
        return signed(record)

    def _tokens(self, answer: Answer) -> list[int]:
        """The tokens a share comes to, picture by picture; nothing for a number of tokens."""
        share = self.budget
        return [share.of(outcome.before).tokens for outcome in answer.outcomes] if isinstance(share, Share) else []

    def _resolved(self, answer: Answer) -> Record:
        """The budget of each picture where it is a share, beside it."""
        return {"share": self.budget.share, "budgets": self._tokens(answer)} if isinstance(self.budget, Share) else {}

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
    """Makes what a worker of an engine does: it loads a host of its own, then asks shards."""

    plan: Plan
    folder: Path  # of the run, where this process can write to it
    batch: int
    workers: int
    loader: HostLoader

    @property
    def gpus(self) -> int:
        """GPUs a worker needs for itself."""
        return int(self.plan.loading.device.startswith("cuda"))

    def __call__(self, number: int) -> Callable[[Shard], Result]:
        """The function from a shard to its records, which are written down before they are handed over."""
        plan = self.plan
        loading = replace(plan.loading, device=self._device(number))
        host = self.loader(plan.model, loading, plan.host_options)
        asker = Asker(plan, host, budget_of(plan, host))
        questions = {question.index: question for question in plan.questions}

        def work(shard: Shard) -> Result:
            found = list(asker.batches([questions[index] for index in shard.indexes], self.batch))
            answers = [answer for part in found for answer in part.answers]
            result = Result(answers, [error for part in found for error in part.errors])
            if self.folder.is_dir():
                write_shard(self.folder, shard.name, *result)
            return result

        return work

    def _device(self, number: int) -> str:
        """The device of a worker; workers on the CPU share its cores."""
        import torch

        device = self.plan.loading.device
        if device == "cuda":
            return f"cuda:{number % torch.cuda.device_count()}"
        if device == "cpu":
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.workers))
        return device
