"""Questions without an answer: what is written of them, and how many of them a run may have.

One question must not stop the others: what a model raises about it alone is written to errors.jsonl, and the run goes
on. `--fail-on-error` bounds how many there may be, `--retry-errors` asks them again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llava_consensus.errors import ConsensusError, ImageError, OptionError
from llava_consensus.evaluation.files import Record

if TYPE_CHECKING:
    from llava_consensus.evaluation.benchmarks import Question

LONGEST = 16_384  # characters of a question: attention to more may need more memory than there is
IN_A_ROW = 64  # questions the model fails at with none answered between: not the questions' fault
SHOWN = 300  # characters of what was raised
MODEL, DEATH = "model", "death"


class TooManyErrors(ConsensusError):
    """More questions without an answer than the user allows, or none answered at all."""

    exit_code = 6


class DeviceFailed(ConsensusError):
    """The device is in a state in which this process can answer nothing more."""

    exit_code = 6


@dataclass(frozen=True)
class Bound:
    """How many questions may be without an answer: a number of them, or a share of all.

    Bound.parse("5"), Bound.parse("0.01"), Bound.parse("1%")
    """

    count: float
    share: bool

    @staticmethod
    def parse(text: str) -> "Bound":
        """Raises OptionError for what is neither."""
        share = text.endswith("%") or "." in text
        try:
            value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1) if share else int(text)
        except ValueError:
            value = -1
        if not 0 <= value <= (1 if share else float("inf")):
            raise OptionError(f"--fail-on-error {text}: must be a number of questions (5) or a share (0.01, 1%)")
        return Bound(value, share)

    def check(self, errors: int, questions: int) -> None:
        """Raises TooManyErrors."""
        if errors > (self.count * questions if self.share else self.count):
            raise TooManyErrors(
                f"{errors} of {questions} questions have no answer, more than --fail-on-error allows: see errors.jsonl "
                "in the folder of the run. The same command with --retry-errors asks them again"
            )


class Watch:
    """Stops a run in which nothing works any more: many questions in a row that the model fails at."""

    def __init__(self) -> None:
        self._row = 0

    def see(self, answers: Sequence[Record], errors: Sequence[Record]) -> None:
        """Takes note of what came back. Raises TooManyErrors."""
        failed = [error for error in errors if error.get("cause") == MODEL]
        self._row = 0 if answers else self._row + len(failed)
        if self._row >= IN_A_ROW:
            raise TooManyErrors(
                f"{self._row} questions in a row failed and none was answered between them; the last: "
                f"{failed[-1]['error']}. They are in errors.jsonl; --retry-errors asks them again"
            )


def of_picture(question: "Question", error: ImageError) -> Record:
    """The record of a question whose picture cannot be read."""
    return _record(question, str(error))


def of_model(question: "Question", error: Exception) -> Record:
    """The record of a question that the model fails at, also when it is asked alone.

    Raises:
        DeviceFailed: where nothing can be asked any more in this process.
    """
    raise_if_device_failed(error, f"question {question.index}")
    said = f"{type(error).__name__}: {error}"[:SHOWN]
    return _record(question, said) | {"cause": MODEL}


def raise_if_device_failed(error: Exception, what: str) -> None:
    """Raises DeviceFailed for an error after which CUDA answers nothing more in this process."""
    said = f"{type(error).__name__}: {error}"[:SHOWN]
    if "CUDA error" in said or "device-side assert" in said:
        raise DeviceFailed(f"{what}: {said}. What was answered is kept; the same command goes on")


def of_death(question: "Question", reason: str) -> Record:
    """The record of a question of which processes die."""
    return _record(question, f"processes that ask it alone die ({reason})"[:SHOWN]) | {"cause": DEATH}


def of_length(question: "Question") -> Record:
    """The record of a question that is too long to be asked."""
    length = f"{len(question.text):,} characters, and at most {LONGEST:,} are asked"
    return _record(question, f"the question has {length}") | {"cause": "length"}


def _record(question: "Question", error: str) -> Record:
    image = question.images[0] if question.images else None
    return {"index": question.index, "question_id": question.question_id, "image": image, "error": error}
