"""Per-question results of lmms-eval, and answers in LLaVA's format, as runs: `llava-consensus report import`."""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import Benchmark
from llava_consensus.evaluation.files import (
    ANSWERS,
    CONFIG,
    Record,
    read_bytes,
    replace,
    to_lines,
    write_json,
    write_metrics,
)
from llava_consensus.evaluation.user_files import read_rows

LOGGED = (  # by lmms-eval beside the metrics
    *("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "input", "input_media", "submission"),
    *("token_counts", "doc_hash", "prompt_hash", "target_hash"),
)
RIGHT = ("exact_match", "accuracy", "acc", "score", "average")  # ends of names of metrics
IMAGE_FIELDS = ("image_path", "image_id", "imageId", "image_source", "image")  # fields of a `doc`


IDS = ("doc_id", "index", "question_id", "id")


class Origin(NamedTuple):
    benchmark: str
    model: str
    method: str
    tokens: int | None


class ColumnNames(NamedTuple):
    """Names of the columns that hold a question's id and whether it was right; empty: found by name."""

    id: str = ""
    right: str = ""


BY_NAME = ColumnNames()


def import_file(path: Path, origin: Origin, out: Path, columns: ColumnNames = BY_NAME) -> Path:
    """Write the folder of a run for `*_samples_*.jsonl` of lmms-eval's `--log_samples`, or another file of rows with an
    id and a number from 0 to 1. The folder's name has the file's content, so a second import changes nothing.
    """
    rows = [row.values for row in read_rows(path)]
    names = list(rows[0]) if rows else []
    key = columns.id or next((name for name in IDS if name in names), IDS[0])
    if any(key not in row for row in rows) or not rows:
        raise DataError(f"{path}: rows without {key}, the id of a question: {', '.join(names)[:80] or 'no rows'}")
    names = [name for name in names if name not in (*LOGGED, key)]
    known = [columns.right] if columns.right else [name for name in names if name.endswith(RIGHT)] or names
    if len(known) != 1 or known[0] not in names:
        raise DataError(f"{path}: no single metric of a question in it. Name it: --metric, one of {', '.join(names)}")
    rows.sort(key=lambda row: str(row[key]))  # files in another order are paired
    scores = [
        {"index": place, "correct": _score(f"{path}, {key} {row[key]}", row, known[0])} | _image(row)
        for place, row in enumerate(rows)
    ]
    ids = [row[key] for row in rows]
    if len(set(map(str, ids))) < len(ids):
        raise DataError(f"{path}: {len(ids) - len(set(map(str, ids)))} values of {key} occur twice")
    score = 100 * sum(row["correct"] for row in scores) / len(scores)
    told: Record = {"score": score, "metric": known[0], "scale": 1.0, "report": {}}
    return _run(path, origin, out, sorted(map(str, ids)), told, scores, ids)


def _score(where: str, row: Record, metric: str) -> float:
    """Whether a question was right. In an object it is under the metric's name or a usual one, never an id."""
    cell = row.get(metric)
    if isinstance(cell, dict):
        cell = next((cell[key] for key in (metric, *RIGHT) if key in cell), cell)
    try:
        score = float(cell) if isinstance(cell, int | float | str) else math.nan
    except ValueError:
        score = math.nan
    if not 0 <= score <= 1:
        raise DataError(f"{where}: {metric} is {repr(cell)[:60]}, not a number of 0 to 1. Name another: --metric")
    return score


def _image(sample: Record) -> Record:
    doc = sample["doc"] if isinstance(sample.get("doc"), dict) else {}
    return next(({"picture": str(doc[name])} for name in IMAGE_FIELDS if name in doc), {})


def import_answers(path: Path, origin: Origin, out: Path, benchmark: Benchmark, data: Path) -> Path:
    """Write the folder of a run for LLaVA's answers, scored by a benchmark's own rules from its files in `data`."""
    read_bytes(path)  # first: a wrong name is reported before missing files
    questions = benchmark.load(data)
    report = benchmark.score_file(path, data)
    rows = [{**row, "picture": next(iter(questions[row["index"]].images), None)} for row in report.pop("extracted")]
    rows.sort(key=lambda row: row["index"])
    told: Record = {
        "score": report[benchmark.metric], "metric": benchmark.metric, "scale": benchmark.scale, "report": report
    }  # fmt: skip
    ids = [questions[row["index"]].question_id for row in rows]
    return _run(path, origin, out, [row["index"] for row in rows], told, rows, ids)


def _run(
    path: Path,
    origin: Origin,
    out: Path,
    asked: Sequence[object],
    told: Record,
    rows: Sequence[Record],
    ids: Sequence[object],
) -> Path:
    """The folder of a run: which questions were asked, the score, a row for each question."""
    tokens = "all" if origin.tokens is None else str(origin.tokens)
    content = hashlib.sha256(read_bytes(path)).hexdigest()
    questions = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
    folder = out / f"{origin.benchmark}-{origin.method}-{tokens}-{content[:12]}"
    config: Record = {
        "benchmark": origin.benchmark, "method": origin.method, "tokens": origin.tokens, "merged": None, "options": {},
        "changed": {}, "model": origin.model, "data": None, "questions": questions, "limit": None, "device": None,
        "conversation": None, "max_new_tokens": None, "versions": {}, "imported": path.name,
    }  # fmt: skip
    metrics = {
        **told, "questions": len(rows), "answered": len(rows), "errors": 0, "account": None,
        "tokens": {"before": 0.0, "after": origin.tokens or 0.0, "structural": 0.0}, "column": None,
        "titles": {"method": origin.method, "benchmark": origin.benchmark},
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG, config)
    replace(folder / ANSWERS, to_lines({"question_id": one} for one in ids))
    write_metrics(folder, metrics, rows)
    return folder
