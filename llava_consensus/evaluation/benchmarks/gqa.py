"""GQA, testdev-balanced: 12,578 questions on relations, attributes, categories and existence in 398 photographs.

Data: DATA/eval/gqa; questions from LLaVA's eval.zip, images and gold answers from
https://cs.stanford.edu/people/dorarad/gqa/download.html (annotations CC BY 4.0, Visual Genome images).
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

from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question, mean
from llava_consensus.evaluation.benchmarks.parsing import gqa_prediction
from llava_consensus.evaluation.files import Record, read_json, write_out

FILES = (
    DataFile("llava_gqa_testdev_balanced.jsonl", base.LLAVA_EVAL_ZIP),
    DataFile("data/testdev_balanced_questions.json", "questions1.2.zip at cs.stanford.edu/people/dorarad/gqa"),
)
Questions = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class GQA(Benchmark):
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
    licence = "annotations CC BY 4.0; Visual Genome images"

    def references(self, data: Path) -> Mapping[int, str]:
        questions = self.load(data)
        gold = self._gold(data, questions)
        return {question.index: gold[str(question.question_id)]["answer"] for question in questions}

    def score(self, records: Sequence[Record], data: Path) -> dict[str, Any]:
        """Accuracy, binary and open over the answered questions; `complete` says whether those are all."""
        questions = self.load(data)
        gold = self._gold(data, questions)
        joined = base.join(records, questions)
        predictions, extracted = {}, []
        for index, record in joined.answers.items():
            key, text = str(questions[index].question_id), gqa_prediction(record["text"])
            predictions[key] = text
            row = {"index": index, "extracted": text, "correct": text == gold[key]["answer"]}
            extracted.append(row | {"group": gold[key]["types"].get("structural")})
        result = base.report(self.name, joined, evaluate(gold, predictions), extracted)
        return result | {"complete": result["complete"] and not missing(gold, predictions)}

    def export(self, records: Sequence[Record], data: Path, target: Path) -> dict[str, Any]:
        questions = self.load(data)
        joined = base.join(records, questions)
        rows = [
            {"questionId": questions[index].question_id, "prediction": gqa_prediction(record["text"])}
            for index, record in joined.answers.items()
        ]
        write_out(target, json.dumps(rows).encode())
        return joined.audit | {"written": len(rows)}

    def _gold(self, data: Path, questions: Sequence[Question]) -> dict[str, Any]:
        path = self.place(data) / FILES[1].path
        gold: dict[str, Any] = read_json(path, kind=dict)
        base.check_entries(path, gold, ("answer", "isBalanced", "types"))
        base.check_known(path, ((question, question.question_id) for question in questions), gold, FILES[1].source)
        return gold


def missing(questions: Questions, predictions: Mapping[str, str]) -> list[str]:
    """Ids of balanced questions without a prediction; the official script refuses any."""
    return [key for key, question in questions.items() if question["isBalanced"] and key not in predictions]


def evaluate(questions: Questions, predictions: Mapping[str, str]) -> dict[str, Any]:
    """Accuracy, binary and open in percent over balanced questions that have a prediction; None for no accuracy."""
    right: dict[bool, list[float]] = {True: [], False: []}  # by whether a question is open
    every = []
    for key, question in questions.items():
        if question["isBalanced"] and key in predictions:
            every.append(float(predictions[key] == question["answer"]))
            right[question["types"]["structural"] == "query"].append(every[-1])
    return {
        "accuracy": mean(every) * 100 if every else None,
        "binary": mean(right[False]) * 100,
        "open": mean(right[True]) * 100,
    }
