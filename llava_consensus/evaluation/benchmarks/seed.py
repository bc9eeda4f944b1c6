"""SEED-Bench: 19,242 questions with four options in 12 types, 14,233 about images and 5,009 about videos.

Data: DATA/eval/seed_bench; questions from LLaVA's eval.zip, answers (SEED-Bench.json) and images from
https://github.com/AILab-CVC/SEED-Bench (CC BY-NC 4.0). A video question shows the middle frame, cut out by the
script in eval.zip (`SEED-Bench-video-image/<type>_<id>.png`). Later revisions of SEED-Bench.json have fewer videos:
questions it does not know are counted in `not_annotated` and not scored.
Asked as LLaVA does: vicuna_v1, greedy, at most 128 new tokens, the option's letter.
Scored as LLaVA's script does, to the last bit: the answer is the right letter, nothing is stripped, no case is folded.
Image questions have numbers as ids in LLaVA's file and texts in the annotations, video questions `v0`, `v1`, ...; one
id occurs twice. If that script stops (a type with only wrong answers; no image or no video at all) the accuracy here
is 0 or None.
Must match: LLaVA-1.5-7B 58.6 in all, 66.1 images, 37.3 videos (https://arxiv.org/abs/2310.03744, table 4).
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question
from llava_consensus.evaluation.benchmarks.parsing import LETTERS
from llava_consensus.evaluation.files import Record, read_json
from llava_consensus.evaluation.user_files import read_rows

FILES = (
    DataFile("llava-seed-bench.jsonl", base.LLAVA_EVAL_ZIP),
    DataFile("SEED-Bench.json", "huggingface.co/datasets/AILab-CVC/SEED-Bench (the first revision)"),
)
FIELDS = ("question_id", "question_type_id", "data_type", "answer")
KINDS = ("image", "video")


@dataclass(frozen=True, kw_only=True)
class SEED(Benchmark):
    name = "seed"
    title = "SEED"
    line = "SEED-Bench: images and middle frames of videos, four options, 12 types"
    folder = "seed_bench"
    images = "."
    files = FILES
    metric = "accuracy"
    guess = 25.0  # four options
    paper = 58.6
    count = 19242
    max_new_tokens = 128
    licence = "CC BY-NC 4.0: research only"

    def read(self, path: Path, data: Path) -> list[Record]:
        """LLaVA's answers, or an official upload: lines of `question_id` and `prediction`."""
        rows = [row for _, row in read_rows(path)] if path.is_file() else []
        if not rows or "prediction" not in rows[0]:
            return super().read(path, data)
        return [{"text": row.get("prediction"), **row} for row in rows]

    def key_of_question(self, question: Question) -> Hashable:
        return str(question.question_id)

    def key_of_record(self, record: Record) -> Hashable:
        return str(record["question_id"])

    def gold(self, data: Path, questions: Sequence[Question]) -> Mapping[int, Any]:
        """Annotations of the questions that have one, with the name of their type."""
        path = self.place(data) / FILES[1].path
        content = read_json(path, kind=dict)
        rows, types = content.get("questions"), content.get("question_type")
        if not isinstance(rows, list) or not isinstance(types, dict):
            raise DataError(f"{path}: no list 'questions' and no 'question_type': not SEED-Bench.json")
        names = {number: name for name, number in types.items()}
        known: dict[str, list[Record]] = {}
        for row in base.check_entries(path, rows, FIELDS):
            kind = names.get(row["question_type_id"], str(row["question_type_id"]))
            known.setdefault(str(row["question_id"]), []).append({**row, "type": kind})
        annotations = {key: iter(of_id) for key, of_id in known.items()}
        found = {one.index: next(annotations.get(str(one.question_id), iter(())), None) for one in questions}
        return {index: row for index, row in found.items() if row is not None}

    def score(self, records: Sequence[Record], data: Path) -> dict[str, Any]:
        """As in LLaVA's script the last answer with an id counts for both questions that have it."""
        said = {str(one["question_id"]): one["text"] for one in records if {"question_id", "text"} <= one.keys()}
        last = [{**one, "text": said.get(str(one.get("question_id")), one.get("text"))} for one in records]
        report = super().score(last, data)
        return report | {"not_annotated": report["counts"]["answered"] - len(report["extracted"])}

    def grade(self, text: str, question: Question, gold: Any) -> Record:
        correct = text == gold["answer"]
        return {"extracted": text, "correct": correct, "group": gold["type"], "kind": gold["data_type"]}

    def readable(self, text: str, row: Record) -> bool:
        return text in LETTERS[:4]

    def totals(self, rows: Sequence[Record]) -> Record:
        """Accuracy in percent over the answered questions, and of images and of videos."""
        kinds = {kind: base.share([row for row in rows if row["kind"] == kind]) for kind in KINDS}
        return {"accuracy": base.share(rows), **kinds}
