"""GQA, testdev-balanced: 12,578 questions on relations, attributes, categories and existence in 398 photographs.

Data: DATA/eval/gqa; questions from LLaVA's eval.zip, images and gold answers from
https://cs.stanford.edu/people/dorarad/gqa/download.html (annotations CC BY 4.0, Visual Genome pictures).
Asked as LLaVA does: vicuna_v1, greedy, at most 128 new tokens, one word or phrase.
Scored by exact match after LLaVA's conversion; accuracy, binary and open are equal to the official script's to the last
bit. Its other tables are made by that script itself, of the file that `export` writes.
Must match: LLaVA-1.5-7B 62.0 (https://arxiv.org/abs/2310.03744, table 3).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question, mean
from llava_consensus.evaluation.files import Record, read_json, write_out

FILES = (
    DataFile("llava_gqa_testdev_balanced.jsonl", base.LLAVA_EVAL_ZIP),
    DataFile("data/testdev_balanced_questions.json", "questions1.2.zip at cs.stanford.edu/people/dorarad/gqa"),
)
GOLD_FIELDS = ("answer", "isBalanced", "types")  # that are scored
Questions = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class GQA(Benchmark):
    """Compositional questions on photographs, by exact match."""

    name = "gqa"
    title = "GQA"
    line = "GQA testdev-balanced: compositional questions, exact match"
    folder = "gqa"
    images = "data/images"
    files = FILES
    metric = "accuracy"
    result_keys = ("questionId", "prediction")
    column = "gqa"
    paper = 62.0
    count = 12578
    max_new_tokens = 128
    licence = "annotations CC BY 4.0; Visual Genome pictures"

    def references(self, data: Path) -> Mapping[int, str]:
        questions = self.load(data)
        gold = _gold(self.place(data) / FILES[1].path, questions)
        return {question.index: gold[str(question.question_id)]["answer"] for question in questions}

    def score(self, records: Sequence[Record], data: Path) -> dict[str, Any]:
        """Accuracy, binary and open over the answered questions; `complete` says whether those are all."""
        questions = self.load(data)
        gold = _gold(self.place(data) / FILES[1].path, questions)
        joined = base.join(records, questions)
        converted = {index: convert(record["text"]) for index, record in joined.answers.items()}
        predictions = {str(questions[index].question_id): text for index, text in converted.items()}
        extracted = []
        for index, text in converted.items():
            right = gold[str(questions[index].question_id)]
            group = right["types"].get("structural")
            extracted.append({"index": index, "extracted": text, "correct": text == right["answer"], "group": group})
        result = base.report(self.name, joined, evaluate(gold, predictions), extracted)
        return result | {"complete": result["complete"] and not missing(gold, predictions)}

    def export(self, records: Sequence[Record], data: Path, target: Path) -> dict[str, Any]:
        """The predictions that the official script reads, as LLaVA's converter writes them."""
        questions = self.load(data)
        joined = base.join(records, questions)
        rows = [
            {"questionId": questions[index].question_id, "prediction": convert(record["text"])}
            for index, record in joined.answers.items()
        ]
        write_out(target, json.dumps(rows).encode())
        return joined.audit | {"written": len(rows)}


def _gold(path: Path, questions: Sequence[Question]) -> dict[str, Any]:
    """The gold file, known to have every question that is asked and every field that is scored."""
    gold = read_json(path, kind=dict)
    for key, entry in gold.items():
        absent = [name for name in GOLD_FIELDS if not isinstance(entry, dict) or name not in entry]
        if absent:
            raise DataError(f"{path}: question {key!r} lacks {', '.join(absent)}: not a GQA question file")
    unknown = next((question for question in questions if question.question_id not in gold), None)
    if unknown is not None:
        raise DataError(
            f"{path} does not know question_id {unknown.question_id!r} (line {unknown.index + 1} of {FILES[0].path}): "
            f"another tier or version. Get it: {FILES[1].source}"
        )
    return gold


# Scoring: texts in, numbers out.


def convert(text: str) -> str:
    """LLaVA's step from an answer to a prediction: no final periods, lower case, nothing else."""
    return text.rstrip(".").lower()


def missing(questions: Questions, predictions: Mapping[str, str]) -> list[str]:
    """Ids of balanced questions without a prediction; the official script refuses any."""
    return [key for key, question in questions.items() if question["isBalanced"] and key not in predictions]


def evaluate(questions: Questions, predictions: Mapping[str, str]) -> dict[str, Any]:
    """Accuracy, binary and open in percent over balanced questions that have a prediction; accuracy is None for none.
    Call `missing` first where only a complete set counts.
    """
    scored = {key: question for key, question in questions.items() if question["isBalanced"] and key in predictions}
    right = {key: float(predictions[key] == question["answer"]) for key, question in scored.items()}
    is_open = {key: question["types"]["structural"] == "query" for key, question in scored.items()}
    return {
        "accuracy": mean(right.values()) * 100 if scored else None,
        "binary": mean(value for key, value in right.items() if not is_open[key]) * 100,
        "open": mean(value for key, value in right.items() if is_open[key]) * 100,
    }
