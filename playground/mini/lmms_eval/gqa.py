"""The mini GQA for lmms-eval: pictures, gold answers and scores, the latter by this library's own scorer."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from llava_consensus.evaluation.benchmarks.parsing import gqa_prediction
from llava_consensus.evaluation.media import open_image

FOLDER = Path("playground/mini/eval/gqa/data")


@cache
def gold() -> dict[str, dict[str, Any]]:
    """The official questions by id."""
    questions: dict[str, dict[str, Any]] = json.loads((FOLDER / "testdev_balanced_questions.json").read_bytes())
    return questions


def pictures(document: dict[str, Any]) -> list[Any]:
    return [open_image(FOLDER / "images" / document["image"])]


def answer(document: dict[str, Any]) -> str:
    right: str = gold()[str(document["question_id"])]["answer"]
    return right


def score(document: dict[str, Any], results: list[str]) -> dict[str, float]:
    return {"accuracy": float(gqa_prediction(results[0]) == answer(document))}
