"""Folders of runs with made-up results, as the evaluation writes them, for tests of everything that reads them."""

import json
from pathlib import Path
from typing import Any

from llava_consensus.evaluation.benchmarks import BENCHMARKS

TITLES = {"fastv": "FastV", "dart": "DART"}  # of methods
BASE: dict[str, Any] = {
    **{"benchmark": "gqa", "method": "consensusdrop", "tokens": 64, "merged": None, "options": {"alpha": 0.7}},
    **{"changed": {}, "model": "checkpoints/llava-mini", "weights": "abc", "data": "playground/mini"},
    **{"questions": "def", "limit": None, "conversation": "vicuna_v1", "max_new_tokens": 128},
    **{"dtype": "auto", "device": "cpu", "versions": {"torch": "2.13.0", "transformers": "5.23.0"}},
}


def told(method: str, benchmark: str) -> dict[str, Any]:
    """What a finished run says of itself for tables."""
    found = BENCHMARKS[benchmark]
    titles = {"method": TITLES.get(method, method), "benchmark": found.title}
    return {"titles": titles, "scale": found.scale, "column": found.column}


def store(out: Path, right: list[float] | None, score: float | None = None, **changes: Any) -> Path:
    """Writes a run as the harness does; `right` is the correctness of each answer, None an incomplete run."""
    more = {key: changes.pop(key) for key in ("account", "questions_asked", "statistic") if key in changes}
    config = {**BASE, **changes}
    folder = out / str(len(list(out.glob("*")))).zfill(3)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "answers.jsonl").write_text('{"a": 1}\n' * 3)
    if right is not None:
        after = 576 if config["method"] == "full" else min(576, config["tokens"])
        report = {"extracted": [{"index": index, "correct": value} for index, value in enumerate(right)]}
        metrics = {
            "score": 100 * sum(right) / len(right) if score is None else score,
            "metric": "accuracy",
            "questions": more.get("questions_asked", len(right)),
            "answered": len(right),
            "errors": 0,
            "tokens": {"before": 576.0, "after": float(after), "structural": 0.0},
            "account": more.get("account"),
            **told(config["method"], config["benchmark"]),
            "report": report | ({"statistic": more["statistic"]} if "statistic" in more else {}),
        }
        (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder
