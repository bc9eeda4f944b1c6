"""ScienceQA, test: 4,241 school questions with options, 2,017 of them about an image (ScienceQA-IMG).

Data: DATA/eval/scienceqa; questions from LLaVA's eval.zip, problems and images (`images/test/<id>/image.png`) from
https://github.com/lupantech/ScienceQA (CC BY-NC-SA 4.0).
Asked as LLaVA does: vicuna_v1, greedy, at most 1,024 new tokens, the option's letter; questions without an image are
asked as text only (`questions=image` leaves them out). Gray and palette images are turned to RGB first, which
LLaVA's script for this benchmark does not do (it fails on some).
Scored as LLaVA's script does, to the last bit; the headline is accuracy over the questions asked with an image.
Must match: LLaVA-1.5-7B 66.8 (https://arxiv.org/abs/2310.03744, table 3).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question, mean, option
from llava_consensus.evaluation.benchmarks.parsing import LETTERS, UNREAD, option_index, sqa_letter
from llava_consensus.evaluation.files import Record, read_json, read_lines
from llava_consensus.evaluation.user_files import read_rows

MARK = "<image>\n"  # LLaVA records it in the prompt, and its scorer finds image questions by it
SOURCE = "data/scienceqa of github.com/lupantech/ScienceQA"
FILES = (
    DataFile("llava_test_CQM-A.json", base.LLAVA_EVAL_ZIP),
    DataFile("problems.json", SOURCE),
    DataFile("pid_splits.json", SOURCE),
)


class ChoiceAnswer(NamedTuple):
    text: str
    picture: bool


@dataclass(frozen=True, kw_only=True)
class ScienceQA(Benchmark):
    name = "sqa"
    title = "SQA"
    line = "ScienceQA test: school questions with options, accuracy over those with an image"
    folder = "scienceqa"
    images = "images/test"
    files = FILES
    metric = "img_accuracy"
    column = "sqa_img"
    paper = 66.8
    count = 4241
    max_new_tokens = 1024
    licence = "CC BY-NC-SA 4.0: research only"

    questions: str = option("all", "image", line="all, or only the 2,017 about an image", asks=True)

    def load(self, data: Path) -> list[Question]:
        base.require(self.place(data), FILES)
        path = self.place(data) / self.files[0].path
        # a list; some copies have a line for each
        rows = read_json(path, kind=list) if base.starts_with(path, "[") else read_lines(path, ("id", "conversations"))
        questions = [_question(path, number, row) for number, row in enumerate(rows, start=1)]
        kept = [question for question in questions if question.images or self.questions == "all"]
        return [replace(question, index=index) for index, question in enumerate(kept)]

    def read(self, path: Path, data: Path) -> list[Record]:
        """LLaVA's lines, or the result file of its script: `outputs`, the answers by id, or else `results`."""
        rows = read_rows(path) if base.starts_with(path, "{") else []
        if not rows or "question_id" in rows[0].values:
            return super().read(path, data)
        whole = rows[0].values
        if isinstance(whole.get("outputs"), dict):
            said = whole["outputs"]
        elif isinstance(whole.get("results"), dict):  # places of options; -1 if no option was read
            known = dict(enumerate(LETTERS))
            said = {key: known.get(place, "") for key, place in whole["results"].items()}
        else:
            raise DataError(f"{path}: neither outputs nor results in it: not the result file of LLaVA's script")
        seeing = {str(one.question_id) for one in self.load(data) if one.images}
        return [
            {"question_id": key, "prompt": MARK if key in seeing else "", "text": answer}
            for key, answer in said.items()
        ]

    def chance(self, questions: Sequence[Question], data: Path) -> float:
        """Mean over the questions with an image of one divided by the number of options, in percent."""
        asked = [question for question in questions if question.images]
        problems, _ = _gold(self.place(data), asked)
        return 100 * mean(1 / len(problems[str(question.question_id)]["choices"]) for question in asked)

    def score(self, records: Sequence[Record], data: Path) -> dict[str, Any]:
        """Accuracy over the answered questions and over those of them with an image, as LLaVA's script computes them.

        Without LLaVA's question file, `problems.json` and `pid_splits.json` are enough: a question has an image if
        its answer's prompt says so, as in that script.
        """
        folder = self.place(data)
        questions = self.load(data) if (folder / self.question_file).is_file() else _without_file(folder, records)
        problems, split = _gold(folder, questions)
        joined = base.join(records, questions)
        keys = {index: str(questions[index].question_id) for index in joined.answers}
        answers = {
            keys[index]: ChoiceAnswer(record["text"], bool(questions[index].images))
            for index, record in joined.answers.items()
        }
        try:
            numbers = evaluate(problems, [key for key in split if key in answers], answers)
        except ValueError as error:
            raise DataError(f"{folder / FILES[1].path}: {error}") from error
        results, parsed = numbers.pop("results"), numbers.pop("parsed")
        extracted = [
            {
                "index": index,
                "extracted": parsed[key],
                "correct": results[key] == problems[key]["answer"],
                "group": "image" if questions[index].images else "text",
            }
            for index, key in keys.items()
        ]
        unreadable = sum(parsed[key] == UNREAD for key in keys.values())
        return base.report(self.name, joined, numbers | {"counted": ["image"]}, extracted, unreadable)


