"""Asks a host the questions of a plan, in batches: pictures in, records out. One process's share of a run.

`Asker(plan, host).batches(questions, size)` yields answers and errors batch by batch; `Worker` makes the same for a
process of its own, shard by shard (`engines/`).
"""

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import shortuuid
from PIL.Image import Image

from llava_consensus import hosts
from llava_consensus.benchmarks import Question
from llava_consensus.errors import ImageError
from llava_consensus.hosts.base import Answer, Encoded, Host, Prompt
from llava_consensus.runs import costs as ledger
from llava_consensus.runs.configuration import Plan
from llava_consensus.runs.pictures import open_image
from llava_consensus.runs.store import Record, run_name, write_shard
from llava_consensus.runs.videos import read_frames
from llava_consensus.runs.workers import Result, Shard

KEPT_ENCODINGS = 256  # pictures; of videos fewer, each being several

HostLoader = Callable[[str, str, str], Host]  # model, device, dtype


@dataclass(frozen=True)
class Asker:
    """A plan and the host that answers for it."""

    plan: Plan
    host: Host

    @cached_property
    def book(self) -> ledger.Ledger:
        """The budget the method is given, and what an answer costs."""
        plan, conversation = self.plan, self.plan.description["conversation"]
        asked = ((Prompt(one.text, conversation), plan.shown(one)) for one in plan.questions)
        return ledger.settle(self.host, plan.method, plan.budget, plan.match, asked)

    def batches(self, questions: Sequence[Question], size: int) -> Iterator[Result]:
        """Answers and errors of each `size` questions, in their order, with the plan's method attached."""
        groups = [questions[first : first + size] for first in range(0, len(questions), size)]
        plan = self.plan
        asked = [plan.pictures(question) for question in questions]
        pictures = Pictures(self.host, asked, content=plan.content, frames=plan.benchmark.frames)
        with self.host.attach(plan.method, self.book.budget):
            for group in groups:
                seen = pictures.fetch([plan.pictures(question) for question in group])
                pairs = list(zip(group, seen, strict=True))
                answers = self._answer([(question, one) for question, one in pairs if not isinstance(one, ImageError)])
                yield Result(answers, [_error(question, one) for question, one in pairs if isinstance(one, ImageError)])

    def _answer(self, asked: list[tuple[Question, list[Encoded]]]) -> list[Record]:
        if not asked:
            return []
        description = self.plan.description
        conversation, length = description["conversation"], description["max_new_tokens"]
        prompts = [Prompt(question.text, conversation, length) for question, _ in asked]
        answers = self.host.answer([encoded for _, encoded in asked], prompts)
        run = run_name(description)
        model = Path(description["model"]).name
        records = [_record(question, answer, model, run) for (question, _), answer in zip(asked, answers, strict=True)]
        for record, (question, _), answer in zip(records, asked, answers, strict=True):
            record["metadata"] |= self.book.entry(answer.prefill, self.plan.shown(question))
        return records


@dataclass(frozen=True)
class Worker:
    """Makes what a worker of an engine does: it loads a host of its own, then asks shards."""

    plan: Plan
    folder: Path  # of the run, where this process can write to it
    batch: int
    workers: int
    loader: HostLoader

    @property
    def gpus(self) -> int:
        """GPUs a worker needs for itself."""
        return int(self.plan.device.startswith("cuda"))

    def __call__(self, number: int) -> Callable[[Shard], Result]:
        """The function from a shard to its records, which are written down before they are handed over."""
        import torch

        device = self.plan.device
        if device == "cuda":
            device = f"cuda:{number % torch.cuda.device_count()}"
        elif device == "cpu":
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // self.workers))
        host = self.loader(self.plan.description["model"], device, self.plan.description["dtype"])
        asker, questions = Asker(self.plan, host), {question.index: question for question in self.plan.questions}

        def work(shard: Shard) -> Result:
            found = list(asker.batches([questions[index] for index in shard.indexes], self.batch))
            result = Result([one for part in found for one in part.answers], [e for part in found for e in part.errors])
            if self.folder.is_dir():
                write_shard(self.folder, shard.name, *result)
            return result

        return work


def load_host(model: str, device: str, dtype: str) -> Host:
    """The host of a checkpoint, see `hosts.load`."""
    return hosts.load(model, device, dtype)


class Pictures:
    """Encodings by file: the tower runs once per picture; an encoding goes after its last question.

    With `frames` the files are videos, of which so many frames are shown.
    """

    def __init__(
        self,
        host: Host,
        asked: Iterable[Sequence[Path]],
        capacity: int = KEPT_ENCODINGS,
        content: Callable[[Path], bytes] | None = None,  # of pictures that are no files of their own
        frames: int = 0,
    ) -> None:
        self._host, self._content, self._frames = host, content, frames
        self._capacity = max(1, capacity // max(1, frames))
        self._ahead = Counter(path for paths in asked for path in paths)  # questions still to come about each picture
        self._held: OrderedDict[Path, list[Encoded] | ImageError] = OrderedDict()

    def fetch(self, asked: Sequence[Sequence[Path]]) -> list[list[Encoded] | ImageError]:
        """For each question its pictures' encodings, or the error of the first that is unreadable."""
        fresh = {}
        needed = list(dict.fromkeys(path for paths in asked for path in paths))
        for path in needed:
            if path not in self._held:
                try:
                    fresh[path] = self._open(path)
                except ImageError as error:
                    self._held[path] = error
        if fresh:
            encoded = iter(self._host.encode([image for images in fresh.values() for image in images]))
            self._held.update((path, [next(encoded) for _ in images]) for path, images in fresh.items())
        found = [self._of_question(paths) for paths in asked]
        self._ahead.subtract(path for paths in asked for path in paths)
        self._forget(needed)
        return found

    def _open(self, path: Path) -> list[Image]:
        if self._frames:
            return read_frames(path, self._frames)
        return [open_image(path, content=self._content(path) if self._content else None)]

    def _of_question(self, paths: Sequence[Path]) -> list[Encoded] | ImageError:
        encoded: list[Encoded] = []
        for path in paths:
            held = self._held[path]
            if isinstance(held, ImageError):
                return held
            encoded += held
        return encoded

    def _forget(self, used: Sequence[Path]) -> None:
        for path in used:
            self._held.move_to_end(path)
            if self._ahead[path] <= 0:
                del self._held[path]
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)


def _record(question: Question, answer: Answer, model: str, run: str) -> Record:
    """LLaVA's answer record; metadata says how many visual tokens went in and came out. The id follows from the run and
    the question, so that a run done twice gives the same bytes.
    """
    return {
        "question_id": question.question_id,
        "prompt": question.text if question.prompt is None else question.prompt,
        "text": answer.text,
        "answer_id": shortuuid.uuid(f"{run}/{question.index}"),
        "model_id": model,
        "metadata": {
            "index": question.index,
            "before": answer.before,
            "after": answer.after,
            "structural": answer.structural,
            "notes": list(answer.notes),
        },
    }


def _error(question: Question, error: ImageError) -> Record:
    return {
        "index": question.index,
        "question_id": question.question_id,
        "image": question.images[0],
        "error": str(error),
    }
