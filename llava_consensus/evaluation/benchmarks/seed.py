"""SEED-Bench: 19,242 questions with four options in 12 types, 14,233 about pictures and 5,009 about videos.

Data: DATA/eval/seed_bench; questions from LLaVA's eval.zip, answers (SEED-Bench.json) and pictures from
https://github.com/AILab-CVC/SEED-Bench (CC BY-NC 4.0). A video question shows the middle frame, cut out by the
script in eval.zip (`SEED-Bench-video-image/<type>_<id>.png`). Later revisions of SEED-Bench.json have fewer videos:
questions it does not know are counted in `not_annotated` and not scored.
Asked as LLaVA does: vicuna_v1, greedy, at most 128 new tokens, the option's letter.
Scored as LLaVA's script does: the answer is the right letter, nothing else. Picture questions have numbers as ids in
LLaVA's file and texts in the annotations, video questions `v0`, `v1`, ...; one id occurs twice.
Equal to LLaVA's script to the last bit: nothing is stripped, no case is folded. Where that script stops (a type with
wrong answers alone; no picture or no video at all) the accuracy here is 0 or None.
Must match: LLaVA-1.5-7B 58.6 in all, 66.1 pictures, 37.3 videos (https://arxiv.org/abs/2310.03744, table 4).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question
from llava_consensus.evaluation.files import Record, read_json, read_lines, read_text, write_out

FILES = (
    DataFile("llava-seed-bench.jsonl", base.LLAVA_EVAL_ZIP),
    DataFile("SEED-Bench.json", "huggingface.co/datasets/AILab-CVC/SEED-Bench (the first revision)"),
)
FIELDS = ("question_id", "question_type_id", "data_type", "answer")
OFFICIAL = "official question_id"  # as the annotation has it, a text or a number
KINDS = ("image", "video")


@dataclass(frozen=True, kw_only=True)
class SEED(Benchmark):
    """Questions with four options on pictures and on middle frames of videos."""

    name = "seed"
    title = "SEED"
    line = "SEED-Bench: pictures and middle frames of videos, four options, 12 types"
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
        if not path.is_file() or "prediction" not in (text := read_text(path)):
            return super().read(path, data)
        rows = read_json(path, kind=list) if text.lstrip().startswith("[") else read_lines(path, ("question_id",))
        return [{"text": row.get("prediction"), **row} if isinstance(row, dict) else row for row in rows]

    def score(self, records: Sequence[Record], data: Path) -> dict[str, Any]:
        """Accuracy in percent over the answered questions, of pictures and of videos."""
        questions = self.load(data)
        annotations, names = _annotations(self.place(data) / FILES[1].path)
        joined = base.join(records, questions, _of_question, _of_record)
        texts = {_of_question(questions[index]): record["text"] for index, record in joined.answers.items()}
        asked_ids = {_of_question(question) for question in questions}
        annotated = [annotation for annotation in annotations if key_of(annotation["question_id"]) in asked_ids]
        numbers = evaluate(
            [annotation for annotation in annotated if key_of(annotation["question_id"]) in texts], texts
        )
        right = {key_of(annotation["question_id"]): annotation["answer"] for annotation in annotated}
        types = {key_of(annotation["question_id"]): annotation["question_type_id"] for annotation in annotated}
        numbers["not_annotated"] = len(asked_ids - right.keys())
        extracted = [
            {
                "index": index,
                "extracted": record["text"],
                "correct": record["text"] == right[key],
                "group": names.get(types[key], str(types[key])),
            }
            for index, record in joined.answers.items()
            if (key := _of_question(questions[index])) in right
        ]
        unreadable = sum(record["text"] not in ("A", "B", "C", "D") for record in joined.answers.values())
        return base.report(self.name, joined, numbers, extracted, unreadable)

    def export(self, records: Sequence[Record], data: Path, target: Path) -> dict[str, Any]:
        """The official upload: a JSON line for each annotated question, in that order."""
        annotations, _ = _annotations(self.place(data) / FILES[1].path)
        audit = base.join(records, self.load(data), _of_question, _of_record).audit
        texts = {_of_record(record): record["text"] for record in records}
        keys = [key_of(annotation["question_id"]) for annotation in annotations]
        audit["missing"] = [key for key in keys if key not in texts]
        base.refuse_missing(audit, "the official script stops at the first of them")
        rows = [
            json.dumps({"question_id": annotation[OFFICIAL], "prediction": texts[key]}) + "\n"
            for annotation, key in zip(annotations, keys, strict=True)
        ]
        write_out(target, "".join(rows).encode())
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
    for number, row in enumerate(rows, start=1):
        absent = [name for name in FIELDS if not isinstance(row, dict) or name not in row]
        if absent:
            raise DataError(f"{path}, entry {number} of questions: no {', '.join(absent)}")
        row[OFFICIAL], row["question_id"] = row["question_id"], str(row["question_id"])
    return rows, {number: name for name, number in types.items()}


# Scoring: texts in, numbers out.


def key_of(question_id: str) -> int | str:
    """Key of a question in answer files: a number where the annotation's text is one (pictures), else the text
    (videos).
    """
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
