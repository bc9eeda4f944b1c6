"""The whole evaluation loop on one page: check, load, attach, ask, append, score; and go on where a killed run stopped.

`run(RunConfig("gqa", tokens=64), Path("results"))` is what `llava-consensus eval gqa --tokens 64` does.
Everything cheap is checked before weights load (`plan.py`). The vision tower runs once per picture, however many
questions there are about it. Stopped at any moment, the same call goes on, asks nothing twice and ends with the
metrics of an undisturbed run (`records.py`).
"""

import logging
import os
import platform
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import shortuuid
from tqdm import tqdm

from llava_consensus import hosts, ledger
from llava_consensus.benchmarks import Question
from llava_consensus.errors import ConsensusError, DataError, ImageError
from llava_consensus.hosts.base import Answer, Encoded, Host, Prompt
from llava_consensus.images import open_image
from llava_consensus.plan import Plan, RunConfig, prepare
from llava_consensus.records import Record, Run, open_run
from llava_consensus.tokens import Budget

log = logging.getLogger(__name__)

KEPT_ENCODINGS = 256

HostLoader = Callable[[str, str, str], Host]  # model, device, dtype


class Interrupted(ConsensusError):
    """Ctrl-C: the run is intact and can go on."""

    exit_code = 130


@dataclass(frozen=True)
class RunResult:
    """Where a run is, what it measured (the content of metrics.json) and how many questions this call asked."""

    path: Path
    metrics: Record
    asked: int


def run(
    config: RunConfig, out: Path, batch: int = 16, progress: bool = True, host_loader: HostLoader | None = None
) -> RunResult:
    """Evaluates one configuration, or goes on with it, or reads what is complete.

    Args:
        config: what is measured.
        out: folder of all runs; this one gets a folder of its own in it.
        batch: questions answered together; changes speed, not answers.
        progress: whether a bar with questions per second is shown while it works.
        host_loader: instead of `hosts.load`.
    Raises:
        ConsensusError: everything the user can mend, see `errors.py`; Interrupted on Ctrl-C.
    """
    plan = prepare(config, batch)
    with open_run(out, plan.description, {question.index for question in plan.questions}) as folder:
        for repair in folder.repairs:
            log.warning("%s", repair)
        done = folder.done
        pending = [question for question in plan.questions if question.index not in done]
        stored = folder.metrics()
        if stored is not None and not pending:
            log.info("%s: complete already, nothing was asked", folder.path)
            return RunResult(folder.path, stored, 0)
        if pending and done:
            log.info("%s: going on after %d of %d questions", folder.path, len(done), len(plan.questions))
        seconds = 0.0
        if pending:
            groups = [pending[first : first + batch] for first in range(0, len(pending), batch)]
            try:
                host = (host_loader or hosts.load)(plan.description["model"], plan.device, plan.description["dtype"])
                seconds = _ask(plan, folder, groups, host, progress)
            except KeyboardInterrupt:
                count = f"{len(folder.done)} of {len(plan.questions)}"
                raise Interrupted(f"stopped after {count} questions. The same command goes on: {folder.path}") from None
        folder.finish(_measure(plan, folder, len(pending), seconds))
        return RunResult(folder.path, folder.metrics() or {}, len(pending))


class Pictures:
    """Encodings by file: the tower runs once per picture; an encoding goes after its last question."""

    def __init__(self, host: Host, asked: Iterable[Sequence[Path]], capacity: int = KEPT_ENCODINGS) -> None:
        self._host, self._capacity = host, capacity
        self._ahead = Counter(path for paths in asked for path in paths)  # questions still to come about each picture
        self._held: OrderedDict[Path, Encoded | ImageError] = OrderedDict()

    def fetch(self, asked: Sequence[Sequence[Path]]) -> list[list[Encoded] | ImageError]:
        """For each question its pictures' encodings, or the error of the first that is unreadable."""
        fresh = {}
        needed = list(dict.fromkeys(path for paths in asked for path in paths))
        for path in needed:
            if path not in self._held:
                try:
                    fresh[path] = open_image(path)
                except ImageError as error:
                    self._held[path] = error
        if fresh:
            self._held.update(zip(fresh, self._host.encode(list(fresh.values())), strict=True))
        found = [self._of_question(paths) for paths in asked]
        self._ahead.subtract(path for paths in asked for path in paths)
        self._forget(needed)
        return found

    def _of_question(self, paths: Sequence[Path]) -> list[Encoded] | ImageError:
        encoded: list[Encoded] = []
        for path in paths:
            held = self._held[path]
            if isinstance(held, ImageError):
                return held
            encoded.append(held)
        return encoded

    def _forget(self, used: Sequence[Path]) -> None:
        for path in used:
            self._held.move_to_end(path)
            if self._ahead[path] <= 0:
                del self._held[path]
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)


def _ask(plan: Plan, folder: Run, groups: list[list[Question]], host: Host, progress: bool) -> float:
    """Asks group by group, in file order, and appends each. Returns the seconds it took, loading not counted."""
    if plan.budget.tokens >= host.visual_tokens:
        log.info(
            "tokens=%d: this model has %d visual tokens per image, so this is the full model",
            plan.budget.tokens,
            host.visual_tokens,
        )
    pictures = Pictures(host, [plan.pictures(question) for group in groups for question in group])
    bar = tqdm(
        total=len(plan.questions), initial=len(folder.done), unit="q", desc=plan.benchmark.name, disable=not progress
    )
    start = time.perf_counter()
    with bar, host.attach(plan.method, _settle(plan, folder, host)):
        for group in groups:
            seen = pictures.fetch([plan.pictures(question) for question in group])
            asked = [
                (question, one) for question, one in zip(group, seen, strict=True) if not isinstance(one, ImageError)
            ]
            answers = _answer(plan, host, asked)
            errors = [
                _error(question, one) for question, one in zip(group, seen, strict=True) if isinstance(one, ImageError)
            ]
            folder.add(answers, errors)
            bar.update(len(group))
    return time.perf_counter() - start


def _settle(plan: Plan, folder: Run, host: Host) -> Budget:
    """The budget the method is given, written down with the sizes of the model before anything is asked."""
    conversation = plan.description["conversation"]
    asked = ((Prompt(one.text, conversation), len(one.images)) for one in plan.questions)
    sheet = ledger.settle(host, plan.method, plan.budget, plan.match, asked)
    folder.describe(sheet)
    given = ledger.given_budget(sheet)
    if given != plan.budget:
        log.info("match=%s: the method is given tokens=%d for %d", plan.match, given.tokens, plan.budget.tokens)
    return given


def _answer(plan: Plan, host: Host, asked: list[tuple[Question, list[Encoded]]]) -> list[Record]:
    if not asked:
        return []
    conversation, length = plan.description["conversation"], plan.description["max_new_tokens"]
    prompts = [Prompt(question.text, conversation, length) for question, _ in asked]
    answers = host.answer([encoded for _, encoded in asked], prompts)
    name = Path(plan.description["model"]).name
    return [_record(question, answer, name) for (question, _), answer in zip(asked, answers, strict=True)]


def _record(question: Question, answer: Answer, model: str) -> Record:
    """LLaVA's answer record; metadata says how many visual tokens went in and came out."""
    return {
        "question_id": question.question_id,
        "prompt": question.text,
        "text": answer.text,
        "answer_id": shortuuid.uuid(),
        "model_id": model,
        "metadata": {
            "index": question.index,
            "before": answer.before,
            "after": answer.after,
            "structural": answer.structural,
            "notes": list(answer.notes),
            **ledger.of_answer(answer.prefill, len(question.images)),
        },
    }


def _error(question: Question, error: ImageError) -> Record:
    return {
        "index": question.index,
        "question_id": question.question_id,
        "image": question.images[0],
        "error": str(error),
    }


def _measure(plan: Plan, folder: Run, asked: int, seconds: float) -> Record:
    """The content of metrics.json. All of it but `timing` and `environment` follows from the answers alone."""
    answers = [folder.answers[index] for index in sorted(folder.answers)]
    if not answers:
        first = folder.errors[min(folder.errors)]["error"]
        raise DataError(f"{folder.path}: not one picture can be read, so nothing was asked. The first error: {first}")
    if folder.errors:
        log.warning(
            "%d questions were not asked, their pictures cannot be read: see %s",
            len(folder.errors),
            folder.path / "errors.jsonl",
        )
    report = plan.benchmark.score(answers, plan.data)
    notes = Counter(note for answer in answers for note in answer["metadata"]["notes"])
    kinds = ("before", "after", "structural")
    return {
        "score": report.get(plan.benchmark.metric),
        "metric": plan.benchmark.metric,
        "questions": len(plan.questions),
        "answered": len(answers),
        "errors": len(folder.errors),
        "tokens": {kind: sum(answer["metadata"][kind] for answer in answers) / len(answers) for kind in kinds},
        "account": ledger.of_run(plan.method, folder.described(), answers),
        "notes": dict(sorted(notes.items())),
        "report": report,
        "timing": {"asked": asked, "seconds": seconds, "questions_per_second": asked / seconds if seconds else None},
        "environment": {
            "python": platform.python_version(),
            "system": platform.platform(),
            "processors": os.cpu_count(),
            **_accelerator(plan),
        },
    }


def _accelerator(plan: Plan) -> dict[str, str]:
    if not plan.device.startswith("cuda"):
        return {"device": plan.device}
    import torch

    return {"device": torch.cuda.get_device_name(plan.device)}
