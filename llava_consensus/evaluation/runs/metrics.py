"""Matching of budgets on a model, the costs of each answer, and the metrics of a finished run.

Every answer's record carries its own costs, by analysis (`reduction/costs.py`, docs/accounting.md) and as measured.
Except for times, metrics.json follows from the answers: lost metrics are made again without weights, and several
workers end with the same numbers as one.
"""

from __future__ import annotations

import logging
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from llava_consensus.errors import DataError, plural
from llava_consensus.evaluation.files import Record, misread
from llava_consensus.evaluation.runs.questions import OWN, Plan, versions
from llava_consensus.evaluation.runs.store import Run
from llava_consensus.reduction.budget import Budget, Share

if TYPE_CHECKING:  # runs that ask a server by URL are measured without torch
    from llava_consensus.evaluation.models import Runner
    from llava_consensus.evaluation.models.base import Prefill
    from llava_consensus.evaluation.runs.configuration import RunPlan
    from llava_consensus.hosts.outcomes import ImageOutcome
    from llava_consensus.reduction.method import Method, Shape

log = logging.getLogger(__name__)

COUNTS = ("entering", "kept", "average")
TYPICAL = 100  # prompts whose mean length represents a run's when a budget is meant by its FLOPs
PARTS = ("llm", "vision", "method", "total")  # of FLOPs


def budget_of(plan: RunPlan, runner: Runner) -> Budget | Share:
    """The budget the plan's method is given on this model: all tokens of an image if the method reduces nothing.

    Raises:
        OptionError: no budget matches the cost in the plan.
    """
    shape = shape_of(plan, runner)
    available = shape.available
    if plan.budget is None:
        return Budget(available)
    if isinstance(plan.budget, Share):
        return plan.budget
    if plan.budget.tokens >= available:
        log.info("tokens=%d: this is the full model, with %d visual tokens per image", plan.budget.tokens, available)
    from llava_consensus.reduction.costs import match

    if plan.match == "flops":  # of the mean prompt of those of the first questions that have an image
        asked = ((plan.prompt(question), plan.shown(question)) for question in plan.questions)
        rows = [runner.rows(prompt, shown) for prompt, shown in islice(asked, TYPICAL) if shown] or [(0, 0)]
        text, question = (round(sum(column) / len(rows)) for column in zip(*rows, strict=True))
        shape = shape._replace(text=text, question=question)
    given = match(plan.method, plan.budget, shape, plan.match)
    if given != plan.budget:
        log.info("match=%s: the method is given tokens=%d for %d", plan.match, given.tokens, plan.budget.tokens)
    return given


def shape_of(plan: RunPlan, runner: Runner) -> Shape:
    """Sizes of the model with a prompt of the largest input: an image of the most tiles, or a clip of frames."""
    shape = runner.shape()
    return shape._replace(tiles=plan.benchmark.frames) if plan.clips else shape


@dataclass(frozen=True)
class AnswerCosts:
    """Costs of the answers of one model with one method and budget.

    The formulas are about the largest image: one of fewer tiles has fewer tokens. If the number of tokens follows from
    an image's size, they are about the images of the prompt.
    """

    method: Method
    budget: Budget | Share  # that the method is given
    shape: Shape

    def of(
        self, prefill: Prefill | None, images: int, tokens: Sequence[int] = (), outcomes: Sequence[ImageOutcome] = ()
    ) -> Record:
        """The entry `account` of an answer's metadata; empty if the runner reports no prefill.

        Args:
            prefill: as measured.
            images: number of images in the prompt.
            tokens: of each image, for a share; the formulas are given their mean.
            outcomes: of the images.
        """
        if prefill is None or not prefill.entering:
            return {}
        shape = seen(self.shape, outcomes)
        budget = Budget(round(sum(tokens) / len(tokens))) if tokens else self.budget.of(shape.available)
        if shape.varies and not outcomes:
            return {}
        analytic = _analytic(self.method, budget, shape, prefill.text, prefill.question, images)
        average = sum(prefill.entering) / len(prefill.entering)
        measured = dict(zip(COUNTS, (prefill.entering[0], prefill.entering[-1], average), strict=True))
        rows = {"tokens": budget.tokens, "text": prefill.text, "question": prefill.question}
        return {"account": {**rows, **analytic, "measured": {**measured, "kv_bytes": list(prefill.kv_bytes)}}}


def seen(shape: Shape, outcomes: Sequence[ImageOutcome]) -> Shape:
    """The shape with the mean tokens and tiles of the images, if both follow from their size."""
    if not shape.varies or not outcomes:
        return shape
    tiles = [1 if one.origin is None else int(one.origin[0].max()) + 1 for one in outcomes]
    patches = sum(one.before for one in outcomes) / sum(tiles)
    return shape._replace(patches=round(patches), tiles=round(sum(tiles) / len(tiles)))


@lru_cache(maxsize=4096)
def _analytic(method: Method, budget: Budget, shape: Shape, text: int, question: int, images: int) -> Record:
    from llava_consensus.reduction.costs import account

    shape = shape._replace(text=text, question=question, images=images)
    return account(method, budget, shape).record()


def measure(plan: Plan, folder: Run) -> Record:
    """Content of metrics.json: score and costs, titles for tables, `scale`, `column` and `chance` of the benchmark,
    and in `report.extracted` each answer as it was scored, which `Run.finish` keeps in a separate file.
    """
    answers = [folder.answers[index] for index in sorted(folder.answers)]
    if not answers:
        first = folder.errors[min(folder.errors)]
        what = "question could be answered" if "cause" in first else "image can be read, so nothing was asked"
        raise DataError(f"{folder.path}: not one {what}. The first error: {first['error']}")
    if folder.errors:
        errors, where = plural(len(folder.errors), "question"), folder.path / "errors.jsonl"
        log.warning("%s without an answer: see %s; --retry-errors asks them again", errors, where)
    with misread(f"{plan.benchmark.place(plan.data)}: a file of {plan.benchmark.name}"):
        report = plan.benchmark.score(answers, plan.data)
    images = {question.index: " ".join(question.images) for question in plan.questions}
    for row in report.get("extracted", ()):
        row["picture"] = images.get(row["index"])
        logprob = folder.answers.get(row["index"], {}).get("metadata", {}).get("logprob")
        row |= {} if logprob is None else {"logprob": logprob}
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
    """The entry `account` of metrics.json: means per question. `measured` counts the tokens read and cached, the rest
    comes from the formulas, in which a number is None if the method does not know it.

    Args:
        answers: records of the whole run.
        by: cost by which the budget was matched.
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
    values = [row[name] for row in rows]
    return None if None in values else sum(values) / len(values)


def timing(asked: int, seconds: float, workers: int) -> Record:
    """Duration and speed; `seconds` is without loading if one process asked all questions."""
    speed = asked / seconds if seconds else None
    return {"asked": asked, "seconds": seconds, "questions_per_second": speed, "workers": workers}


def environment(device: str) -> Record:
    if device.startswith("cuda"):
        import torch

        device = torch.cuda.get_device_name(device)
    return {
        "llava-consensus": versions()[OWN],
        "python": platform.python_version(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "device": device,
    }
