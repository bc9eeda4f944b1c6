"""Questions from any file in LLaVA's format, answered and not scored: what LLaVA's `model_vqa` scripts do.

`Custom(questions=Path("q.jsonl"), pictures=Path("images"))` is given to a run like a benchmark. It is not in
BENCHMARKS, because it has no files of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_consensus.errors import OptionError
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question
from llava_consensus.evaluation.files import ANSWERS, Record, read_answers, to_lines, write_out


@dataclass(frozen=True, kw_only=True)
class Custom(Benchmark):
    """A question file and a folder of pictures.

    Args:
        questions: lines with question_id, text and mostly image.
        pictures: folder of the pictures.
        chunks: parts of ceil(questions / chunks) lines each, as LLaVA cuts them.
        chunk: the part that is asked, from 0.
    Raises:
        OptionError: for a part that is not one of them.
    """

    name = "custom"
    title = "custom"
    line = "questions from your own file, answered and not scored"
    metric = "score"
    max_new_tokens = 128

    questions: Path
    pictures: Path
    chunks: int = 1
    chunk: int = 0

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise OptionError(f"num_chunks={self.chunks} must be at least 1")
        if not 0 <= self.chunk < self.chunks:
            raise OptionError(f"chunk_idx={self.chunk} must be in 0..{self.chunks - 1}: num_chunks={self.chunks}")

    @property
    def folder(self) -> str:  # type: ignore[override]
        """The folder of the question file, in whatever folder of data."""
        return str(self.questions.expanduser().absolute().parent)

    @property
    def files(self) -> tuple[DataFile, ...]:
        """The question file."""
        return (DataFile(self.questions.name, "you (--question-file)"),)

    @property
    def images(self) -> str:
        """The folder of pictures, in whatever folder of data."""
        return str(self.pictures.expanduser().absolute())

    @property
    def asking(self) -> dict[str, str]:
        """The part that is asked."""
        return {"chunk": f"{self.chunk}/{self.chunks}"} if self.chunks > 1 else {}

    @property
    def chosen(self) -> dict[str, str]:
        """As `asking`: no other option changes a result."""
        return self.asking

    def load(self, data: Path) -> list[Question]:
        """The questions of the part, in file order."""
        questions = super().load(data)
        size = -(-len(questions) // self.chunks)
        return questions[self.chunk * size : (self.chunk + 1) * size]

    def score(self, records: Sequence[Record], data: Path) -> dict[str, Any]:
        """How complete the answers are; there are no labels."""
        known = {question.question_id for question in self.load(data)}
        answered = sum(record["question_id"] in known for record in records)
        counts = {"asked": len(known), "answered": answered, "missing": len(known) - answered}
        return {"benchmark": self.name, "score": None, "complete": not counts["missing"], "counts": counts}


def write_answers(run: Path, to: Path) -> None:
    """Write the answers of a run in the order of the questions, a JSON line each as LLaVA does.

    Raises:
        DataError: for a target that cannot be written.
    """
    rows = sorted(read_answers(run / ANSWERS), key=lambda row: row["metadata"]["index"])
    write_out(to, to_lines(rows))
