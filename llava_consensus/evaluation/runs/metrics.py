"""What a finished run measured: the content of metrics.json, which follows from the answers alone but for times."""

import logging
import os
import platform
from collections import Counter

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import Record
from llava_consensus.evaluation.runs import costs
from llava_consensus.evaluation.runs.collector import collector_rests
from llava_consensus.evaluation.runs.configuration import Plan
from llava_consensus.evaluation.runs.store import Run
from llava_consensus.evaluation.shapes import MAYBE_NUMBER, NUMBER, misread
from llava_consensus.hosts.allocator import give_back

SHAPE = {  # of metrics.json, as far as it is read again
    **dict.fromkeys(("questions", "answered", "errors"), NUMBER),
    **dict.fromkeys(("notes", "report", "environment"), dict),
    "score": MAYBE_NUMBER,
    "metric": str,
    "tokens": dict.fromkeys(("before", "after", "structural"), NUMBER),
    "timing": {"questions_per_second": MAYBE_NUMBER},
}

log = logging.getLogger(__name__)


@collector_rests()
def measure(plan: Plan, folder: Run) -> Record:
    """What metrics.json says of the answers; it follows from them alone.

    Score and costs, how tables call method and benchmark, `scale`, `column` and `chance` as `Benchmark` has them,
    and in `report.extracted` each answer as it was scored, which `Run.finish` keeps in a file of its own.
    """
    give_back()  # what reading them has freed, before the benchmark reads its own files
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
        "account": costs.of_run(answers, plan.match),
        "notes": dict(sorted(notes.items())),
        "report": report,
        **({"choices": plan.benchmark.chosen} if plan.benchmark.chosen else {}),
    }


def timing(asked: int, seconds: float, workers: int) -> Record:
    """How long it took; `seconds` without loading where one process asked all questions."""
    speed = asked / seconds if seconds else None
    return {"asked": asked, "seconds": seconds, "questions_per_second": speed, "workers": workers}


def environment(plan: Plan) -> Record:
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
