"""GQA, testdev-balanced: 12,578 questions on relations, attributes, categories and existence in 398 photographs.

Data: DATA/eval/gqa; questions from LLaVA's eval.zip, images and gold answers from
https://cs.stanford.edu/people/dorarad/gqa/download.html (annotations CC BY 4.0, Visual Genome images).
Asked as LLaVA does: vicuna_v1, greedy, at most 128 new tokens, one word or phrase.
Scored by exact match after LLaVA's conversion; accuracy, binary and open are equal to the official script's to the last
bit. Its other tables are made by that script itself, of answers converted by LLaVA's `convert_gqa_for_eval.py`.
Must match: LLaVA-1.5-7B 62.0 (https://arxiv.org/abs/2310.03744, table 3).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question, mean
from llava_consensus.evaluation.benchmarks.parsing import gqa_prediction
from llava_consensus.evaluation.files import Record, read_json

FILES = (
    DataFile("llava_gqa_testdev_balanced.jsonl", base.LLAVA_EVAL_ZIP),
    DataFile("data/testdev_balanced_questions.json", "questions1.2.zip at cs.stanford.edu/people/dorarad/gqa"),
)
OPEN = "query"  # structural type of open questions; all others are binary
KINDS = ("binary", "open")


@dataclass(frozen=True, kw_only=True)
class GQA(Benchmark):
    name = "gqa"
    title = "GQA"
    line = "GQA testdev-balanced: compositional questions, exact match"
    folder = "gqa"
    images = "data/images"
    files = FILES
    metric = "accuracy"
    column = "gqa"
    paper = 62.0
    count = 12578
    max_new_tokens = 128
    licence = "annotations CC BY 4.0; Visual Genome images"

    def gold(self, data: Path, questions: Sequence[Question]) -> Mapping[int, Any]:
        path = self.place(data) / FILES[1].path
        known = base.check_entries(path, read_json(path, kind=dict), ("answer", "types"))
        found: Mapping[int, Any] = base.labels(
            path, ((one, one.question_id) for one in questions), known, FILES[1].source
        )
        return found

    def references(self, data: Path) -> Mapping[int, str]:
        return {index: row["answer"] for index, row in self.gold(data, self.load(data)).items()}

    def grade(self, text: str, question: Question, gold: Any) -> Record:
        text = gqa_prediction(text)
        return {"extracted": text, "correct": text == gold["answer"], "group": gold["types"].get("structural")}

    def totals(self, rows: Sequence[Record]) -> Record:
        """Accuracy, binary and open in percent over the answered questions; None for no accuracy."""
        kinds = {name: [row["correct"] for row in rows if (row["group"] == OPEN) == (name == "open")] for name in KINDS}
        return {"accuracy": base.share(rows), **{name: mean(hits) * 100 for name, hits in kinds.items()}}
