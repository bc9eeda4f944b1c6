"""Questions from any file, answered and not scored: what LLaVA's `model_vqa` scripts do.

`Custom(questions=Path("q.jsonl"), images=Path("images"))` is given to a run like a benchmark. It is not in
BENCHMARKS, because it has no files of its own.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question
from llava_consensus.evaluation.benchmarks.video_qa import VideoQA
from llava_consensus.evaluation.files import ANSWERS, Record, digest, to_lines, write_out
from llava_consensus.evaluation.user_files import read_answers, read_rows

IDS = ("question_id", "id")
TEXTS = ("text", "question", "prompt")
IMAGES = ("image", "images", "image_path", "image_paths")
VIDEOS = ("video", "videos", "video_path", "video_paths")
ADDRESS = re.compile(r"data:|[a-z]+://")
MARKERS = re.compile(r"<(?:image|video)>\n?|\n?<(?:image|video)>")  # in LLaVA's training form


@dataclass(frozen=True, kw_only=True)
class Custom(Benchmark):
    """A question file and a folder of images or videos.

    Args:
        questions: JSON lines or a JSON list. Each row has `question_id` or `id` (else its number counts), a
            question in `text`, `question`, `prompt` or LLaVA's `conversations`, and images or a video, if any.
        images: folder of the images or videos.
    """

    name = "custom"
    title = "custom"
    line = "questions from your own file, answered and not scored"
    metric = "score"
    max_new_tokens = 128

    questions: Path
    pictures: Path

    def __post_init__(self) -> None:
        """Its fields are files, not choices among values."""

    @property
    def chosen(self) -> dict[str, str]:
        return {}

    asking = chosen

    @property
    def folder(self) -> str:  # type: ignore[override]
        return str(self.questions.expanduser().absolute().parent)

    @property
    def files(self) -> tuple[DataFile, ...]:
        return (DataFile(self.questions.name, "you (--question-file)"),)

    @property
    def images(self) -> str:
        return str(self.pictures.expanduser().absolute())

    @property
    def frames(self) -> int:  # type: ignore[override]
        return VideoQA.frames if self.questions.is_file() and self._read()[1] else 0

    def load(self, data: Path) -> list[Question]:
        base.require(self.place(data), self.files)
        return list(self._read()[0])

    def _read(self) -> tuple[tuple[Question, ...], bool]:
        path = self.questions.expanduser().absolute()
        return _questions(path, digest(path))

    def score(self, records: Sequence[Record], data: Path) -> dict[str, Any]:
        """How complete the answers are; there are no labels."""
        known = {question.question_id for question in self.load(data)}
        answered = sum(record["question_id"] in known for record in records)
        counts = {"asked": len(known), "answered": answered, "missing": len(known) - answered}
        return {"benchmark": self.name, "score": None, "complete": not counts["missing"], "counts": counts}


def write_answers(run: Path, to: Path) -> None:
    rows = sorted(read_answers(run / ANSWERS), key=lambda row: row["metadata"]["index"])
    write_out(to, to_lines(rows))


@lru_cache(maxsize=1)
def _questions(path: Path, _content: str) -> tuple[tuple[Question, ...], bool]:
    """The questions in a file, and whether they show videos. DataError for a row without a text, or with both."""
    questions, kinds = [], dict[bool, str]()
    for index, (where, row) in enumerate(read_rows(path)):
        key = next((row[name] for name in IDS if row.get(name) not in (None, "")), index)
        if not isinstance(key, int | str) or isinstance(key, bool):
            raise DataError(f"{where}: question_id {key!r} is neither a number nor a text")
        images, videos = (_names(where, row, keys) for keys in (IMAGES, VIDEOS))
        if images or videos:
            kinds.setdefault(bool(videos), where)
        if len(kinds) > 1 or (images and videos):
            raise DataError(f"{where}: shows a video, and images are shown too. Ask about them in two files")
        if len(videos) > 1:
            raise DataError(f"{where}: several videos, and a question shows one. Ask about each in a row of its own")
        category = str(row.get("category") or "default")
        questions.append(Question(index, key, images or videos, _text(where, row), category))
    return tuple(questions), True in kinds


def _text(where: str, row: Record) -> str:
    """The question of a row; of LLaVA's training form the only turn of the user."""
    turns = row.get("conversations")
    if isinstance(turns, list):
        said = [turn.get("value") for turn in turns if isinstance(turn, dict) and turn.get("from") in ("human", "user")]
        if len(said) != 1:
            raise DataError(f"{where}: {len(said)} turns of the user, and one question is asked. Keep one a row")
        return MARKERS.sub("", str(said[0])).strip()
    text = next((row[name] for name in TEXTS if row.get(name) not in (None, "")), None)
    if not isinstance(text, str):
        raise DataError(f"{where}: no question. Name it {', '.join(TEXTS)} or conversations, not {str(list(row))[:60]}")
    return text


def _names(where: str, row: Record, keys: Sequence[str]) -> tuple[str, ...]:
    """The files that a row names under the first of these keys that it has."""
    value: Any = next((row[key] for key in keys if row.get(key) not in (None, "", [])), [])
    names = tuple(value if isinstance(value, list) else [value])
    if not all(isinstance(name, str) and not ADDRESS.match(name) for name in names):
        raise DataError(f"{where}: {str(names)[:60]} are no names of files. Save the images and name their files")
    return names
