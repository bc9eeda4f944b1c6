"""ScienceQA, test: 4,241 school questions with options, 2,017 of them about a picture (ScienceQA-IMG).

Data: DATA/eval/scienceqa; questions from LLaVA's eval.zip, problems and pictures (`images/test/<id>/image.png`) from
https://github.com/lupantech/ScienceQA (CC BY-NC-SA 4.0).
Asked as LLaVA does: vicuna_v1, greedy, at most 1,024 new tokens, the option's letter; questions without a picture are
asked as text alone (`questions=image` leaves them out). Grey and palette pictures are turned to RGB first, which
LLaVA's script for this benchmark does not do (it fails on some).
Scored by LLaVA's script; the headline is accuracy over the questions asked with a picture.
Equal to LLaVA's script to the last bit. It reads a lone letter, `A. text`, or exactly one `The answer is A.` (one more
character must follow the letter); nothing is stripped, no case is folded, everything else is FAILED.
Must match: LLaVA-1.5-7B 66.8 (https://arxiv.org/abs/2310.03744, table 3).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question, mean, option
from llava_consensus.evaluation.files import Record, read_json, read_lines, read_text

MARK = "<image>\n"  # LLaVA records it in the prompt, and its scorer finds picture questions by it
SOURCE = "data/scienceqa of github.com/lupantech/ScienceQA"
FILES = (
    DataFile("llava_test_CQM-A.json", base.LLAVA_EVAL_ZIP),
    DataFile("problems.json", SOURCE),
    DataFile("pid_splits.json", SOURCE),
)

LETTERS = ("A", "B", "C", "D", "E")
FAILED = "FAILED"
_STATED = re.compile(r"The answer is ([A-Z]).")


class ChoiceAnswer(NamedTuple):
    """One answer and whether its prompt showed a picture."""

    text: str
    picture: bool


@dataclass(frozen=True, kw_only=True)
class ScienceQA(Benchmark):
    """School questions with options, by accuracy over those with a picture."""

    name = "sqa"
    title = "SQA"
    line = "ScienceQA test: school questions with options, accuracy over those with a picture"
    folder = "scienceqa"
    images = "images/test"
    files = FILES
    metric = "img_accuracy"
    column = "sqa_img"
    paper = 66.8
    count = 4241
    max_new_tokens = 1024
    licence = "CC BY-NC-SA 4.0: research only"

    questions: str = option("all", "image", line="all, or only the 2,017 about a picture", asks=True)

    def load(self, data: Path) -> list[Question]:
        """The questions in file order: all, or those about a picture."""
        base.require(self.place(data), FILES)
        path = self.place(data) / self.files[0].path
        questions = [_question(path, number, row) for number, row in enumerate(_entries(path), start=1)]
        kept = [question for question in questions if question.images or self.questions == "all"]
        return [replace(question, index=index) for index, question in enumerate(kept)]

    def read(self, path: Path, data: Path) -> list[Record]:
        """LLaVA's lines, or the result file of its script: `outputs`, the answers by id, or else `results`."""
        text = read_text(path) if path.is_file() else ""
        if '"question_id"' in text or not text.lstrip().startswith("{"):
            return super().read(path, data)
        whole = read_json(path, kind=dict)
        if isinstance(whole.get("outputs"), dict):
            said = whole["outputs"]
        elif isinstance(whole.get("results"), dict):  # places of options; -1 where no option was read
            known = dict(enumerate(LETTERS))
            said = {key: known.get(place, "") for key, place in whole["results"].items()}
        else:
            raise DataError(f"{path}: neither outputs nor results in it: not the result file of LLaVA's script")
        ids = [str(one.question_id) for one in self.load(data) if one.images]
        shown = MARK if ids else ""
        return [
            {"question_id": key, "prompt": shown if key in ids else "", "text": answer} for key, answer in said.items()
        ]

    def chance(self, questions: Sequence[Question], data: Path) -> float:
        """Mean over the questions with a picture of one divided by the number of options, in percent."""
        asked = [question for question in questions if question.images]
        problems, _ = _gold(self.place(data), asked)
        return 100 * mean(1 / len(problems[str(question.question_id)]["choices"]) for question in asked)

    def score(self, records: Sequence[Record], data: Path) -> dict[str, Any]:
        """Accuracy over the answered questions and over those of them with a picture, as LLaVA's script computes them.

        Without LLaVA's question file, `problems.json` and `pid_splits.json` are enough: a question has a picture where
        its answer's prompt says so, as in that script.
        """
        folder = self.place(data)
        questions = self.load(data) if (folder / self.question_file).is_file() else _without_file(folder, records)
        problems, split = _gold(folder, questions)
        joined = base.join(records, questions)
        answers = {
            str(questions[index].question_id): ChoiceAnswer(record["text"], bool(questions[index].images))
            for index, record in joined.answers.items()
        }
        try:
            numbers = evaluate(problems, [key for key in split if key in answers], answers)
        except ValueError as error:
            raise DataError(f"{folder / FILES[1].path}: {error}") from error
        results, parsed = numbers.pop("results"), numbers.pop("parsed")
        extracted = []
        for index in joined.answers:
            key = str(questions[index].question_id)
            correct = results[key] == problems[key]["answer"]
            group = "image" if questions[index].images else "text"
            extracted.append({"index": index, "extracted": parsed[key], "correct": correct, "group": group})
        unreadable = sum(parsed[str(questions[index].question_id)] == FAILED for index in joined.answers)
        return base.report(self.name, joined, numbers | {"counted": ["image"]}, extracted, unreadable)


