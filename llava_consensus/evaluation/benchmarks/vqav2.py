"""VQA v2: open questions on COCO images; test-dev has 107,394 of the 447,793 questions of test2015.

Data: DATA/eval/vqav2; question lists from LLaVA's eval.zip, images (`test2015`) from COCO, annotations from
https://visualqa.org/download.html (CC BY 4.0). The answers of test-dev are not published: without an annotations file
the score is None and `export` writes the file for EvalAI (challenge 830). `split=val` asks the validation questions,
whose answers are published (210 thousand questions).
Asked as LLaVA does: vicuna_v1, greedy, at most 128 new tokens, one word or phrase.
Scored by the official evaluation. A submission covers all of test2015 as LLaVA's converter writes it, byte for byte:
questions that were not asked get an empty answer.
Equal to the official code (since 2021, commit a013f00) under Python 2.7 to the last bit, its rounding of exact halves
included: answer and references are normalised only if the references differ, so `Yes` against ten `yes` is wrong.
Must match: LLaVA-1.5-7B 78.5 on test-dev (https://arxiv.org/abs/2310.03744, table 3).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any, NamedTuple

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question, mean, option
from llava_consensus.evaluation.benchmarks.parsing import flat, normalise, vqav2_strip_marks, vqav2_unify_words
from llava_consensus.evaluation.benchmarks.textvqa import Score
from llava_consensus.evaluation.files import Record, read_json, write_out

WHOLE = DataFile("llava_vqav2_mscoco_test2015.jsonl", base.LLAVA_EVAL_ZIP, optional=True, exported=True)
OFFICIAL = "visualqa.org/download.html"
Reference = Mapping[str, Any]  # answer, answer_confidence, answer_id


class Split(NamedTuple):
    """The question list, the folder of images, the answers if they are published, and the number of questions."""

    questions: DataFile
    images: str
    annotations: DataFile
    size: int


def _hidden(name: str) -> DataFile:
    return DataFile(f"v2_mscoco_{name}_annotations.json", "nobody: not published, EvalAI scores it", optional=True)


TEST_DEV = DataFile("llava_vqav2_mscoco_test-dev2015.jsonl", base.LLAVA_EVAL_ZIP)
SPLITS = {
    "test-dev": Split(TEST_DEV, "test2015", _hidden("test-dev2015"), 107394),
    "test": Split(replace(WHOLE, optional=False), "test2015", _hidden("test2015"), 447793),
    "val": Split(
        DataFile("v2_OpenEnded_mscoco_val2014_questions.json", OFFICIAL),
        "val2014",
        DataFile("v2_mscoco_val2014_annotations.json", OFFICIAL),
        214354,
    ),
}


@dataclass(frozen=True, kw_only=True)
class VQAv2(Benchmark):
    name = "vqav2"
    title = "VQAv2"
    line = "VQA v2 test-dev: open questions; answers are scored by EvalAI, or here where annotations are"
    folder = "vqav2"
    metric = "accuracy"
    column = "vqav2"
    max_new_tokens = 128
    licence = "CC BY 4.0 (annotations); COCO images"
    whole = "EvalAI would count each as wrong"

    split: str = option(*SPLITS, line="which questions; only those of val have published answers", asks=True)

    @property
    def files(self) -> tuple[DataFile, ...]:
        """Questions and annotations of the split, and for test-dev the questions a submission covers."""
        split = SPLITS[self.split]
        return (split.questions, split.annotations, *((WHOLE,) if self.split == "test-dev" else ()))

    @property
    def images(self) -> str:
        return SPLITS[self.split].images

    @property
    def count(self) -> int:
        return SPLITS[self.split].size

    @property
    def paper(self) -> float | None:
        return 78.5 if self.split == "test-dev" else None

    def load(self, data: Path) -> list[Question]:
        """The questions in file order, of LLaVA's file or, for val, of the official one."""
        base.require(self.place(data), self.files[:2])
        path = self.place(data) / self.question_file
        return base.read_questions(path) if path.suffix == ".jsonl" else _read_official(path)

    def scored_by(self, data: Path) -> str | None:
        return None if self._annotations(data).is_file() else "EvalAI"

    def _annotations(self, data: Path) -> Path:
        return self.place(data) / SPLITS[self.split].annotations.path

    def gold(self, data: Path, questions: Sequence[Question]) -> Mapping[int, Any]:
        """The official references of every question; None of each if they are not published."""
        path = self._annotations(data)
        if not path.is_file():
            return {question.index: None for question in questions}
        known = {}
        for number, row in enumerate(read_json(path, kind=dict).get("annotations", ()), start=1):
            texts = [answer.get("answer") for answer in row.get("answers", ())]
            if not texts or not all(isinstance(text, str) for text in texts):
                raise DataError(f"{path}, entry {number} of annotations: no answers, or one that is no text")
            known[row.get("question_id")] = row["answers"]
        keys = ((question, question.question_id) for question in questions)
        found: Mapping[int, Any] = base.labels(path, keys, known, OFFICIAL)
        return found

    def grade(self, text: str, question: Question, gold: Any) -> Record:
        if gold is None:
            return {"extracted": normalise(text)}
        score = score_answer(text, gold)
        return {"extracted": score.extracted, "correct": score.value}

    def totals(self, rows: Sequence[Record]) -> Record:
        """Official accuracy in percent over the answered questions; None without annotations."""
        numbers: Record = {"accuracy": accuracy([row["correct"] for row in rows if "correct" in row])}
        return {**numbers, "split": self.split, "rounded": 2}

    def export(self, records: Sequence[Record], data: Path, target: Path) -> dict[str, Any]:
        """EvalAI's JSON over the whole of test2015 (of val, for `split=val`); answers normalised as LLaVA does.

        `missing` holds the questions of the split without an answer. These, and all questions outside the split, get
        an empty answer.
        """
        questions = self.load(data)
        audit = base.join(records, questions).audit
        answers = {record["question_id"]: normalise(record["text"]) for record in records}
        if self.split != "val":
            base.require(self.place(data), (replace(WHOLE, optional=False),))
            questions = base.read_questions(self.place(data) / WHOLE.path)
        rows = [{"question_id": one.question_id, "answer": answers.get(one.question_id, "")} for one in questions]
        write_out(target, json.dumps(rows).encode())
        return audit | {"written": len(rows)}


