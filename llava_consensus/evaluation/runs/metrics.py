"""What a finished run measured: the content of metrics.json, which follows from the answers alone but for times."""

import logging
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import MAYBE_NUMBER, NUMBER, Record, collector_rests, misread
from llava_consensus.evaluation.runs.configuration import RunPlan
from llava_consensus.evaluation.runs.costs import COUNTS
from llava_consensus.evaluation.runs.store import Run

SHAPE = {  # of metrics.json, as far as it is read again
    **dict.fromkeys(("questions", "answered", "errors"), NUMBER),
    **dict.fromkeys(("notes", "report", "environment"), dict),
    "score": MAYBE_NUMBER,
    "metric": str,
    "tokens": dict.fromkeys(("before", "after", "structural"), NUMBER),
    "timing": {"questions_per_second": MAYBE_NUMBER},
}

PARTS = ("llm", "vision", "method", "total")  # of FLOPs

log = logging.getLogger(__name__)


@collector_rests()
def measure(plan: RunPlan, folder: Run) -> Record:
    """What metrics.json says of the answers; it follows from them alone.

    Score and costs, how tables call method and benchmark, `scale`, `column` and `chance` as `Benchmark` has them,
    and in `report.extracted` each answer as it was scored, which `Run.finish` keeps in a file of its own.
    """
    answers = [folder.answers[index] for index in sorted(folder.answers)]
    if not answers:
        first = folder.errors[min(folder.errors)]
        what = "question could be answered" if "cause" in first else "picture can be read, so nothing was asked"
        raise DataError(f"{folder.path}: not one {what}. The first error: {first['error']}")
    if folder.errors:
        log.warning(
            "%d questions have no answer: see %s; --retry-errors asks them again",
            len(folder.errors),
            folder.path / "errors.jsonl",
        )
    with misread(f"{plan.benchmark.place(plan.data)}: a file of {plan.benchmark.name}"):
        report = plan.benchmark.score(answers, plan.data)
    notes = Counter(note for answer in answers for note in answer["metadata"]["notes"])
    kinds = ("before", "after", "structural")
    return {
        "score": report.get(plan.benchmark.metric),
        "metric": plan.benchmark.metric,
        "titles": {
            "method": getattr(plan.method, "title", None) or plan.description["method"],
            "benchmark": plan.benchmark.title,
        },
        "scale": plan.benchmark.scale,
        "column": plan.benchmark.column,
        "chance": plan.benchmark.chance(plan.questions, plan.data),
        "questions": len(plan.questions),
        "answered": len(answers),
        "errors": len(folder.errors),
        "tokens": {kind: sum(answer["metadata"][kind] for answer in answers) / len(answers) for kind in kinds},
        "account": run_costs(answers, plan.match),
        "notes": dict(sorted(notes.items())),
        "report": report,
        **({"choices": plan.benchmark.chosen} if plan.benchmark.chosen else {}),
    }


def run_costs(answers: Sequence[Record], by: str) -> Record | None:
    """Means per question; `measured` is what was read and cached, the rest comes from the formulas.

    Args:
        answers: records of the whole run.
        by: what the budget was matched by.
    Returns:
        The entry `account` of metrics.json, in which a number is None where the method cannot tell it; None where the
        host did not tell what it read.
    """
    rows = [answer["metadata"]["account"] for answer in answers if "account" in answer["metadata"]]
    if not rows or len(rows) != len(answers):
        return None
    measured = [row["measured"] for row in rows]
    layers = [sum(column) / len(rows) for column in zip(*(one["kv_bytes"] for one in measured), strict=True)]
    notes = sorted({row["note"] for row in rows if "note" in row})
    flops = [row["flops"] for row in rows]
    return {
        "match": by,
        "tokens": rows[0]["tokens"] if len({row["tokens"] for row in rows}) == 1 else _mean(rows, "tokens"),
        "text": _mean(rows, "text"),
        **{name: _mean(rows, name) for name in COUNTS},
        "flops": {part: _mean(flops, part) for part in PARTS},
        "kv_bytes": _mean(rows, "kv_bytes"),
        "measured": {
            **{name: _mean(measured, name) for name in COUNTS},
            "kv_bytes": sum(layers),
            "kv_bytes_per_layer": layers,
        },
        **({"notes": notes} if notes else {}),
    }


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The mean of a value; None where it is not known of every row."""
    values = [row[name] for row in rows]
    return None if None in values else sum(values) / len(values)


def timing(asked: int, seconds: float, workers: int) -> Record:
    """How long it took; `seconds` without loading where one process asked all questions."""
    speed = asked / seconds if seconds else None
    return {"asked": asked, "seconds": seconds, "questions_per_second": speed, "workers": workers}


def environment(plan: RunPlan) -> Record:
    """The machine a run was done on."""
    device = plan.loading.device
    if device.startswith("cuda"):
        import torch

        device = torch.cuda.get_device_name(device)
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "device": device,
    }
