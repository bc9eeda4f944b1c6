"""Execution of a run: batches, workers, shards, and questions without an answer. Needs no torch: the parser uses it.

One question must not stop the others: the model's exception is written to errors.jsonl, and the run continues.
`--retry-errors` asks them again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from llava_consensus.errors import ConsensusError, OptionError
from llava_consensus.evaluation.benchmarks import Question
from llava_consensus.evaluation.files import Record

LONGEST = 16_384  # characters of a question: attention to more may need more memory than there is
IN_A_ROW = 64  # questions the model fails at with none answered between: not the questions' fault
QUOTED = 300  # characters of an error that are recorded


class TooManyErrors(ConsensusError):
    exit_code = 6


class DeviceFailed(ConsensusError):
    """The device is in a state in which this process can answer nothing more."""

    exit_code = 6


class Unanswered(ConsensusError):
    """A result that rests on fewer questions than were asked. It is complete otherwise, and was printed."""

    exit_code = 6


class Result(NamedTuple):
    """Result of a batch or shard: each question has a record in one of the two lists."""

    answers: list[Record]
    errors: list[Record]


@dataclass(frozen=True)
class RunResult:
    """Folder of a run, the content of metrics.json (empty while shards are missing), questions asked by this call."""

    path: Path
    metrics: Record
    asked: int


@dataclass(frozen=True)
class Execution:
    """Execution of a run. Nothing in it changes an answer, so nothing of it is in the run's name."""

    batch: int = 16  # questions answered together
    workers: int = 1  # processes, each with its model, and its device if there are several
    progress: bool = True  # whether to display a bar with questions per second
    retry_errors: bool = False  # whether questions that failed before are asked again
    allow_outside: bool = False  # whether images and videos may lie outside the folder of the benchmark's images
    shard: tuple[int, int] | None = None  # (2, 4): only the second of four parts of the questions, of equal length
    merge: tuple[Path, ...] = ()  # other folders of results, from whose same run answers are copied

    def check(self) -> None:
        for name in ("batch", "workers"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)} must be at least 1")
        if self.shard is not None and not 1 <= self.shard[0] <= self.shard[1]:
            raise OptionError(f"--shard {self.shard[0]}/{self.shard[1]}: must be N/COUNT with 1 <= N <= COUNT")

    def part(self, questions: Sequence[Question]) -> Sequence[Question]:
        """The questions of this shard, in LLaVA's chunks: contiguous, of equal length but the last."""
        if self.shard is None:
            return questions
        number, count = self.shard
        length = -(-len(questions) // count)
        return questions[(number - 1) * length : number * length]


def check_progress(row: int, result: Result) -> int:
    """Number of consecutive questions the model has failed at, after this result. TooManyErrors for IN_A_ROW."""
    failed = [error for error in result.errors if error.get("cause") == "model"]
    row = 0 if result.answers else row + len(failed)
    if row >= IN_A_ROW:
        raise TooManyErrors(
            f"{row} questions in a row failed and none was answered between them; the last: {failed[-1]['error']}. "
            "They are in errors.jsonl; --retry-errors asks them again"
        )
    return row


def raise_if_device_failed(error: Exception, what: str) -> None:
    """Raises DeviceFailed for an error after which CUDA answers nothing more in this process."""
    said = describe(error)
    if "CUDA error" in said or "device-side assert" in said:
        raise DeviceFailed(f"{what}: {said}. What was answered is kept; the same command resumes")


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:QUOTED]


def error_record(question: Question, error: str, cause: str | None = None) -> Record:
    """A line of errors.jsonl. `cause`: `model`, `length`, `question`; None for an unreadable image."""
    image = question.images[0] if question.images else None
    record = {"index": question.index, "question_id": question.question_id, "image": image, "error": error}
    return record | ({"cause": cause} if cause else {})