def _question(path: Path, number: int, row: Any) -> Question:
    try:
        text = row["conversations"][0]["value"].replace("<image>", "").strip() + base.LETTER
        key, image = row["id"], row.get("image")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise DataError(f"{path}, entry {number}: no id and conversations: not LLaVA's ScienceQA file") from error
    if not isinstance(key, str) or not isinstance(image, str | None):
        raise DataError(f"{path}, entry {number}: id or image is of the wrong type")
    return Question(number - 1, key, (image,) if image else (), text, prompt=MARK + text if image else text)


def _split(folder: Path) -> list[str]:
    split = read_json(folder / FILES[2].path, kind=dict).get("test")
    if not isinstance(split, list):
        raise DataError(f"{folder / FILES[2].path}: no list 'test': not ScienceQA's splits")
    return split


def _without_file(folder: Path, records: Sequence[Record]) -> list[Question]:
    """The questions of the test split, with an image if the prompt of their answer has one."""
    base.require(folder, FILES[1:])
    seeing = {record["question_id"] for record in records if MARK.strip() in str(record.get("prompt"))}
    return [
        Question(index, key, ("image.png",) if key in seeing else (), "") for index, key in enumerate(_split(folder))
    ]


def _gold(folder: Path, questions: Sequence[Question]) -> tuple[dict[str, Any], list[str]]:
    """Problems by id and the ids of the test split, known to have every question that is asked."""
    path, split = folder / FILES[1].path, _split(folder)
    problems: dict[str, Any] = read_json(path, kind=dict)
    for known, file in ((set(split), folder / FILES[2].path), (problems, path)):
        base.check_known(file, ((question, question.question_id) for question in questions), known, SOURCE)
    for question in questions:
        problem = problems[str(question.question_id)]
        if not isinstance(problem, dict) or not isinstance(problem.get("choices"), list) or "answer" not in problem:
            raise DataError(f"{path}: no choices and answer for {question.question_id!r}: another version?")
    return problems, split


def evaluate(
    problems: Mapping[str, Mapping[str, Any]], ids: Sequence[str], answers: Mapping[str, ChoiceAnswer]
) -> dict[str, Any]:
    """Percentages over `ids`, each once: all (`accuracy`) and those asked with an image (`img_accuracy`).

    An id without an answer counts as wrong, and as a question without an image. A percentage of nothing is None.
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
            raise ValueError(f"problem {key!r}: option {right_index + 1} is right, and only A to E can be answered")
        answer = answers.get(key)
        extracted[key] = sqa_letter(answer.text) if answer else UNREAD
        results[key] = option_index(extracted[key], choices)
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
