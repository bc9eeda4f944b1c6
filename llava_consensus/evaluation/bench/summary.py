"""What many measurements of one method and budget come to: medians, spread, and the account beside them."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llava_consensus.evaluation.bench.timing import Side
from llava_consensus.evaluation.files import Record
from llava_consensus.reduction.costs import account, kv_bytes, paper_flops
from llava_consensus.reduction.method import Shape

PAPER_TEXT = 50  # rows of text in the paper's efficiency tables
TIMES = ("ttft_ms", "tpot_ms", "generation_ms")
PHASES = ("tower", "reduction", "prefill")
UNKNOWN_TOWER = "tokens of this model depend on the picture, and its tower is not counted"

Samples = Sequence[Mapping[str, Any]]  # of a row, as the file has them


@dataclass(frozen=True)
class Row:
    """A method and a budget: the name it was asked for by, and what it is given."""

    name: str
    tokens: int
    side: Side

    @property
    def title(self) -> str:
        """What tables call it: the method's title, and the options it was asked for with."""
        name, _, options = self.name.partition(":")
        return ", ".join(filter(None, [self.side[0].title or name, options.replace(",", ", ")]))


def summary(row: Row, samples: Samples, shape: Shape, tower_known: bool) -> Record:
    """What is known of a row, its samples included (see `efficiency`); not yet compared with the full model.

    Args:
        shape: of the model and the prompt.
        tower_known: whether `shape` says what the vision tower reads.
    """
    phases = {name: median(samples, f"{name}_ms") for name in PHASES}
    stages = {name: statistics.median(one["stages_ms"][name] for one in samples) for name in samples[0]["stages_ms"]}
    return {
        "method": row.name,
        "title": row.title,
        "tokens": row.tokens,
        "reduction_percent": 100 * (1 - row.tokens / shape.available),
        **{name: median(samples, name) for name in TIMES},
        "quartiles": {name: quartiles(samples, name) for name in TIMES},
        "phases_ms": phases,
        "stages_ms": stages,
        "share": (phases["reduction"] or 0.0) / (median(samples, "ttft_ms") or 1.0),
        **_formulas(row.side, shape, tower_known),
        "kv_bytes": median(samples, "kv_bytes"),
        "peak_bytes": max(_values(samples, "peak_bytes"), default=None),
        "samples": list(samples),
    }


def _formulas(side: Side, shape: Shape, tower_known: bool) -> Record:
    """Our account, and the formulas of the paper's own tables."""
    method, budget = side
    found = account(method, budget.of(shape.available), shape)
    record = found.record()
    if not tower_known:
        record |= {"flops": {**record["flops"], "vision": None, "total": None}, "note": UNKNOWN_TOWER}
    paper = shape._replace(text=PAPER_TEXT, number_bytes=2)
    columns = {"flops": paper_flops(paper, found.layers), "kv_bytes": kv_bytes(paper, found.layers)}
    return {"account": record, "paper": columns}


def median(samples: Samples, name: str) -> float | None:
    """The median of a value over the samples that have it."""
    values = _values(samples, name)
    return statistics.median(values) if values else None


def quartiles(samples: Samples, name: str) -> list[float] | None:
    """First and third quartile of a value over the samples that have it."""
    values = _values(samples, name)
    if len(values) < 2:
        return values * 2 or None
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def _values(samples: Samples, name: str) -> list[float]:
    return [one[name] for one in samples if one[name] is not None]
