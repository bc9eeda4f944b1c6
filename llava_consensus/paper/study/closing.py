"""The content of positions.json (`format.py`): runs of `ClosedFrom`, and attention by place before and after."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llava_consensus.evaluation.files import Record
from llava_consensus.evaluation.report.rows import Row, read_row
from llava_consensus.evaluation.report.stats import compare, draws, interval
from llava_consensus.evaluation.runs.configuration import Plan, RunConfig, prepare
from llava_consensus.evaluation.runs.encodings import reader
from llava_consensus.evaluation.runs.sweep import Cell
from llava_consensus.hosts import Host
from llava_consensus.methods import make
from llava_consensus.paper.study.format import STRETCHES
from llava_consensus.paper.study.positions import Ask, ClosedFrom, attention_by_place
from llava_consensus.paper.study.results import description

POLICIES = {"full": make("full"), "renumber": make("consensusdrop"), "keep": make("consensusdrop", positions="keep")}


def grid(full: RunConfig, tokens: Any, layers: int) -> list[Cell]:
    """All tokens, positions closed up nowhere, and from each of the `layers` decoder layers on."""
    first = prepare(full)
    methods = [ClosedFrom(), *(ClosedFrom(closed_from=layer) for layer in range(layers))]
    return [Cell(first), *(Cell(first.reduced_by(method, tokens, "kept")) for method in methods)]


def attention(host: Host, plan: Plan, tokens: int, count: int) -> list[Record]:
    """Rows of `attention`: the first `count` questions of a plan, with all tokens and under both policies."""
    read, questions = reader(plan), plan.questions[:count]

    def ask(question: Any) -> Ask:
        pictures = [picture for path in plan.pictures(question) for picture in read(path)]
        return host.encode(pictures), plan.prompt(question)

    rows = []
    for name, method in POLICIES.items():
        asks = [lambda question=question: ask(question) for question in questions]
        shares = attention_by_place(host, method, tokens, asks, STRETCHES)
        rows += [
            {"positions": name, "layer": layer, "stretches": stretches, "visual": sum(stretches)}
            for layer, stretches in enumerate(shares, 1)
        ]
    return rows


def content(folders: Sequence[Path], tokens: int, looked_at: Sequence[Record], count: int) -> Record:
    """The content of positions.json.

    Args:
        folders: of complete runs, in the order of `grid`.
        tokens: of the budget.
        looked_at: what `attention` found.
        count: questions of that.
    """
    full, nowhere, *closed = [read_row(folder) for folder in folders]
    rows = [_row("full", full, None), _row(None, nowhere, None)]
    rows += [_row(run.config["options"]["closed_from"], run, nowhere) for run in closed]
    facts = {"benchmark": full.benchmark, "title": full.facts.title, "scale": full.facts.scale, "tokens": tokens}
    return {
        "description": description([full]),
        **facts,
        "layers": rows,
        "questions": count,
        "attention": list(looked_at),
    }


def _row(closed_from: Any, run: Row, reference: Row | None) -> Record:
    test = None if reference is None else compare(run, reference)
    return {
        "closed_from": closed_from,
        "accuracy": run.score,
        "interval": None if run.sample is None else interval(draws(run.sample, run.benchmark)),
        "difference": None if test is None else test.difference,
        "difference_interval": None if test is None else [test.low, test.high],
        "p": None if test is None else test.p,
    }
