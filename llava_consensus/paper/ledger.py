"""Published results with their budgets on one footing: tokens that enter, that are kept, and the mean over layers.

"64 tokens" means the tokens handed to the language model in one paper, those left after a cut between its layers in
another, and a mean over layers in a third. An entry (`ledger.json`) says what its paper printed, where, and how its
budget is spent over the decoder layers: stages `[first layer, tokens]`, `T` being the budget and `N` all tokens, a pair
of numbers where the paper gives a range. An entry without stages takes those of its method. Rows of the
ConsensusDrop paper's tables of pictures are added to them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from llava_consensus.errors import unknown_name
from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.report.table import Column, Group, Table, count, number

UNPUBLISHED = "its schedule is not published where it was read"
PRINTED = {"llava_1_5_7b": ("llava-1.5-7b", "consensusdrop_t1"), "llava_next_7b": ("llava-next-7b", "consensusdrop_t2")}
RESULTS = {"vqav2": "VQAv2", "gqa": "GQA", "textvqa": "TextVQA", "pope": "POPE", "relative": "% of full"}
TOKENS = {"llava-1.5-7b": 576, "llava-next-7b": 2880, "qwen2.5-vl-7b": 100, "qwen3-vl-8b": 100}
PERCENT = ("qwen2.5-vl-7b", "qwen3-vl-8b")  # whose budgets are shares of each picture's own tokens
SHARE = "a share of each picture's tokens, whose number varies"


class Stage(NamedTuple):
    """Number of visual tokens from a decoder layer on; `low` and `high` differ where the paper gives a range."""

    layer: int
    low: int
    high: int


class Cost(NamedTuple):
    """Cost of the visual tokens that enter each layer."""

    flops: float  # of the language model's prefill
    kv_bytes: int


Price = Callable[[str, Sequence[int]], Cost]  # model, visual tokens that enter each layer


@dataclass(frozen=True)
class Entry:
    """One published result."""

    method: str
    model: str
    tokens: int  # the budget as its paper names it
    stages: tuple[Stage, ...] | None  # how it is spent; None where that is not published
    # as printed; `relative` is the percentage of the full model over the benchmarks of its own table
    results: Mapping[str, float]
    source: str  # paper and table
    note: str

    def layers(self, depth: int, place: float = 0.5) -> list[int] | None:
        """Visual tokens that enter each of `depth` layers, `place` of the way from the lower to the upper end of a
        range; None where the schedule is not published.
        """
        if self.stages is None:
            return None
        entering: list[int] = []
        for stage, end in zip(self.stages, [*(stage.layer for stage in self.stages[1:]), depth], strict=True):
            entering += [round(stage.low + place * (stage.high - stage.low))] * (end - stage.layer)
        return entering


@dataclass(frozen=True)
class Accounted:
    """An entry with its account."""

    entry: Entry
    layers: Sequence[int] | None
    bounds: tuple[float, float] | None  # of the mean over layers
    cost: Cost | None

    @property
    def average(self) -> float | None:
        """Visual tokens that enter a layer, mean over layers."""
        return None if self.layers is None else sum(self.layers) / len(self.layers)


def entries() -> list[Entry]:
    """All published results, those of the ConsensusDrop paper first."""
    printed = [
        {"method": row["method"], "tokens": row["tokens"], "source": source, "model": model, "results": _results(row)}
        for table, (model, source) in PRINTED.items()
        for row in paper.printed_tables()[table]
    ]
    return [_entry(one) for one in (*printed, *_data()["entries"])]


def account(entry: Entry, depth: int, price: Price) -> Accounted:
    """An entry with what its schedule means on a model of `depth` layers."""
    layers = entry.layers(depth)
    if layers is None:
        return Accounted(entry, None, None, None)
    ends = [entry.layers(depth, place) or layers for place in (0.0, 1.0)]
    low, high = (sum(end) / depth for end in ends)
    return Accounted(entry, layers, (low, high), price(entry.model, layers))


def result(name: str) -> Callable[[Accounted], float | None]:
    """Reads one printed result."""
    return lambda row: row.entry.results.get(name)


def _average(row: Accounted) -> str:
    if row.bounds is None or row.bounds[0] == row.bounds[1]:
        return count(row.average)
    return f"{count(row.average)} ({row.bounds[0]:.0f} to {row.bounds[1]:.0f})"


COLUMNS = (  # of a Accounted
    Column("method", lambda row: row.entry.method, key="method"),
    Column("named", lambda row: row.entry.tokens, key="tokens"),
    Column("entering", lambda row: row.layers and row.layers[0], count, "entering"),
    Column("kept", lambda row: row.layers and row.layers[-1], count, "kept"),
    Column("layer mean", lambda row: row.average, count, "average"),
    Column("LLM TFLOPs", lambda row: row.cost and row.cost.flops, number(1e-12), "flops"),
    Column("KV (MiB)", lambda row: row.cost and row.cost.kv_bytes, number(2**-20), "kv_bytes"),
    *(Column(title, result(name), number(), name) for name, title in RESULTS.items()),
    Column("source", lambda row: row.entry.source, key="source"),
    Column("note", lambda row: row.entry.note, key="note"),
)
KEYS = {column.key: column for column in COLUMNS}


def ordered(rows: Sequence[Accounted], key: str) -> list[Accounted]:
    """Rows by a column, lowest cost or best result first, those without a value last.

    Raises:
        OptionError: for a column that is not there.
    """
    if key not in KEYS:
        raise unknown_name("column", key, KEYS)
    known = [row for row in rows if KEYS[key].read(row) is not None]
    known.sort(key=KEYS[key].read, reverse=key in RESULTS)
    return known + [row for row in rows if KEYS[key].read(row) is None]


def ledger_table(rows: Sequence[Accounted]) -> Table:
    """Rows under the headings of their models; sources are numbered, with their names below."""
    sources = list(dict.fromkeys(row.entry.source for row in rows))
    groups = []
    for model, available in TOKENS.items():
        lines = [_cells(row, sources) for row in rows if row.entry.model == model]
        heading = f"{model}: budgets in percent" if model in PERCENT else f"{model}: {available} tokens in all"
        groups += [Group(heading, tuple(lines))] if lines else []
    titles = tuple(column.title for column in COLUMNS)
    below = "; ".join(f"[{number}] {source}" for number, source in enumerate(sources, start=1))
    below += '. "% of full" is over the benchmarks of a row\'s own source: only rows of one source can be ranked by it.'
    return Table("Published results, every budget by one account (docs/accounting.md)", titles, tuple(groups), below)


def cells(rows: Sequence[Accounted]) -> list[dict[str, Any]]:
    """Every row as a line of CSV, unrounded."""
    lines = []
    for row in rows:
        low, high = row.bounds or (None, None)
        values = {column.key: column.read(row) for column in COLUMNS}
        lines.append({"model": row.entry.model, **values, "average_low": low, "average_high": high})
    return lines


def _cells(row: Accounted, sources: Sequence[str]) -> tuple[str, ...]:
    special = {"average": _average(row), "source": f"[{sources.index(row.entry.source) + 1}]"}
    return tuple(special.get(column.key) or column.format(column.read(row)) for column in COLUMNS)


@cache
def _data() -> dict[str, Any]:
    """Sources, schedules of methods and entries."""
    text = (resources.files("llava_consensus.paper") / "ledger.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def _entry(given: Mapping[str, Any]) -> Entry:
    """An entry of the file, or of one of the paper's tables, with the schedule of its method."""
    model, tokens = given.get("model", "llava-1.5-7b"), given["tokens"]
    method = _data()["methods"].get(given["method"], {})
    by_tokens = method.get("by_tokens", {}).get(str(tokens))
    stages = None if model in PERCENT else given.get("stages") or method.get("stages") or by_tokens
    notes = [given.get("note"), None if "stages" in given else method.get("note") if stages else None]
    notes += [None if stages else SHARE if model in PERCENT else UNPUBLISHED]
    return Entry(
        method=given["method"],
        model=model,
        tokens=tokens,
        stages=tuple(_stage(stage, tokens, TOKENS[model]) for stage in stages) if stages else None,
        results=given["results"],
        source=_data()["sources"][given["source"]],
        note="; ".join(filter(None, notes)),
    )


def _stage(stage: Sequence[Any], tokens: int, available: int) -> Stage:
    layer, value = stage
    meaning = {"T": tokens, "N": available}
    ends = value if isinstance(value, list) else [value, value]
    low, high = (meaning[end] if isinstance(end, str) else end for end in ends)
    return Stage(layer, low, high)


def _results(row: Mapping[str, Any]) -> dict[str, float]:
    """The results of a row of the paper's tables."""
    keys = {"vqav2": "vqav2", "gqa": "gqa", "textvqa": "textvqa", "pope": "pope_f1", "relative": "rel_percent"}
    return {name: row[key] for name, key in keys.items() if row.get(key) is not None}
