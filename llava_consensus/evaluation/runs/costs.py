"""What the answers of a run cost, by analysis and as measured, side by side in metrics.json.

The record of every answer carries its own costs, written where the model is loaded; those of the run are means over
answers, so lost metrics are made again without weights, and several workers end with what one ends with. The formulas
are those of `reduction/costs.py` (docs/accounting.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from llava_consensus.evaluation.files import Record
from llava_consensus.hosts.base import Prefill
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.costs import account
from llava_consensus.reduction.method import Method, Shape

COUNTS = ("entering", "kept", "average")
PARTS = ("llm", "vision", "method", "total")


@dataclass(frozen=True)
class AnswerCosts:
    """Counts what answers cost that one model gives with one method and budget.

    A picture of fewer tiles than the model allows has fewer tokens than the formulas say: they are about the largest.
    """

    method: Method
    budget: Budget | Share  # that the method is given
    shape: Shape

    def of(self, prefill: Prefill | None, pictures: int, tokens: Sequence[int] = ()) -> Record:
        """The entry `account` of an answer's metadata; nothing where the host does not tell what it read.

        Args:
            prefill: what was read.
            pictures: of the prompt.
            tokens: what a share comes to for each picture; their mean is what the formulas are given.
        """
        if prefill is None or not prefill.entering:
            return {}
        budget = Budget(round(sum(tokens) / len(tokens))) if tokens else self.budget.of(self.shape.available)
        analytic = _analytic(self.method, budget, self.shape, prefill.text, prefill.question, pictures)
        average = sum(prefill.entering) / len(prefill.entering)
        measured = dict(zip(COUNTS, (prefill.entering[0], prefill.entering[-1], average), strict=True))
        rows = {"tokens": budget.tokens, "text": prefill.text, "question": prefill.question}
        return {"account": {**rows, **analytic, "measured": {**measured, "kv_bytes": list(prefill.kv_bytes)}}}


def of_run(answers: Sequence[Record], by: str) -> Record | None:
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


@lru_cache(maxsize=4096)
def _analytic(method: Method, budget: Budget, shape: Shape, text: int, question: int, pictures: int) -> Record:
    shape = shape._replace(text=text, question=question, pictures=pictures)
    return account(method, budget, shape).record()


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The mean of a value; None where it is not known of every row."""
    values = [row[name] for row in rows]
    return None if None in values else sum(values) / len(values)
