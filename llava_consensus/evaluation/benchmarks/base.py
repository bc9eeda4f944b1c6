"""Base class of benchmarks: files, options, and the scoring of answers joined to questions by id.

Answers are never paired with labels by position: an answer file may be partial, in another order, hold a line twice or
come from another LLaVA. Every file error names the path, the line and where the file comes from.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from llava_consensus.errors import DataError, OptionError, listed, plural
from llava_consensus.evaluation.benchmarks import parsing
from llava_consensus.evaluation.files import Record, digest, read_lines
from llava_consensus.evaluation.user_files import read_answers

LLAVA_EVAL_ZIP = "LLaVA's eval.zip (link in docs/Evaluation.md of github.com/haotian-liu/LLaVA)"
SHORT = "\nAnswer the question using a single word or phrase."  # LLaVA's suffix for short answers
LETTER = "\nAnswer with the option's letter from the given choices directly."  # and for a choice of options


@dataclass(frozen=True, slots=True)
class Question:
    """One question; `images` are file names below the benchmark's image folder."""

    index: int  # line in the question file, from 0
    question_id: int | str
    images: tuple[str, ...]  # none for a question about text only, several for the frames of a video
    text: str  # everything that is asked, suffix included
    category: str = "default"
    prompt: str | None = None  # prompt in the answer file, if LLaVA's differs


@dataclass(frozen=True)
class DataFile:
    """A file a benchmark needs: its path under DATA/eval/<folder>, and where a user gets it."""

    path: str
    source: str
    sha256: str = ""  # of the known version
    optional: bool = False  # scored or exported with it, asked without
    exported: bool = False  # optional, but nothing is exported without it


def option(*values: str, line: str, asks: bool = False) -> Any:
    """A field of a benchmark that is an option.

    Args:
        values: allowed values; the first is the default.
        line: its meaning, for the message about another value.
        asks: whether it changes the questions: it is then part of a run's configuration. Others affect only the score.
    """
    return field(default=values[0], metadata={"values": values, "line": line, "asks": asks})