def _entries(path: Path) -> list[Any]:
    """Entries of LLaVA's question file, which is a list; some copies have a line for each."""
    if read_text(path).lstrip().startswith("["):
        entries: list[Any] = read_json(path, kind=list)
        return entries
    return read_lines(path, ("id", "conversations"))


def _question(path: Path, number: int, row: Any) -> Question:
    try:
        text = row["conversations"][0]["value"].replace("<image>", "").strip() + base.LETTER
        key, image = row["id"], row.get("image")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise DataError(f"{path}, entry {number}: no id and conversations: not LLaVA's ScienceQA file") from error
    if not isinstance(key, str) or not isinstance(image, str | None):
        raise DataError(f"{path}, entry {number}: id or image is of the wrong type")
    return Question(number - 1, key, (image,) if image else (), text, prompt=MARK + text if image else text)


def _without_file(folder: Path, records: Sequence[Record]) -> list[Question]:
    """The questions of the test split, with a picture where the prompt of their answer has one."""
    base.require(folder, FILES[1:])
    split = read_json(folder / FILES[2].path, kind=dict).get("test")
    ids = split if isinstance(split, list) else []
    seeing = {record["question_id"] for record in records if MARK.strip() in str(record.get("prompt"))}
    return [Question(index, key, ("image.png",) if key in seeing else (), "") for index, key in enumerate(ids)]


def _gold(folder: Path, questions: Sequence[Question]) -> tuple[dict[str, Any], list[str]]:
    """Problems by id and the ids of the test split, known to have every question that is asked."""
    path = folder / FILES[1].path
    problems = read_json(path, kind=dict)
    split = read_json(folder / FILES[2].path, kind=dict).get("test")
    if not isinstance(split, list):
        raise DataError(f"{folder / FILES[2].path}: no list 'test': not ScienceQA's splits")
    split_ids = set(split)
    for question in questions:
        problem = problems.get(str(question.question_id))
        if question.question_id not in split_ids:
            raise DataError(
                f"{folder / FILES[2].path}: {question.question_id!r} is asked but not in 'test': another version?"
            )
        if not isinstance(problem, dict) or not isinstance(problem.get("choices"), list) or "answer" not in problem:
            raise DataError(
                f"{path}: no choices and answer for {question.question_id!r}, which is asked: another version?"
            )
    return problems, split


# Scoring: texts in, numbers out.


def parse(text: str) -> str:
    """The letter an answer states, or FAILED."""
    if text in LETTERS:
        return text
    if len(text) >= 3 and text[0] in LETTERS and text[1:3] == ". ":
        return text[0]
    stated = _STATED.findall(text)
    return stated[0] if len(stated) == 1 else FAILED


def index_of(letter: str, choices: int) -> int:
    """Position of a letter among the first `choices` options, -1 if it is none of them."""
    options = LETTERS[:choices]
    return options.index(letter) if letter in options else -1


def evaluate(
    problems: Mapping[str, Mapping[str, Any]], ids: Sequence[str], answers: Mapping[str, ChoiceAnswer]
) -> dict[str, Any]:
    """Percentages over `ids`, each once: all (`accuracy`) and those asked with a picture (`img_accuracy`).

    An id without an answer counts as wrong, and as a question without a picture. A percentage of nothing is None.
    Raises ValueError for an id that is no problem and for an answer index beyond E, naming the id.
    """
    extracted: dict[str, str] = {}
    results: dict[str, int] = {}
    counts = {"correct": 0, "count": 0, "img_correct": 0, "img_count": 0}
    for key in dict.fromkeys(ids):
        if key not in problems:
            raise ValueError(f"problem {key!r} is in the split but not among the problems")
        right_index, choices = problems[key]["answer"], len(problems[key]["choices"])
        if right_index >= len(LETTERS):
            raise ValueError(
                f"problem {key!r}: the right answer is option {right_index + 1}, only A to E can be answered"
            )
        answer = answers.get(key)
        extracted[key] = parse(answer.text) if answer else FAILED
        results[key] = index_of(extracted[key], choices)
        right, picture = results[key] == right_index, answer is not None and answer.picture
        for name, value in (("correct", right), ("img_count", picture), ("img_correct", right and picture)):
            counts[name] += value
    counts["count"] = len(results)
    return {
        "accuracy": _percent(counts["correct"], counts["count"]),
        "img_accuracy": _percent(counts["img_correct"], counts["img_count"]),
        **counts,
        "results": results,
        "parsed": extracted,
    }


def _percent(part: int, whole: int) -> float | None:
    return part / whole * 100 if whole else None
