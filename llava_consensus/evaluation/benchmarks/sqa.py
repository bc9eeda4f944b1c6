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
from typing import Any

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question, mean, option
from llava_consensus.evaluation.benchmarks.parsing import LETTERS, UNREAD, option_index, sqa_letter
from llava_consensus.evaluation.files import Record, read_json

MARK = "<image>\n"  # LLaVA records it in the prompt, and its scorer finds image questions by it
SOURCE = "data/scienceqa of github.com/lupantech/ScienceQA"
FILES = (
    DataFile("llava_test_CQM-A.json", base.LLAVA_EVAL_ZIP),
    DataFile("problems.json", SOURCE),
    DataFile("pid_splits.json", SOURCE),
)


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
        questions = [_question(path, number, row) for number, row in enumerate(read_json(path, kind=list), start=1)]
        kept = [question for question in questions if question.images or self.questions == "all"]
        return [replace(question, index=index) for index, question in enumerate(kept)]

    def gold(self, data: Path, questions: Sequence[Question]) -> Mapping[int, Any]:
        """Problems of the questions, known to have options and an answer."""
        path, splits = self.place(data) / FILES[1].path, self.place(data) / FILES[2].path
        split = read_json(splits, kind=dict).get("test")
        if not isinstance(split, list):
            raise DataError(f"{splits}: no list 'test': not ScienceQA's splits")
        keys = [(question, str(question.question_id)) for question in questions]
        base.labels(splits, keys, dict.fromkeys(split), SOURCE)
        problems: dict[int, Any] = base.labels(path, keys, read_json(path, kind=dict), SOURCE)
        for question, key in keys:
            problem = problems[question.index]
            if not isinstance(problem, dict) or not isinstance(problem.get("choices"), list) or "answer" not in problem:
                raise DataError(f"{path}: no choices and answer for {key!r}: another version?")
            if problem["answer"] >= len(LETTERS):
                raise DataError(f"{path}: option {problem['answer'] + 1} is right for {key!r}, beyond A to E")
        return problems

    def chance(self, questions: Sequence[Question], data: Path) -> float:
        """Mean over the questions with an image of one divided by the number of options, in percent."""
        problems = self.gold(data, [question for question in questions if question.images])
        return 100 * mean(1 / len(problem["choices"]) for problem in problems.values())

    def grade(self, text: str, question: Question, gold: Any) -> Record:
        letter = sqa_letter(text)
        correct = option_index(letter, len(gold["choices"])) == gold["answer"]
        return {"extracted": letter, "correct": correct, "group": "image" if question.images else "text"}

    def readable(self, text: str, row: Record) -> bool:
        return bool(row["extracted"] != UNREAD)

    def totals(self, rows: Sequence[Record]) -> Record:
        """Accuracy over the answered questions and over those with an image, as LLaVA's script computes them."""
        shown = [row for row in rows if row["group"] == "image"]
        return {"accuracy": base.share(rows), "img_accuracy": base.share(shown), "counted": ["image"]}


def _question(path: Path, number: int, row: Any) -> Question:
    try:
        text = row["conversations"][0]["value"].replace("<image>", "").strip() + base.LETTER
        key, image = row["id"], row.get("image")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise DataError(f"{path}, entry {number}: no id and conversations: not LLaVA's ScienceQA file") from error
    if not isinstance(key, str) or not isinstance(image, str | None):
        raise DataError(f"{path}, entry {number}: id or image is of the wrong type")
    return Question(number - 1, key, (image,) if image else (), text, prompt=MARK + text if image else text)