@dataclass(frozen=True, kw_only=True)
class Benchmark(ABC):
    """A benchmark: its data, prompts, scoring, and the published number it must match.

    A subclass is a frozen dataclass whose fields are its options (`option`). It says how answers are scored by `gold`,
    `grade` and `totals`, or by its own `score`.

    Raises:
        OptionError: for an option that is none of its values.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    line: ClassVar[str]
    answer_version: ClassVar[int] = 1  # raise it by hand if the benchmark asks or scores differently than before
    folder: ClassVar[str]  # under DATA/eval
    metric: ClassVar[str]  # key of the headline number in the report
    scale: ClassVar[float] = 1.0  # the headline is divided by it to be a percentage in a mean of benchmarks
    guess: ClassVar[float] = 0.0  # score of guessing, if that does not depend on the questions
    column: ClassVar[str | None] = None  # of the paper's tables (report/paper.json) that this headline belongs in
    judge: ClassVar[str | None] = None  # `module:Class` of its grader (judge/grader.py), if a judge model scores it
    max_new_tokens: ClassVar[int]
    licence: ClassVar[str] = ""  # of the data, in a few words
    frames: ClassVar[int] = 0  # frames of each video in a prompt; 0 if the files are images

    # (answers, DATA, target) -> the written content, and the ids that are missing, duplicate or unknown
    export: ClassVar[Callable[..., Record] | None] = None
    whole: ClassVar[str] = ""  # why the command exports nothing if a question has no answer; empty: it does
    # (DATA, name) -> the content of an image that is not a separate file
    read_image: ClassVar[Callable[..., bytes] | None] = None

    def __post_init__(self) -> None:
        for one in fields(self):
            value, values = getattr(self, one.name), one.metadata["values"]
            if value not in values:
                raise OptionError(f"{one.name}={value!r} must be one of {', '.join(values)}: {one.metadata['line']}")

    @property
    @abstractmethod
    def files(self) -> tuple[DataFile, ...]:
        """Files it needs; the first holds the questions."""

    @property
    @abstractmethod
    def images(self) -> str:
        """The folder of images, under its folder."""

    @property
    def count(self) -> int | None:
        return None

    @property
    def paper(self) -> float | None:
        """The headline for LLaVA-1.5-7B with all tokens, as published for these options."""
        return None

    def load(self, data: Path) -> list[Question]:
        """The questions in file order; of LLaVA's own kind of question file unless a subclass says otherwise.

        Args:
            data: folder that holds `eval/<folder>/...` in LLaVA's layout.
        Raises:
            DataError: a file that is needed is missing or damaged; labels too, before anything is asked.
        """
        require(self.place(data), self.files)
        return read_questions(self.place(data) / self.question_file)

    def gold(self, data: Path, questions: Sequence[Question]) -> Mapping[int, Any]:
        """The right answer of every question, by its index. DataError if the files are not about these questions."""
        raise NotImplementedError

    def grade(self, text: str, question: Question, gold: Any) -> Record:
        """An answer as scored: `extracted`, `correct` (0 to 1), and `group` and `unit` if totals are taken by them."""
        raise NotImplementedError

    def totals(self, rows: Sequence[Record]) -> Record:
        """The numbers of the report from the graded answers, each with its `index`."""
        return {self.metric: share(rows)}

    def readable(self, text: str, row: Record) -> bool:
        """Whether the scorer can read an answer, given as graded; others count as wrong and are reported."""
        return bool(text.strip())

    def key_of_question(self, question: Question) -> Hashable:
        """By which an answer finds its question, with `key_of_record`."""
        return question.question_id

    def key_of_record(self, record: Record) -> Hashable:
        return record["question_id"]

    def score(self, records: Sequence[Record], data: Path) -> dict[str, Any]:
        """Scores the answers: the result of `report` below.

        Args:
            records: lines of an answer file: question_id, text, mostly prompt.
            data: as for `load`.
        Raises:
            DataError: a file is missing or damaged, or the answers are not to these questions.
        """
        questions = self.load(data)
        gold = self.gold(data, questions)
        joined = join(records, questions, self.key_of_question, self.key_of_record)
        texts = {index: record["text"] for index, record in joined.answers.items() if index in gold}
        rows = [{"index": index, **self.grade(text, questions[index], gold[index])} for index, text in texts.items()]
        unreadable = sum(not self.readable(text, row) for text, row in zip(texts.values(), rows, strict=True))
        return report(self.name, joined, self.totals(rows), rows, unreadable)

    def chance(self, questions: Sequence[Question], data: Path) -> float:
        """Score of guessing among the allowed answers of these questions, in the headline's unit: 0 for free answers. A
        model whose interval does not lie above it enters no average of a report.
        """
        return self.guess

    def references(self, data: Path) -> Mapping[int, str]:
        """The right answer to show beside an answer, by index; nothing if that is not one short text."""
        return {}

    def read(self, path: Path, data: Path) -> list[Record]:
        """Answers in LLaVA's format, or in an official form of this benchmark, recognised by its content."""
        records = read_answers(path)
        if not any(isinstance(record["question_id"], str) for record in records):
            return records
        ids = {str(question.question_id): question.question_id for question in self.load(data)}  # tables have texts
        return [{**one, "question_id": ids.get(str(one["question_id"]), one["question_id"])} for one in records]

    def score_file(self, path: Path, data: Path) -> dict[str, Any]:
        """`score` of a file; if that holds finished grades of a judge, their official numbers."""
        return self.score(some(self.read(path, data), path), data)

    def scored_by(self, data: Path) -> str | None:
        """Name of the external scorer, if `score` needs one; None if its files suffice."""
        return None

    def together(self, question: Question) -> Hashable:
        """Key of the questions that must be asked together, because the score counts them as one."""
        return question.index

    @property
    def question_file(self) -> str:
        return self.files[0].path

    def place(self, data: Path) -> Path:
        return Path(data) / "eval" / self.folder

    @property
    def chosen(self) -> dict[str, str]:
        return {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}

    @property
    def asking(self) -> dict[str, str]:
        asks = {one.name for one in fields(self) if one.metadata["asks"]}
        return {name: value for name, value in self.chosen.items() if name in asks}


