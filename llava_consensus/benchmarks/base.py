"""What every benchmark shares: its description, its files, and joining answers to questions by id.

Answers are never paired with labels by position: an answer file may be partial (LIMIT, unreadable pictures), in
another order, hold a line twice or come from somebody else's LLaVA. Every file error names the path, the line and
where the file comes from. Files are parsed as JSON, nothing else; nothing in them is executed.
"""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from llava_consensus.errors import DataError, OptionError, unknown_name

Record = Mapping[str, Any]  # one line of an answer file: question_id, prompt, text, ...
LLAVA_EVAL_ZIP = "LLaVA's eval.zip (link in docs/Evaluation.md of github.com/haotian-liu/LLaVA)"
SHORT = "\nAnswer the question using a single word or phrase."  # LLaVA's suffix for short answers
LETTER = "\nAnswer with the option's letter from the given choices directly."  # and for a choice of options


@dataclass(frozen=True)
class Question:
    """One question; `images` are file names as the question file has them, below the benchmark's image folder."""

    index: int  # line in the question file, from 0
    question_id: int | str
    images: tuple[str, ...]  # none for a question about text alone, several for the frames of a video
    text: str  # everything that is asked, suffix included
    category: str = "default"
    prompt: str | None = None  # what the answer file records as prompt, where LLaVA records something else


@dataclass(frozen=True)
class DataFile:
    """A file a benchmark needs: its path under DATA/eval/<folder>, and where a user gets it."""

    path: str
    source: str
    sha256: str = ""  # of the known version, where there is one and it is known
    optional: bool = False  # scored or exported with it, asked without


@dataclass(frozen=True)
class Choice:
    """An option of a benchmark. One that changes what is asked is part of a run's configuration, others are not."""

    values: tuple[str, ...]  # the first is the default
    line: str
    asks: bool = False


@dataclass(frozen=True)
class Benchmark:
    """Where the data is, how it is asked, how it is scored, whose number it must match."""

    name: str
    line: str  # what it is, in one line
    folder: str  # under DATA/eval
    questions: str  # under the folder
    images: str  # under the folder
    files: tuple[DataFile, ...]
    metric: str  # key of the headline number in the report, in percent
    paper: float | None  # that number for LLaVA-1.5-7B with all tokens, as published
    max_new_tokens: int
    conversation: str
    load: Callable[[Path], list[Question]]
    score: Callable[[Sequence[Record], Path], dict[str, Any]]
    licence: str = ""  # of the data, in a few words
    frames: int = 0  # of each video that are shown; 0 where the files are pictures
    count: int | None = None  # questions of the official set
    # answers, DATA, target -> what was written, and the ids that are missing, duplicate or unknown
    export: Callable[[Sequence[Record], Path, Path], Mapping[str, Any]] | None = None
    picture: Callable[[Path, str], bytes] | None = None  # DATA, name -> a picture that is no file of its own
    choices: Mapping[str, Choice] = field(default_factory=dict)
    vary: Callable[..., "Benchmark"] | None = None  # this benchmark with some of its choices made
    chosen: Mapping[str, str] = field(default_factory=dict)  # choices that are not the default

    def choose(self, options: Mapping[str, Any]) -> "Benchmark":
        """This benchmark with some of its choices made; OptionError for a name or value that is none of them."""
        options = {name: str(value) for name, value in options.items()}
        for name, value in options.items():
            if not self.choices:
                raise OptionError(f"{name}={value!r}: {self.name} has no options")
            if name not in self.choices:
                raise unknown_name(f"option of {self.name}", name, self.choices)
            values = self.choices[name].values
            if value not in values:
                raise OptionError(f"{name}={value!r} must be one of {', '.join(values)}: {self.choices[name].line}")
        chosen = {name: value for name, value in options.items() if value != self.choices[name].values[0]}
        return replace(self.vary(**chosen), chosen=chosen) if self.vary and chosen else self

    @property
    def asking(self) -> dict[str, str]:
        """Choices other than the default that change what is asked."""
        return {name: value for name, value in self.chosen.items() if self.choices[name].asks}


class Joined(NamedTuple):
    """Answers by the index of their question (ascending), and how many were asked, answered, missing, odd."""

    answers: dict[int, Record]
    counts: dict[str, int]


def require(folder: Path, files: Sequence[DataFile]) -> None:
    """Stop unless every file is there; the message names all that are missing and their sources."""
    absent = [one for one in files if not (one.optional or (folder / one.path).is_file())]
    if absent:
        listed = "".join(f"\n  {folder / one.path}\n    from {one.source}" for one in absent)
        where = "" if folder.is_dir() else f" (there is no folder {folder}: is DATA right?)"
        raise DataError(f"missing {'files' if len(absent) > 1 else 'file'}{where}:{listed}")


