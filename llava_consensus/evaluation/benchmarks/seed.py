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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question
from llava_consensus.evaluation.benchmarks.parsing import LETTERS
from llava_consensus.evaluation.files import Record, read_json, to_lines, write_out
from llava_consensus.evaluation.user_files import read_rows

FILES = (
    DataFile("llava-seed-bench.jsonl", base.LLAVA_EVAL_ZIP),
    DataFile("SEED-Bench.json", "huggingface.co/datasets/AILab-CVC/SEED-Bench (the first revision)"),
)
FIELDS = ("question_id", "question_type_id", "data_type", "answer")
OFFICIAL = "official question_id"  # as the annotation has it, a text or a number
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
        """LLaVA's answers, or an official upload: lines, or one list, of `question_id` and `prediction`."""
        rows = [row for _, row in read_rows(path)] if path.is_file() else []
        if not rows or "prediction" not in rows[0]:
            return super().read(path, data)
        return [{"text": row.get("prediction"), **row} for row in rows]

    def score(self, records: Sequence[Record], data: Path) -> dict[str, Any]:
        """Accuracy in percent over the answered questions, of images and of videos."""
        questions = self.load(data)
        annotations, names = _annotations(self.place(data) / FILES[1].path)
        joined = base.join(records, questions, _of_question, _of_record)
        texts = {_of_question(questions[index]): record["text"] for index, record in joined.answers.items()}
        asked = {_of_question(question) for question in questions}
        gold = {key: row for row in annotations if (key := key_of(row["question_id"])) in asked}
        numbers = evaluate([row for row in annotations if key_of(row["question_id"]) in texts], texts)
        numbers["not_annotated"] = len(asked - gold.keys())
        extracted = [
            {
                "index": index,
                "extracted": record["text"],
                "correct": record["text"] == gold[key]["answer"],
                "group": names.get(gold[key]["question_type_id"], str(gold[key]["question_type_id"])),
            }
            for index, record in joined.answers.items()
            if (key := _of_question(questions[index])) in gold
        ]
        unreadable = sum(record["text"] not in LETTERS[:4] for record in joined.answers.values())
        return base.report(self.name, joined, numbers, extracted, unreadable)

    def export(self, records: Sequence[Record], data: Path, target: Path) -> dict[str, Any]:
        annotations, _ = _annotations(self.place(data) / FILES[1].path)
        audit = base.join(records, self.load(data), _of_question, _of_record).audit
        texts = {_of_record(record): record["text"] for record in records}
        keys = [key_of(annotation["question_id"]) for annotation in annotations]
        audit["missing"] = [key for key in keys if key not in texts]
        base.refuse_missing(audit, "the official script stops at the first of them")
        pairs = zip(annotations, keys, strict=True)
        rows = [{"question_id": row[OFFICIAL], "prediction": texts[key]} for row, key in pairs]
        write_out(target, to_lines(rows))
        return audit | {"written": len(rows)}


def _of_question(question: Question) -> int | str:
    return key_of(str(question.question_id))


def _of_record(record: Record) -> int | str:
    return key_of(str(record["question_id"]))


def _annotations(path: Path) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The annotated questions, and the names of types by their id."""
    content = read_json(path, kind=dict)
    rows, types = content.get("questions"), content.get("question_type")
    if not isinstance(rows, list) or not isinstance(types, dict):
        raise DataError(f"{path}: no list 'questions' and no 'question_type': not SEED-Bench.json")
    for row in base.check_entries(path, rows, FIELDS, "questions"):
        row[OFFICIAL], row["question_id"] = row["question_id"], str(row["question_id"])
    return rows, {number: name for name, number in types.items()}


def key_of(question_id: str) -> int | str:
    """Key of a question in answer files: a number if the annotation's text is one (images), else the text (videos)."""
    try:
        return int(question_id)
    except ValueError:
        return question_id


def evaluate(questions: Sequence[Mapping[str, Any]], answers: Mapping[int | str, str]) -> dict[str, Any]:
    """`accuracy`, `image` and `video` in percent over `questions`, of which those without an answer count as wrong."""
    right = [(one["data_type"], answers.get(key_of(one["question_id"])) == one["answer"]) for one in questions]
    groups = {"accuracy": [hit for _, hit in right]}
    groups |= {kind: [hit for of_kind, hit in right if of_kind == kind] for kind in KINDS}
    return {name: base.mean(hits) * 100 if hits else None for name, hits in groups.items()}
