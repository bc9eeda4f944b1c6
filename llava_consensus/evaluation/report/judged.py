"""Scores that a judge gave: `llava-consensus judge` keeps them beside the runs, here they join the runs they are about.

A judged run (`OUT/judge/<name>/`) names the answers it graded by the sha256 of their file, so that grades of other
answers are never taken. A run judged by several judges is a row for each of them.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import ANSWERS, CONFIG, METRICS, SCORES, Record, read_json, read_lines
from llava_consensus.evaluation.report.rows import Row

FOLDER = "judge"


def read_judged(out: Path) -> dict[str, list[tuple[Record, Record]]]:
    """(config, metrics) of every judged run that is finished, by the sha256 of the answers."""
    runs: dict[str, list[tuple[Record, Record]]] = {}
    for path in sorted((out / FOLDER).glob(f"*/{METRICS}")):
        away = f"{path.parent} is not the folder of a judged run: move it away"
        config, metrics = (read_json(path.parent / name, away, dict) for name in (CONFIG, METRICS))
        if "answers" not in config:
            raise DataError(f"{path.parent / CONFIG}: no answers in it. {away}")
        scores = path.parent / SCORES
        if "extracted" not in metrics and scores.exists():  # runs of older versions have them in metrics.json
            metrics["extracted"] = read_lines(scores, ("index",), away)
        runs.setdefault(config["answers"], []).append((config, metrics))
    return runs


def join(row: Row, judged: dict[str, list[tuple[Record, Record]]]) -> list[Row]:
    """A run as it is, or where it needs a judge and has one, with the judge's score; incomplete grades do not count."""
    if not judged or row.metrics is None or row.score is not None:
        return [row]
    answers = hashlib.sha256((row.folder / ANSWERS).read_bytes()).hexdigest()
    graded = [
        _scored(row, config, metrics)
        for config, metrics in judged.get(answers, [])
        if metrics.get("complete") and metrics.get("score") is not None
    ]
    return graded or [row]


def _scored(row: Row, config: Record, metrics: Record) -> Row:
    report: Record = {
        **row.report,
        **{key: metrics[key] for key in ("extracted", "rounded", "counted") if key in metrics},
    }
    judgement: Record = {"score": metrics["score"], "metric": metrics["metric"], "report": report}
    return replace(row, config={**row.config, "judge": config["judge"]}, metrics={**(row.metrics or {}), **judgement})
