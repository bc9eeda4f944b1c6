"""TextVQA, validation 0.5.1: 5,000 questions on writing in 3,166 pictures, ten human answers each.

Data: DATA/eval/textvqa; questions (with OCR tokens) from LLaVA's eval.zip, annotations and pictures from
https://textvqa.org/dataset (CC BY 4.0; pictures from Open Images).
Asked as LLaVA does: vicuna_v1, greedy, at most 128 new tokens, reference OCR tokens in the prompt (`ocr=without`
leaves that line out, as LLaVA-1.6 was measured).
Scored by agreement with ten people after the "EvalAI" normaliser. In LLaVA's files question_id is the image id and
repeats, so an answer finds its annotation by image id and lower-cased question, cut out of its prompt.
Must match: LLaVA-1.5-7B 58.2 (https://arxiv.org/abs/2310.03744, table 3).
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question, option
from llava_consensus.evaluation.files import Record, read_json
from llava_consensus.evaluation.scorers import Score, mean, vqa_text

OCR = "Reference OCR token: "
FILES = (
    DataFile(
        "llava_textvqa_val_v051_ocr.jsonl",
        base.LLAVA_EVAL_ZIP,
        "9f60db6fb89e369263ed676dc26b48d00d4a462e73f0930c09d23394e9dcf3a3",
    ),
    DataFile("TextVQA_0.5.1_val.json", "https://dl.fbaipublicfiles.com/textvqa/data/TextVQA_0.5.1_val.json"),
)


@dataclass(frozen=True, kw_only=True)
class TextVQA(Benchmark):
    """Questions on writing in pictures, by agreement with ten people."""

    name = "textvqa"
    title = "TextVQA"
    line = "TextVQA validation: questions on writing in pictures, agreement with ten people"
    folder = "textvqa"
    images = "train_images"
    files = FILES
    metric = "accuracy"
    column = "textvqa"
    count = 5000
    max_new_tokens = 128
    licence = "CC BY 4.0; Open Images pictures"

    ocr: str = option("with", "without", line="reference OCR tokens in the prompt (LLaVA-1.5: with)", asks=True)

    @property
    def paper(self) -> float | None:
        """As published, with the OCR tokens."""
        return 58.2 if self.ocr == "with" else None

    def load(self, data: Path) -> list[Question]:
        """The questions in file order, with or without the line of reference OCR tokens in the prompt."""
        questions = super().load(data)
        if self.ocr == "with":
            return questions
        return [replace(question, text=_without_ocr(question.text)) for question in questions]

    def references(self, data: Path) -> Mapping[int, str]:
        """The most frequent of a question's ten answers."""
        given = _references(self.place(data) / FILES[1].path)
        questions = super().load(data)
        known = {question.index: given.get(_key_of_question(question), []) for question in questions}
        return {index: max(answers, key=answers.count) for index, answers in known.items() if answers}

    def score(self, records: Sequence[Record], data: Path) -> dict[str, Any]:
        """Accuracy in percent over the answered questions; `correct` is the share of agreement, 0 to 1."""
        questions = super().load(data)
        path = self.place(data) / FILES[1].path
        references = _references(path)
        joined = base.join(records, questions, _key_of_question, _key_of_record)
        scores: dict[int, Score] = {}
        for index, record in joined.answers.items():
            key = _key_of_question(questions[index])
            if key not in references:
                raise DataError(
                    f"{path} has no question {key!r} (line {index + 1} of {FILES[0].path}): another version?"
                )
            scores[index] = vqa_text.score(record["text"], references[key])
        accuracy = base.percent(mean(score.value for score in scores.values())) if scores else None
        extracted = [
            {"index": index, "extracted": score.extracted, "correct": score.value} for index, score in scores.items()
        ]
        return base.report(self.name, joined, {"accuracy": accuracy}, extracted)


def _without_ocr(text: str) -> str:
    return "\n".join(line for line in text.split("\n") if not line.startswith(OCR))


def _key_of_question(question: Question) -> Hashable:
    return question.question_id, _cut(question.text, f"{FILES[0].path}, line {question.index + 1}")


def _key_of_record(record: Record) -> Hashable:
    prompt = record.get("prompt")
    where = f"the answer to question_id {record['question_id']!r}"
    if not isinstance(prompt, str):
        raise DataError(f"{where}: no prompt, which tells the questions of one picture apart")
    return record["question_id"], _cut(prompt, where)


def _cut(prompt: str, where: str) -> str:
    try:
        return vqa_text.question_of(prompt)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error


def _references(path: Path) -> dict[Hashable, list[str]]:
    """Ten answers by (image id, lower-cased question); of two entries with one key the later counts."""
    rows = read_json(path, kind=dict).get("data")
    if not isinstance(rows, list):
        raise DataError(f"{path}: no list 'data': not a TextVQA annotation file")
    references: dict[Hashable, list[str]] = {}
    for number, row in enumerate(rows, start=1):
        try:
            answers = [str(answer) for answer in row["answers"]]
            references[row["image_id"], row["question"].lower()] = answers
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}, entry {number} of data: no image_id, question and answers") from error
        if len(answers) != 10:
            raise DataError(f"{path}, entry {number} of data: {len(answers)} answers instead of 10")
    return references