class Joined(NamedTuple):
    """Answers by the index of their question, ascending, and the counts of `join`."""

    answers: dict[int, Record]
    counts: dict[str, int]
    audit: dict[str, Any]  # number of `answers`, and the ids that are `missing`, `duplicate` or `unknown`


def some(records: list[Record], path: Path) -> list[Record]:
    if not records:
        raise DataError(f"{path}: no answers in it")
    return records


def require(folder: Path, files: Sequence[DataFile]) -> None:
    absent = [file for file in files if not (file.optional or (folder / file.path).is_file())]
    if absent:
        names = "".join(f"\n  {folder / file.path}\n    from {file.source}" for file in absent)
        where = "" if folder.is_dir() else f" (there is no folder {folder}: is DATA right?)"
        raise DataError(f"missing {'files' if len(absent) > 1 else 'file'}{where}:{names}")


def check_entries(path: Path, rows: Any, keys: Iterable[str]) -> Any:
    """The rows, a list or an object by id. DataError for an entry that is no object with these keys."""
    for name, row in rows.items() if isinstance(rows, dict) else enumerate(rows, start=1):
        absent = [key for key in keys if not isinstance(row, dict) or key not in row]
        if absent:
            raise DataError(f"{path}, entry {name!r}: no {', '.join(absent)}: another file?")
    return rows


def labels(path: Path, questions: Iterable[tuple[Question, Hashable]], known: Mapping[Any, Any], source: str) -> Any:
    """Entries of a file of right answers by index of their question. DataError for a question it does not know."""
    found = {}
    for question, key in questions:
        if key not in known:
            raise DataError(
                f"{path} does not know question {key!r} (line {question.index + 1} of the questions): another split or "
                f"version? Get it: {source}"
            )
        found[question.index] = known[key]
    return found


def read_questions(path: Path) -> list[Question]:
    """A question file of LLaVA's: one object a line with question_id, text and mostly image and category. The file
    that was read last is remembered by its content: a run reads its questions again to score the answers.
    """
    return list(_questions(path, digest(path)))


@lru_cache(maxsize=1)
def _questions(path: Path, _content: str) -> tuple[Question, ...]:
    questions, of_image = [], dict[str | None, tuple[str, ...]]()
    for index, row in enumerate(read_lines(path, ("question_id", "text"))):
        image = row.get("image")
        if not (_is_id(row["question_id"]) and isinstance(row["text"], str) and isinstance(image, str | None)):
            raise DataError(f"{path}, line {index + 1}: question_id, image or text is of the wrong type")
        images = of_image.setdefault(image, () if image is None else (image,))  # most have several questions
        question = Question(index, row["question_id"], images, row["text"], row.get("category", "default"))
        questions.append(question)
    return tuple(questions)


