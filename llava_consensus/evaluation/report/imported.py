"""Per-question results of other tools as runs: `llava-consensus report import`.

    lmms-eval      *_samples_*.jsonl of `--log_samples`: `doc_id`, and a number under the metric's name
    VLMEvalKit     *_result.xlsx, .tsv, .csv: `index`, and `hit` or the metric's column
    csv, tsv, JSON lines of anything else, with the names of its columns
    answers in LLaVA's format, scored by a benchmark's own rules

A run made so holds a score, and for each question whether it was right, so that `report compare` pairs it with another
import of the same questions.
"""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import (
    ANSWERS,
    CONFIG,
    Record,
    read_bytes,
    read_text,
    replace,
    to_lines,
    write_json,
    write_metrics,
)
from llava_consensus.evaluation.user_files import read_rows

if TYPE_CHECKING:
    import pandas as pd

    from llava_consensus.evaluation.benchmarks import Benchmark

LOGGED = (  # by lmms-eval beside the metrics
    *("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "input", "input_media", "submission"),
    *("token_counts", "doc_hash", "prompt_hash", "target_hash"),
)
IDS = ("index", "doc_id", "question_id", "questionId", "id")
RIGHT = ("hit", "correct", "exact_match", "accuracy", "acc", "score")
PICTURES = ("image_path", "image_id", "imageId", "image", "picture")


class ColumnNames(NamedTuple):
    """Names of the columns that hold a question's id, whether it was right, and its image; empty: found by name."""

    id: str = ""
    right: str = ""
    picture: str = ""


BY_NAME = ColumnNames()


class Origin(NamedTuple):
    benchmark: str
    model: str
    method: str
    tokens: int | None


def import_file(
    path: Path, origin: Origin, out: Path, columns: ColumnNames = BY_NAME, where: Mapping[str, str] | None = None
) -> Path:
    """Write the folder of a run for a file of another tool.

    Args:
        where: values of columns that a row must have, as text: for files that hold several runs.
    Returns:
        the folder: named by benchmark, method, tokens and the file's content, so that a second import changes nothing.
    Raises:
        DataError: the file cannot be read, or a column is missing, ambiguous or holds no number.
    """
    table = _table(path)
    for name, value in (where or {}).items():
        if name not in table.columns:
            raise DataError(f"{path}: no column {name} for --where, only {', '.join(map(str, table.columns[:20]))}")
        table = table[table[name].astype(str) == value].reset_index(drop=True)
    ids = _column(path, table, columns.id, IDS, "id")
    right = _column(path, table, columns.right, RIGHT, "right")
    picture = _column(path, table, columns.picture, PICTURES, "picture", needed=False)
    values = _numbers(path, table, right)
    keys = [str(value) for value in table[ids]]
    if len(set(keys)) < len(keys):
        again = len(keys) - len(set(keys))
        raise DataError(f"{path}: {again} ids of column {ids!r} occur twice. Name another: --columns id=NAME")
    order = sorted(range(len(keys)), key=keys.__getitem__)  # by id, so that files in another order are paired
    rows = [
        {"index": place, "correct": values[row]} | ({"picture": str(table[picture][row])} if picture else {})
        for place, row in enumerate(order)
    ]
    score = 100 * sum(values) / len(values)
    asked = hashlib.sha256(json.dumps(sorted(keys)).encode()).hexdigest()
    content = hashlib.sha256(path.read_bytes() + json.dumps(where).encode()).hexdigest()
    told: Record = {"score": score, "metric": right, "scale": 1.0, "report": {}}
    return _run(path, origin, out, asked, content, told, rows, [keys[row] for row in order], {"where": where})


def import_answers(path: Path, origin: Origin, out: Path, benchmark: "Benchmark", data: Path) -> Path:
    """Write the folder of a run for answers in LLaVA's format, scored by a benchmark's own rules from its files in
    `data`; no images are needed. DataError if files cannot be read or the answers are to other questions.
    """
    content = hashlib.sha256(read_bytes(path)).hexdigest()  # first: what was typed is named before what it needs
    questions = benchmark.load(data)
    report = benchmark.score_file(path, data)
    rows = [{**row, "picture": next(iter(questions[row["index"]].images), None)} for row in report.pop("extracted")]
    rows.sort(key=lambda row: row["index"])
    ids = [questions[row["index"]].question_id for row in rows]
    asked = hashlib.sha256(json.dumps([row["index"] for row in rows]).encode()).hexdigest()
    told: Record = {
        "score": report[benchmark.metric], "metric": benchmark.metric, "scale": benchmark.scale, "report": report
    }  # fmt: skip
    return _run(path, origin, out, asked, content, told, rows, ids, {"where": None})


def _run(
    path: Path,
    origin: Origin,
    out: Path,
    asked: str,
    content: str,
    told: Record,
    rows: Sequence[Record],
    ids: Sequence[object],
    more: Record,
) -> Path:
    """The folder of a run: which questions were asked, the file's checksum, the score, a row for each question."""
    tokens = "all" if origin.tokens is None else str(origin.tokens)
    folder = out / f"{origin.benchmark}-{origin.method}-{tokens}-{content[:12]}"
    config = {
        "benchmark": origin.benchmark, "method": origin.method, "tokens": origin.tokens, "merged": None, "options": {},
        "changed": {}, "model": origin.model, "data": None, "questions": asked, "limit": None, "device": None,
        "conversation": None, "max_new_tokens": None, "versions": {}, "imported": path.name, **more,
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


def _table(path: Path) -> "pd.DataFrame":
    """The rows of a file; fields of lmms-eval's `doc` are among a line's own, and its metrics in `attrs`."""
    import pandas as pd

    if path.suffix in (".jsonl", ".json"):
        lines = [row for _, row in read_rows(path)]
        docs = [doc if isinstance(doc := line.get("doc"), dict) else {} for line in lines]
        table = pd.DataFrame([{**doc, **line} for doc, line in zip(docs, lines, strict=True)])
        if lines and "doc_id" in lines[0]:
            table.attrs["metrics"] = [name for name in lines[0] if name not in LOGGED]
        return table
    if path.suffix not in (".csv", ".tsv", ".xlsx"):
        raise DataError(f"{path}: must end with .jsonl, .csv, .tsv or .xlsx")
    try:
        if path.suffix == ".xlsx":
            return pd.read_excel(path)
        text = read_text(path)
        separator = max("\t,;", key=text.partition("\n")[0].count)
        return pd.read_csv(io.StringIO(text), sep=separator)
    except ImportError as error:
        raise DataError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as a table: {error}") from error


def _column(path: Path, table: "pd.DataFrame", named: str, usual: Sequence[str], what: str, needed: bool = True) -> str:
    """The column that is named, or the first usual one; of lmms-eval's metrics the only one or one so called."""
    found = [named] if named in table.columns else [name for name in usual if name in table.columns and not named]
    metrics = table.attrs.get("metrics", [])
    if what == "right" and not named and metrics:
        known = [name for name in metrics if name.split("_")[-1] in (*usual, "average")]
        found = known or metrics[: len(metrics) == 1]
    if not found and (needed or named):
        names = ", ".join(map(str, table.columns[:20]))
        raise DataError(
            f"{path}: no column {named or ' or '.join(usual)}. Name it: --columns {what}=NAME, one of {names}"
        )
    return found[0] if found else ""


def _numbers(path: Path, table: "pd.DataFrame", name: str) -> list[float]:
    """Whether each question was right, 0 to 1. Of an object it is the number under the metric's name or a usual one,
    never an id or another field.
    """
    values = []
    for number, cell in enumerate(table[name], start=1):
        if isinstance(cell, dict):
            cell = next((cell[key] for key in (name, *RIGHT) if key in cell), cell)
        try:
            value = float(cell)
        except (TypeError, ValueError):
            value = -1.0
        if not 0 <= value <= 1:
            what = f"{path}, row {number}: {name} is {cell!r}, not a number of 0 to 1"
            raise DataError(f"{what}. Name another: --columns right=NAME")
        values.append(value)
    if not values:
        raise DataError(f"{path}: no rows in it")
    return values
