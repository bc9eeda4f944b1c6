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
from typing import NamedTuple

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question, mean, option
from llava_consensus.evaluation.benchmarks.parsing import normalise
from llava_consensus.evaluation.files import Record, read_json

OCR = "Reference OCR token: "
PEOPLE = 10  # who answered each question
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
    extracted: str  # parsed answer


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

    def key_of_question(self, question: Question) -> Hashable:
        return question.question_id, _cut(question.text, f"{FILES[0].path}, line {question.index + 1}")

    def key_of_record(self, record: Record) -> Hashable:
        return record["question_id"], _cut(record.get("prompt"), f"the answer to question_id {record['question_id']!r}")

    def gold(self, data: Path, questions: Sequence[Question]) -> Mapping[int, list[str]]:
        """The ten answers to each question, found by image id and lower-cased question; of two entries the later."""
        path = self.place(data) / FILES[1].path
        rows = read_json(path, kind=dict).get("data")
        if not isinstance(rows, list):
            raise DataError(f"{path}: no list 'data': not a TextVQA annotation file")
        known: dict[Hashable, list[str]] = {}
        for number, row in enumerate(base.check_entries(path, rows, ("image_id", "question", "answers")), start=1):
            if len(row["answers"]) != PEOPLE:
                raise DataError(f"{path}, entry {number}: {len(row['answers'])} answers instead of {PEOPLE}")
            known[row["image_id"], row["question"].lower()] = [str(answer) for answer in row["answers"]]
        keys = ((question, self.key_of_question(question)) for question in questions)
        found: Mapping[int, list[str]] = base.labels(path, keys, known, FILES[1].source)
        return found

    def references(self, data: Path) -> Mapping[int, str]:
        return {index: max(answers, key=answers.count) for index, answers in self.gold(data, self.load(data)).items()}

    def grade(self, text: str, question: Question, gold: list[str]) -> Record:
        """`correct` is the share of agreement."""
        score = score_answer(text, gold)
        return {"extracted": score.extracted, "correct": score.value}


def _without_ocr(text: str) -> str:
    return "\n".join(line for line in text.split("\n") if not line.startswith(OCR))


def _cut(prompt: object, where: str) -> str:
    if not isinstance(prompt, str):
        raise DataError(f"{where}: no prompt, which tells the questions about one image apart")
    try:
        return question_of(prompt)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error


def score_answer(prediction: str, references: Sequence[str]) -> Score:
    """One answer against its ten references: the mean over these of min(1, others equal to the answer / 3)."""
    if len(references) != PEOPLE:
        raise ValueError(f"a question needs exactly {PEOPLE} reference answers, got {len(references)}")
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
