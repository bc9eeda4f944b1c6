"""The commands `eval` and `sweep`: one run, or a grid of runs."""

import argparse
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llava_consensus.cli import arguments, terminal, trackers
from llava_consensus.cli.arguments import Command
from llava_consensus.cli.grids import carry_out, folders
from llava_consensus.errors import DataError

if TYPE_CHECKING:
    from llava_consensus.evaluation.report.table import Table
    from llava_consensus.evaluation.runs.loop import RunResult
    from llava_consensus.evaluation.runs.sweep import Cell

log = logging.getLogger(__name__)

LINEUP = "consensusdrop consensusdrop:alpha=1.0 consensusdrop:alpha=0.0 consensusdrop:fuser=recovery random"


def add(command: Command) -> None:
    """Adds both commands."""
    parser = command("eval", evaluate, "accuracy of a model and method on one benchmark")
    parser.add_argument("name", metavar="BENCHMARK", help="see `llava-consensus list`")
    arguments.add_method(parser)
    arguments.add_run(parser)
    arguments.add_benchmark_option(parser)
    trackers.add(parser)
    parser.add_argument("--json", action="store_true", help="everything measured, as JSON")
    parser = command("sweep", sweep, "a grid of benchmarks, methods and budgets, and each benchmark with all tokens")
    parser.add_argument("--bench", default="gqa pope textvqa", metavar="NAMES", help="or all (%(default)s)")
    parser.add_argument("--methods", default=LINEUP, metavar="NAMES", help="NAME or NAME:key=value,..., or all")
    parser.add_argument(
        "--tokens", default="192 128 64 32", metavar="NUMBERS", help="budgets, or shares such as 0.1 (%(default)s)"
    )
    arguments.add_model(parser)
    arguments.add_run(parser)
    trackers.add(parser)


def evaluate(given: argparse.Namespace) -> Iterator[str]:
    """One run, and what it measured."""
    benchmark, method = arguments.benchmark(given.name, given), arguments.method(given)
    trackers.check(given.log)

    from llava_consensus.evaluation.report.rows import (
        full_score,
    )  # a wrong name is told before anything heavy is imported
    from llava_consensus.evaluation.runs.loop import run

    config = arguments.config(given, benchmark, method, arguments.budget(given))
    config = replace(config, conversation=given.conversation, max_new_tokens=given.max_new_tokens)
    result = run(config, given.out, arguments.execution(given))
    trackers.tell(given.log, result)
    stored = json.loads((result.path / "config.json").read_bytes())
    try:
        full = full_score(given.out, stored)
    except DataError as error:  # of another run, which is no reason to keep this one's result back
        full = None
        log.warning("another run is damaged, so it is not compared with: %s", error)
    if given.json:
        yield json.dumps({**result.metrics, "all_tokens": full, "run": str(result.path)}, indent=1)
        return
    yield from _summary(result, given.name, full)


def sweep(given: argparse.Namespace) -> Iterator[str]:
    """Every run of a grid, a line each."""
    from llava_consensus.evaluation import benchmarks
    from llava_consensus.evaluation.runs import sweep as grids
    from llava_consensus.methods import METHODS, make

    trackers.check(given.log)
    names = benchmarks.BENCHMARKS if given.bench == "all" else given.bench.split()
    words = METHODS if given.methods == "all" else given.methods.split()
    methods, budgets = [arguments.one_word_method(word) for word in words], arguments.budgets(given.tokens)
    full = [arguments.config(given, benchmarks.make(name), make("full")) for name in names]
    grid = grids.cells(full, methods, budgets)
    done: list[Cell] = []
    begun = time.monotonic()
    for line, cell in carry_out(grid, given):
        yield line
        done.append(cell)
        if cell.result:
            trackers.tell(given.log, cell.result)
        if len(done) < len(grid):
            log.info("%s", _remaining(time.monotonic() - begun, len(done), len(grid)))
    yield from terminal.tables([_table(done)])
    yield f"{sum(cell.error is None for cell in done)} of {len(grid)} runs are complete: {given.out}"
    folders(done)


def _remaining(seconds: float, done: int, count: int) -> str:
    """How long the rest of a grid takes if its runs take as long as those so far; complete ones take no time."""
    minutes = seconds / done * (count - done) / 60
    left = f"{minutes / 60:.1f} hours" if minutes >= 90 else f"{minutes:.0f} minutes" if minutes >= 1 else "a minute"
    return f"{done} of {count} runs, about {left} left"


def _table(done: "list[Cell]") -> "Table":
    """The scores of a grid: a line for each method, a group for each budget, a column for each benchmark."""
    from llava_consensus.evaluation.report.table import Group, Table

    names = list(dict.fromkeys(cell.plan.description["benchmark"] for cell in done))
    groups: dict[str, dict[str, dict[str, str]]] = {}
    for cell in done:
        benchmark, method, budget = cell.name.split(" ", 2)
        score = cell.result.metrics["score"] if cell.result else None
        became = "failed" if cell.error else "no score" if score is None else f"{score:.2f}"
        groups.setdefault(budget, {}).setdefault(method, {})[benchmark] = became
    lines = {
        budget: tuple((method, *(found.get(name, "") for name in names)) for method, found in methods.items())
        for budget, methods in groups.items()
    }
    return Table(
        "scores", ("method", *names), tuple(Group(f"{budget} tokens", rows) for budget, rows in lines.items()), ""
    )


def _cost(account: dict[str, Any]) -> str:
    """What a question cost, in one line."""
    total = account["flops"]["total"]
    flops = "unknown" if total is None else f"{total / 1e9:.2f} GFLOP"
    counts = f"{account['entering']:g} enter, {account['kept']:g} kept, {account['average']:.4g} in a layer on average"
    return f"cost per question: {counts}; {flops}, {account['measured']['kv_bytes'] / 2**20:.3f} MiB of cache"


def _summary(result: "RunResult", name: str, full: float | None) -> list[str]:
    """What a run measured, for people."""
    metrics, tokens = result.metrics, result.metrics["tokens"]
    score = "none" if metrics["score"] is None else f"{metrics['score']:.2f}"
    errors = f", {metrics['errors']} without an answer (errors.jsonl)" if metrics["errors"] else ""
    lines = [
        f"{name}: {metrics['metric']} {score} on {metrics['answered']} of {metrics['questions']} questions{errors}"
    ]
    if tokens["before"] == tokens["after"]:
        lines.append("all tokens: this run is the full model")
    elif full is None:
        lines.append("all tokens: not measured yet, run the same with --method full")
    else:
        share = f" ({100 * metrics['score'] / full:.1f} % of it kept)" if metrics["score"] is not None and full else ""
        lines.append(f"all tokens: {full:.2f}{share}")
    report = metrics["report"]
    if report.get("contains") is not None:  # a benchmark with a judge
        matches = f"exact {report['exact']:.1f} %, contained {report['contains']:.1f} %"
        lines.append(f"without a judge: {matches}; grades: llava-consensus judge {name} --answers FILE --judge-model M")
    structural = f", and {tokens['structural']:g} structural ones" if tokens["structural"] else ""
    lines.append(f"visual tokens per question: {tokens['before']:g} before, {tokens['after']:g} after{structural}")
    if metrics.get("account"):
        lines.append(_cost(metrics["account"]))
    speed = metrics["timing"]["questions_per_second"]
    lines.append(f"speed: {speed:.1f} questions/s" if speed else "speed: nothing was asked")
    return [*lines, *(f"note ({count} answers): {note}" for note, count in metrics["notes"].items()), str(result.path)]
