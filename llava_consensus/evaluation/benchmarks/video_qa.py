"""Zero-shot video QA by the protocol of Video-ChatGPT: TGIF-QA (FrameQA), MSVD-QA and MSRVTT-QA.

Data: DATA/eval/GPT_Zero_Shot_QA/<set>_Zero_Shot_QA in Video-LLaVA's layout, unchanged: `test_q.json` (video_name,
question_id, question), `test_a.json` (answer, by position) and the videos, found by name with any of `SUFFIXES`.
Asked as Video-LLaVA does: eight frames, llava_v1, greedy, at most 1024 new tokens, the bare question; the first 1,000
questions, as papers on token reduction do, or all.
Scored by a judge (`llava-consensus judge`): share of yes, mean score 0 to 5. Without one, only by matches.
Answers are joined by id, and files that disagree are refused.
Equal to Video-LLaVA's `eval_video_qa.py` (commit 984e65b) to the last bit: a reply is a Python literal that JSON can
hold, scores are cut towards zero, `yes` is looked for before `no`. If that script would ask for ever or end with an
exception, a reply is unreadable here, and counted.
Must match: Video-LLaVA-7B, all questions, judge gpt-3.5-turbo: accuracy and score 70.0 and 4.0 (TGIF), 70.7 and 3.9
(MSVD), 59.2 and 3.5 (MSRVTT; https://arxiv.org/abs/2311.10122, table 3); the judge's alias has moved since, so compare
numbers of one judge only.
"""

import ast
import contextlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Joined, Question, option
from llava_consensus.evaluation.files import Record, read_json

SUFFIXES = (".mp4", ".avi", ".mov", ".mkv", ".gif")  # the last is ours
SOURCE = "the zero-shot QA files of Video-ChatGPT or Video-LLaVA (links in TRAIN_AND_VALIDATE.md of Video-LLaVA)"
FILES = (DataFile("test_q.json", SOURCE), DataFile("test_a.json", SOURCE))
FIRST = 1000


class Reading(NamedTuple):
    score: int | None  # cut towards zero; None: it adds nothing to the sum but counts in the average
    verdict: str | None  # `yes`, `no`, or None if it says neither
    sound: bool  # both fields could be read


class Unreadable(ValueError):
    """A reply that is no Python literal, or one that JSON cannot hold."""


@dataclass(frozen=True, kw_only=True)
class VideoQA(Benchmark):
    """Short questions on short videos; the sets differ in name, place and number of questions only."""

    files = FILES
    metric = "accuracy"
    judge = "llava_consensus.evaluation.judge.video_qa:VideoQAGrader"
    max_new_tokens = 1024
    licence = "research data without a clear licence; videos of their owners"
    frames = 8

    total: ClassVar[int]  # questions of the whole set

    questions: str = option("first", "all", line="the first 1,000, as papers on token reduction ask", asks=True)

    @property
    def count(self) -> int:
        return self.total if self.questions == "all" else FIRST

    def load(self, data: Path) -> list[Question]:
        questions = self.all(data, self.images)
        return questions if self.questions == "all" else questions[:FIRST]

    def all(self, data: Path, videos: str = "") -> list[Question]:
        """All questions in file order, each with its first video in `videos`; without one, `<name>.mp4`."""
        folder = self.place(data)
        base.require(folder, FILES)
        path = folder / FILES[0].path
        files = _videos(folder / videos) if videos else {}
        questions = []
        for index, row in enumerate(read_json(path, kind=list)):
            if not isinstance(row, dict):
                raise DataError(f"{path}, entry {index + 1}: not an object")
            name, key, text = (row.get(field) for field in ("video_name", "question_id", "question"))
            if not (isinstance(name, str) and isinstance(text, str) and isinstance(key, int | str)):
                raise DataError(f"{path}, entry {index + 1}: no video_name, question_id and question")
            questions.append(Question(index, key, (files.get(name, f"{name}{SUFFIXES[0]}"),), text))
        return questions

    def scored_by(self, data: Path) -> str | None:
        return "a judge"

    def score(self, records: Sequence[Record], data: Path) -> dict[str, Any]:
        """The scores computed without a judge; `accuracy` and `average_score` are None.

        Complete with the first 1,000 questions, unless there are answers to later ones: then with all.
        """
        joined, references = self.join(records, data)
        return base.judged_report(self.name, joined, references, ["accuracy", "average_score"])

    def join(self, records: Sequence[Record], data: Path) -> tuple[Joined, dict[int, str]]:
        """Answers by question, and the right answer of every question."""
        questions = self.all(data)
        references = _references(self.place(data) / FILES[1].path, questions)
        joined = base.join(records, questions)
        if max(joined.answers, default=0) < FIRST:  # complete with the first if no answer belongs to a later one
            joined = base.join(records, questions[:FIRST])
        return joined, references


