"""Scores that a judge gave: `llava-consensus judge` keeps them beside the runs, here they join the runs they are about.

A judged run (`OUT/judge/<name>/`) names the answers it graded by the sha256 of their file, so that grades of other
answers are never taken. A run judged by several judges is a row for each of them.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError
from llava_consensus.report.rows import Row

FOLDER = "judge"

Record = dict[str, Any]


def read_judged(out: Path) -> dict[str, list[tuple[Record, Record]]]:
    """(config, metrics) of every judged run that is finished, by the sha256 of the answers."""
    found: dict[str, list[tuple[Record, Record]]] = {}
    for path in sorted((out / FOLDER).glob("*/metrics.json")):
        try:
            config, metrics = (json.loads((path.parent / name).read_bytes()) for name in ("config.json", path.name))
            found.setdefault(config["answers"], []).append((config, metrics))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path.parent}: not the folder of a judged run ({error!r}). Move it away") from None
    return found


def join(row: Row, folder: Path, judged: dict[str, list[tuple[Record, Record]]]) -> list[Row]:
    """A run as it is, or where it needs a judge and has one, with the judge's score; incomplete grades do not count."""
    if not judged or row.metrics is None or row.score is not None:
        return [row]
    answers = hashlib.sha256((folder / "answers.jsonl").read_bytes()).hexdigest()
    known = [one for one in judged.get(answers, []) if one[1].get("complete") and one[1].get("score") is not None]
    return [_scored(row, config, metrics) for config, metrics in known] or [row]


def _scored(row: Row, config: Record, metrics: Record) -> Row:
    report: Record = {
        **row.report,
        **{key: metrics[key] for key in ("extracted", "rounded", "counted") if key in metrics},
    }
    taken: Record = {"score": metrics["score"], "metric": metrics["metric"], "report": report}
    return replace(row, config={**row.config, "judge": config["judge"]}, metrics={**(row.metrics or {}), **taken})