def join(
    records: Sequence[Record],
    questions: Sequence[Question],
    key_of_question: Callable[[Question], Hashable] = lambda question: question.question_id,
    key_of_record: Callable[[Record], Hashable] = lambda record: record["question_id"],
) -> Joined:
    """Joins answers to questions: by metadata.index if its id agrees, else by key.

    The n-th answer with a key goes to the n-th question with it; more answers than questions are duplicates, of which
    the last counts; answers to no question are unknown. DataError if all of them are unknown.
    """
    places: dict[Hashable, list[int]] = {}
    for question in questions:
        places.setdefault(key_of_question(question), []).append(question.index)
    answers: dict[int, Record] = {}
    duplicate: list[int] = []
    unknown = []
    for number, record in enumerate(records, start=1):
        if not isinstance(record, Mapping) or not _is_id(record.get("question_id")):
            raise DataError(f"answer {number}: no question_id (a number or a text)")
        if not isinstance(record.get("text"), str):
            raise DataError(f"answer {number} (question_id {record['question_id']!r}): no text")
        index = _stated_index(record, questions)
        if index is None:
            candidates = places.get(key_of_record(record))
            if candidates is None:
                unknown.append(record["question_id"])
                continue
            index = next((candidate for candidate in candidates if candidate not in answers), candidates[-1])
        if index in answers:
            duplicate.append(index)
        answers[index] = record
    if records and not answers:
        expected = repr(questions[0].question_id) if questions else "none"
        raise DataError(
            "none of the answers belongs to a question of this benchmark: the first answer has question_id "
            f"{records[0]['question_id']!r}, the first question {expected}. Right answer file and DATA folder?"
        )
    missing = [question.question_id for question in questions if question.index not in answers]
    twice = [questions[index].question_id for index in sorted(set(duplicate))]
    counts = {"asked": len(questions), "answered": len(answers), "missing": len(missing)}
    counts |= {"duplicate": len(duplicate), "unknown": len(unknown)}
    audit = {"answers": len(records), "missing": missing, "duplicate": twice, "unknown": unknown}
    return Joined(dict(sorted(answers.items())), counts, audit)


def report(
    name: str,
    joined: Joined,
    numbers: Mapping[str, Any],
    extracted: list[dict[str, Any]],
    unreadable: int | None = None,
) -> dict[str, Any]:
    """The JSON-able result every benchmark returns: the numbers, how complete they are, and each answer as read.

    `unreadable_answers` counts those that the scorer cannot read, and so counts as wrong; unless given, the empty ones.
    """
    complete = not joined.counts["missing"]
    if unreadable is None:
        unreadable = sum(not record["text"].strip() for record in joined.answers.values())
    numbers = {**numbers, "unreadable_answers": unreadable}
    return {"benchmark": name, **numbers, "complete": complete, "counts": joined.counts, "extracted": extracted}


def judged_report(name: str, joined: Joined, references: Mapping[int, str], metrics: Sequence[str]) -> dict[str, Any]:
    """The report of a judged benchmark before a judge was asked: its `metrics` are None, and beside them is how often
    the reference (by index) is contained in the answer: free, the same everywhere, and no judgement.
    """
    extracted: list[dict[str, Any]] = [
        {
            "index": index,
            "extracted": parsing.plain(record["text"]),
            "correct": parsing.contains(record["text"], references[index]),
        }
        for index, record in joined.answers.items()
    ]
    return report(name, joined, {**dict.fromkeys(metrics), "contains": share(extracted), "judge": None}, extracted)


def refuse_missing(result: Mapping[str, Any], why: str) -> None:
    """Stops an export that needs every answer; `why` names the official tool's rule."""
    if result["missing"]:
        raise DataError(
            f"{plural(len(result['missing']), 'question')} without an answer, and {why}: "
            f"{listed([*map(repr, result['missing'])])}. The same eval command asks them"
        )


def mean(values: Iterable[float]) -> float:
    """Plain left-to-right sum divided by the count; 0.0 of nothing.

    Not `sum`: since Python 3.12 it compensates rounding, and the official numbers were made without.
    """
    total, count = 0.0, 0
    for value in values:
        total += value
        count += 1
    return total / count if count else 0.0


def share(rows: Sequence[Mapping[str, Any]], key: str = "correct") -> float | None:
    """Mean of graded answers in percent; None of nothing."""
    return 100 * mean(row[key] for row in rows) if rows else None


def percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _is_id(value: object) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _stated_index(record: Record, questions: Sequence[Question]) -> int | None:
    """The line our own harness asked, if the answer states one and the id there is the same."""
    metadata = record.get("metadata")
    index = metadata.get("index") if isinstance(metadata, Mapping) else None
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(questions):
        return None
    return index if questions[index].question_id == record["question_id"] else None