@dataclass(frozen=True, kw_only=True)
class TGIF(VideoQA):
    name = "tgif"
    title = "TGIF"
    line = "TGIF-QA (FrameQA): short questions on short videos, right or wrong by a judge model"
    folder = "GPT_Zero_Shot_QA/TGIF_Zero_Shot_QA"
    images = "mp4"  # the GIFs as videos
    column = "tgif_acc"
    total = 13_691


@dataclass(frozen=True, kw_only=True)
class MSVD(VideoQA):
    name = "msvd"
    title = "MSVD"
    line = "MSVD-QA: short questions on short videos, right or wrong by a judge model"
    folder = "GPT_Zero_Shot_QA/MSVD_Zero_Shot_QA"
    images = "videos"
    column = "msvd_acc"
    total = 13_157


@dataclass(frozen=True, kw_only=True)
class MSRVTT(VideoQA):
    name = "msrvtt"
    title = "MSRVTT"
    line = "MSRVTT-QA: short questions on short videos, right or wrong by a judge model"
    folder = "GPT_Zero_Shot_QA/MSRVTT_Zero_Shot_QA"
    images = "videos/all"
    column = "msrvtt_acc"
    total = 72_821


def _videos(folder: Path) -> dict[str, str]:
    """File names by name without suffix; of several, the one whose suffix comes first in SUFFIXES."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    files: dict[str, str] = {}
    for suffix in SUFFIXES:
        for name in names:
            if name.endswith(suffix):
                files.setdefault(name.removesuffix(suffix), name)
    return files


def _references(path: Path, questions: Sequence[Question]) -> dict[int, str]:
    """The right answer of every question: by position, once ids, if the file has them, agree."""
    rows = read_json(path, kind=list)
    if len(rows) != len(questions):
        raise DataError(f"{path} has {len(rows)} answers, {FILES[0].path} {len(questions)} questions: not of one set")
    references = {}
    for question, row in zip(questions, rows, strict=True):
        place = f"{path}, entry {question.index + 1}"
        if not isinstance(row, Mapping) or not isinstance(row.get("answer"), str | int | float):
            raise DataError(f"{place}: no answer")
        if row.get("question_id", question.question_id) != question.question_id:
            raise DataError(
                f"{place}: question_id is {row['question_id']!r}, but {FILES[0].path} asks {question.question_id!r} "
                f"there. Get both: {SOURCE}"
            )
        references[question.index] = str(row["answer"])
    return references


def parse(reply: str | None) -> Any:
    """The value of a reply as the official script saves it: a Python literal, then through JSON.

    Raises:
        Unreadable: with the rule that was broken.
    """
    if not isinstance(reply, str):
        raise Unreadable("no text")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes and numbers glued to words
            value = ast.literal_eval(reply)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise Unreadable(f"not a Python literal ({type(error).__name__})") from None
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        raise Unreadable("a literal that JSON cannot hold") from None


def understand(value: Any) -> Reading:
    """Score and verdict of a parsed reply: the score is read first, and without it the verdict does not count."""
    try:
        score = int(value["score"])
    except (KeyError, TypeError, ValueError, OverflowError, IndexError):
        return Reading(None, None, sound=False)
    word = value.get("pred")
    if not isinstance(word, str):
        return Reading(score, None, sound=False)
    verdict = next((candidate for candidate in ("yes", "no") if candidate in word.lower()), None)
    return Reading(score, verdict, sound=True)


def evaluate(values: Sequence[Any]) -> dict[str, Any]:
    """The official averages over parsed replies. A division by zero in the script is None.

    Returns:
        `accuracy` yes/(yes+no), 0 to 1; `average_score`; `count`, `yes_count`, `no_count`; `neither` (a verdict that
        is neither), `unsound` (a field missing or of the wrong kind).
    """
    readings = [understand(value) for value in values]
    verdicts = [reading.verdict for reading in readings]
    yes, no = verdicts.count("yes"), verdicts.count("no")
    average = None
    with contextlib.suppress(OverflowError, ZeroDivisionError):  # an absurd score; the official script ends here
        average = sum(reading.score or 0 for reading in readings) / len(readings)
    return {
        "accuracy": yes / (yes + no) if yes + no else None,
        "average_score": average,
        "count": len(readings),
        "yes_count": yes,
        "no_count": no,
        "neither": sum(reading.sound and reading.verdict is None for reading in readings),
        "unsound": sum(not reading.sound for reading in readings),
    }