def _read_official(path: Path) -> list[Question]:
    """The official question file, with LLaVA's suffix and COCO's names of images."""
    questions = []
    for index, row in enumerate(read_json(path, kind=dict).get("questions", ())):
        try:
            image = f"COCO_val2014_{int(row['image_id']):012}.jpg"
            questions.append(Question(index, row["question_id"], (image,), row["question"] + base.SHORT))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}, entry {index + 1} of questions: no question_id, image_id and question") from error
    return questions


def score_answer(answer: str, references: Sequence[Reference]) -> Score:
    """One answer: the mean over references of min(1, other references equal to it / 3)."""
    prediction, *texts = map(flat, (answer, *(reference["answer"] for reference in references)))
    if len(set(texts)) > 1:
        prediction, *texts = [vqav2_unify_words(vqav2_strip_marks(text)) for text in (prediction, *texts)]
    normalised = [{**reference, "answer": text} for reference, text in zip(references, texts, strict=True)]
    equal = [reference for reference in normalised if reference["answer"] == prediction]
    # as in the official code, every copy of the same record is left out, not only the one at hand
    matches = (sum(other != reference for other in equal) for reference in normalised)
    return Score(mean(min(1, float(count) / 3) for count in matches), prediction)


def accuracy(scores: Sequence[float]) -> float | None:
    """Mean in percent as the official code rounds it; None of nothing."""
    total = 0.0
    for score in scores:
        total += score
    return half_up(100 * total / len(scores)) if scores else None


def half_up(value: float) -> float:
    """Two decimals as Python 2.7 rounds: the exact binary value decides, exact halves go away from zero."""
    return float(Decimal(value).quantize(Decimal("0.01"), ROUND_HALF_UP))
