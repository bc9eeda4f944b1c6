"""The commands `eval` and `sweep`: one run, or a grid of runs."""

import argparse
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import Command
from llava_consensus.cli.grids import carry_out, folders
from llava_consensus.errors import DataError

if TYPE_CHECKING:
    from llava_consensus.runs.loop import RunResult

log = logging.getLogger(__name__)

LINEUP = "consensusdrop consensusdrop:alpha=1.0 consensusdrop:alpha=0.0 consensusdrop:fuser=recovery random"


def add(command: Command) -> None:
    """Adds both commands."""
    parser = command("eval", evaluate, "accuracy of a model and method on one benchmark")
    parser.add_argument("name", metavar="BENCHMARK", help="see `llava-consensus list`")
    arguments.add_method(parser)
    arguments.add_fast(parser)
    arguments.add_run(parser)
    arguments.add_benchmark_option(parser)
    parser = command("sweep", sweep, "a grid of benchmarks, methods and budgets, and each benchmark with all tokens")
    parser.add_argument("--bench", default="gqa pope textvqa", metavar="NAMES", help="or all (%(default)s)")
    parser.add_argument("--methods", default=LINEUP, metavar="NAMES", help="NAME or NAME:key=value,..., or all")
    parser.add_argument(
        "--tokens", default="192 128 64 32", metavar="NUMBERS", help="budgets, or shares such as 0.1 (%(default)s)"
    )
    arguments.add_model(parser)
    arguments.add_run(parser)


def evaluate(given: argparse.Namespace) -> Iterator[str]:
    """One run, and what it measured."""
    from llava_consensus.report import table
    from llava_consensus.runs.loop import run

    benchmark = arguments.benchmark(given.name, given)
    config = arguments.config(given, benchmark, arguments.method(given), arguments.budget(given))
    config = replace(config, conversation=given.conversation, max_new_tokens=given.max_new_tokens)
    result = run(config, given.out, arguments.execution(given))
    stored = json.loads((result.path / "config.json").read_bytes())
    try:
        full = table.full_score(given.out, stored)
    except DataError as error:  # of another run, which is no reason to keep this one's result back
        full = None
        log.warning("another run is damaged, so it is not compared with: %s", error)
    yield from _summary(result, given.name, full)


def sweep(given: argparse.Namespace) -> Iterator[str]:
    """Every run of a grid, a line each."""
    from llava_consensus import benchmarks
    from llava_consensus.methods import METHODS, make
    from llava_consensus.runs import sweep as grids

    names = benchmarks.BENCHMARKS if given.bench == "all" else given.bench.split()
    words = METHODS if given.methods == "all" else given.methods.split()
    methods, budgets = [arguments.one_word_method(word) for word in words], arguments.budgets(given.tokens)
    full = [arguments.config(given, benchmarks.make(name), make("full")) for name in names]
    grid = grids.cells(full, methods, budgets)
    done = []
    for line, cell in carry_out(grid, given):
        yield line
        done.append(cell)
    yield f"{sum(cell.error is None for cell in done)} of {len(grid)} runs are complete: {given.out}"
    folders(done)


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
