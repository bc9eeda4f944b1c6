"""The account of a run: what its answers were given from, by analysis and as measured, side by side in metrics.json.

Every answer's record carries its own account, written where the model is loaded; the run's is the mean over answers, so
lost metrics are made again without weights, and several workers end with what one ends with. Formulas: `account.py`.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from llava_consensus.files import Record
from llava_consensus.hosts.base import Host, Prefill, Prompt
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.costs import account, match
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.shape import Shape

log = logging.getLogger(__name__)

TYPICAL = 100  # prompts whose mean length stands for a run's when a budget is meant by its FLOPs
COUNTS = ("entering", "kept", "average")
PARTS = ("llm", "vision", "method", "total")


@dataclass(frozen=True)
class Ledger:
    """What answers of one method with one budget cost on one model.

    A picture of fewer tiles than the model allows has fewer tokens than the formulas say: they are about the largest.
    """

    method: Method
    budget: Budget  # that the method is given
    shape: Shape

    def entry(self, prefill: Prefill | None, pictures: int) -> Record:
        """`account` of an answer's metadata; nothing where the host does not tell what it read."""
        if prefill is None or not prefill.entering:
            return {}
        analytic = _analytic(self, prefill.text, prefill.question, pictures)
        average = sum(prefill.entering) / len(prefill.entering)
        measured = dict(zip(COUNTS, (prefill.entering[0], prefill.entering[-1], average), strict=True))
        rows = {"tokens": self.budget.tokens, "text": prefill.text, "question": prefill.question}
        return {"account": {**rows, **analytic, "measured": {**measured, "kv_bytes": list(prefill.kv_bytes)}}}


def settle(host: Host, method: Method, budget: Budget, by: str, asked: Iterable[tuple[Prompt, int]]) -> Ledger:
    """The ledger of a run, with the budget the method is given so that it costs what `budget` says.

    Args:
        by: see `account.match`.
        asked: prompts of the run with their numbers of pictures, in order; looked at for `flops` only.
    Raises:
        OptionError: where no budget does.
    """
    shape = host.shape()
    given = match(method, budget, _typical(host, shape, asked) if by == "flops" else shape, by)
    if given != budget:
        log.info("match=%s: the method is given tokens=%d for %d", by, given.tokens, budget.tokens)
    return Ledger(method, given, shape)


def of_run(answers: Sequence[Record], by: str) -> Record | None:
    """Means per question; `measured` is what was read and cached, the rest comes from the formulas. None where a host
    does not tell.
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
        "tokens": rows[0]["tokens"],
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
def _analytic(ledger: Ledger, text: int, question: int, pictures: int) -> Record:
    shape = ledger.shape._replace(text=text, question=question, pictures=pictures)
    return account(ledger.method, ledger.budget, shape).record()


def _typical(host: Host, shape: Shape, asked: Iterable[tuple[Prompt, int]]) -> Shape:
    """The shape with the mean prompt of the first questions that have a picture."""
    seen = [
        (host.rows(prompt, pictures), pictures) for (prompt, pictures), _ in zip(asked, range(TYPICAL), strict=False)
    ]
    rows = [own for own, pictures in seen if pictures] or [(0, 0)]
    text, question = (round(sum(column) / len(rows)) for column in zip(*rows, strict=True))
    return shape._replace(text=text, question=question)


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The mean of a value; None where one is not known."""
    values = [row[name] for row in rows]
    return None if None in values else sum(values) / len(values)