def read_text(path: Path) -> str:
    """A UTF-8 file, or a DataError that names it."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(f"missing file: {path}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}): damaged, or not this file") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def read_json(path: Path, kind: type) -> Any:
    """A whole JSON file that must hold a `kind` (dict or list)."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error}): damaged or cut off, fetch it again") from error
    if not isinstance(value, kind):
        raise DataError(f"{path}: expected a JSON {kind.__name__}, found {type(value).__name__}")
    return value


def read_lines(path: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    """A JSON-lines file of objects that each have `fields`."""
    rows = []
    for number, line in enumerate(read_text(path).removesuffix("\n").split("\n"), start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: not JSON ({error}): {line[:60]!r}") from error
        absent = [name for name in fields if not isinstance(row, dict) or name not in row]
        if absent:
            raise DataError(f"{path}, line {number}: expected an object with {', '.join(absent)}: {line[:60]!r}")
        rows.append(row)
    return rows


def read_questions(path: Path) -> list[Question]:
    """A question file of LLaVA's: one object a line with question_id, text and mostly image and category."""
    questions = []
    for index, row in enumerate(read_lines(path, ("question_id", "text"))):
        image = row.get("image")
        images = () if image is None else (image,)
        one = Question(index, row["question_id"], images, row["text"], row.get("category", "default"))
        if not (_is_id(one.question_id) and isinstance(one.text, str) and isinstance(image, str | None)):
            raise DataError(f"{path}, line {index + 1}: question_id, image or text is of the wrong type")
        questions.append(one)
    return questions


def load_questions(folder: Path, files: Sequence[DataFile]) -> list[Question]:
    """The questions in the first of `files`, once all of them are known to be there (labels missing: say so now)."""
    require(folder, files)
    return read_questions(folder / files[0].path)


def join(
    records: Sequence[Record],
    questions: Sequence[Question],
    key_of_question: Callable[[Question], Hashable] = lambda one: one.question_id,
    key_of_record: Callable[[Record], Hashable] = lambda one: one["question_id"],
) -> Joined:
    """Which question each answer belongs to: by metadata.index if its id agrees, else by key.

    The n-th answer with a key goes to the n-th question with it; more answers than questions are duplicates, of which
    the last counts; answers to no question are unknown. If all are unknown something is wrong, and it stops.
    """
    places: dict[Hashable, list[int]] = {}
    for question in questions:
        places.setdefault(key_of_question(question), []).append(question.index)
    answers: dict[int, Record] = {}
    odd = {"duplicate": 0, "unknown": 0}
    for number, record in enumerate(records, start=1):
        _check(record, number)
        index = _stated_index(record, questions)
        if index is None:
            known = places.get(key_of_record(record))
            if known is None:
                odd["unknown"] += 1
                continue
            index = next((place for place in known if place not in answers), known[-1])
        odd["duplicate"] += index in answers
        answers[index] = record
    if records and not answers:
        raise DataError(_strangers(records[0], questions))
    counts = {"asked": len(questions), "answered": len(answers), "missing": len(questions) - len(answers), **odd}
    return Joined(dict(sorted(answers.items())), counts)


def report(name: str, joined: Joined, numbers: Mapping[str, Any], extracted: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON-able result every benchmark returns: the numbers, how complete they are, and each answer as read."""
    complete = not joined.counts["missing"]
    return {"benchmark": name, **numbers, "complete": complete, "counts": joined.counts, "extracted": extracted}


def percent(value: float | None) -> float | None:
    """A fraction in percent; None stays None."""
    return None if value is None else 100 * value


def _is_id(value: object) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _check(record: Record, number: int) -> None:
    if not isinstance(record, Mapping) or not _is_id(record.get("question_id")):
        raise DataError(f"answer {number}: no question_id (a number or a text)")
    if not isinstance(record.get("text"), str):
        raise DataError(f"answer {number} (question_id {record['question_id']!r}): no text")


def _stated_index(record: Record, questions: Sequence[Question]) -> int | None:
    """The line our own harness asked, if the answer states one and the id there is the same."""
    metadata = record.get("metadata")
    index = metadata.get("index") if isinstance(metadata, Mapping) else None
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(questions):
        return None
    return index if questions[index].question_id == record["question_id"] else None


def _strangers(record: Record, questions: Sequence[Question]) -> str:
    expected = f"{questions[0].question_id!r}" if questions else "none"
    return (
        "none of the answers belongs to a question of this benchmark: the first answer has question_id "
        f"{record['question_id']!r}, the first question {expected}. Is it the right answer file and DATA folder?"
    )
