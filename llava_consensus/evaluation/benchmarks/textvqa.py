"""TextVQA, validation 0.5.1: 5,000 questions on writing in 3,166 images, ten human answers each.

Data: DATA/eval/textvqa; questions (with OCR tokens) from LLaVA's eval.zip, annotations and images from
https://textvqa.org/dataset (CC BY 4.0; images from Open Images).
Asked as LLaVA does: vicuna_v1, greedy, at most 128 new tokens, reference OCR tokens in the prompt (`ocr=without`
leaves that line out, as LLaVA-1.6 was measured).
Scored by agreement with ten people after the "EvalAI" normaliser. In LLaVA's files question_id is the image id and
repeats, so an answer finds its annotation by image id and lower-cased question, cut out of its prompt.
Equal to the official evaluator to the last bit, oddities included (`parsing.normalise`).
Must match: LLaVA-1.5-7B 58.2 (https://arxiv.org/abs/2310.03744, table 3).
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question, mean, option
from llava_consensus.evaluation.benchmarks.parsing import normalise
from llava_consensus.evaluation.files import Record, read_json

OCR = "Reference OCR token: "
FILES = (
    DataFile(
        "llava_textvqa_val_v051_ocr.jsonl",
        base.LLAVA_EVAL_ZIP,
        "9f60db6fb89e369263ed676dc26b48d00d4a462e73f0930c09d23394e9dcf3a3",
    ),
    DataFile("TextVQA_0.5.1_val.json", "https://dl.fbaipublicfiles.com/textvqa/data/TextVQA_0.5.1_val.json"),
)
_OCR_FIRST = re.compile("Question: (.*?) Short answer:", re.DOTALL)


class Score(NamedTuple):
    value: float  # 0..1
    extracted: str  # what was read out of the answer


@dataclass(frozen=True, kw_only=True)
class TextVQA(Benchmark):
    name = "textvqa"
    title = "TextVQA"
    line = "TextVQA validation: questions on writing in images, agreement with ten people"
    folder = "textvqa"
    images = "train_images"
    files = FILES
    metric = "accuracy"
    column = "textvqa"
    count = 5000
    max_new_tokens = 128
    licence = "CC BY 4.0; Open Images images"

    ocr: str = option("with", "without", line="reference OCR tokens in the prompt (LLaVA-1.5: with)", asks=True)

    @property
    def paper(self) -> float | None:
        return 58.2 if self.ocr == "with" else None

    def load(self, data: Path) -> list[Question]:
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
        answered = [(questions[index], _key_of_question(questions[index])) for index in joined.answers]
        base.check_known(path, answered, references, FILES[1].source)
        extracted: list[dict[str, Any]] = []
        for (question, key), record in zip(answered, joined.answers.values(), strict=True):
            score = score_answer(record["text"], references[key])
            extracted.append({"index": question.index, "extracted": score.extracted, "correct": score.value})
        accuracy = base.percent(mean(row["correct"] for row in extracted)) if extracted else None
        return base.report(self.name, joined, {"accuracy": accuracy}, extracted)


def _without_ocr(text: str) -> str:
    return "\n".join(line for line in text.split("\n") if not line.startswith(OCR))


def _key_of_question(question: Question) -> Hashable:
    return question.question_id, _cut(question.text, f"{FILES[0].path}, line {question.index + 1}")


def _key_of_record(record: Record) -> Hashable:
    return record["question_id"], _cut(record.get("prompt"), f"the answer to question_id {record['question_id']!r}")


def _cut(prompt: object, where: str) -> str:
    if not isinstance(prompt, str):
        raise DataError(f"{where}: no prompt, which tells the questions about one image apart")
    try:
        return question_of(prompt)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error


def _references(path: Path) -> dict[Hashable, list[str]]:
    """Ten answers by (image id, lower-cased question); of two entries with one key the later counts."""
    rows = read_json(path, kind=dict).get("data")
    if not isinstance(rows, list):
        raise DataError(f"{path}: no list 'data': not a TextVQA annotation file")
    base.check_entries(path, rows, ("image_id", "question", "answers"), "data")
    references: dict[Hashable, list[str]] = {}
    for number, row in enumerate(rows, start=1):
        if len(row["answers"]) != 10:
            raise DataError(f"{path}, entry {number} of data: {len(row['answers'])} answers instead of 10")
        references[row["image_id"], row["question"].lower()] = [str(answer) for answer in row["answers"]]
    return references


def score_answer(prediction: str, references: Sequence[str]) -> Score:
    """One answer against its ten references: the mean over these of min(1, others equal to the answer / 3)."""
    if len(references) != 10:
        raise ValueError(f"a question needs exactly 10 reference answers, got {len(references)}")
    answer = normalise(prediction)
    hits = [normalise(reference) == answer for reference in references]
    return Score(mean(min(1, float(sum(hits) - hit) / 3) for hit in hits), answer)


def question_of(prompt: str) -> str:
    """The question inside a prompt of LLaVA's (with or without OCR tokens), lower-cased."""
    lines = prompt.split("\n")
    if prompt.startswith("OCR tokens: "):
        match = _OCR_FIRST.search(prompt)
        question = match.group(1) if match else None
    elif "Reference OCR token: " in prompt and len(lines) == 3:
        question = lines[1 if prompt.startswith("Reference OCR token:") else 0]
    else:
        question = lines[0] if len(lines) == 2 else None
    if question is None:
        raise ValueError(f"no question found in the prompt {prompt[:80]!r}: not one of LLaVA's TextVQA forms")
    return question.lower()
