"""The front door: arguments in, one call, numbers out.

    llava-consensus eval gqa --tokens 64                  accuracy on a benchmark; go on, or read what is complete
    llava-consensus score gqa --answers FILE --data DIR   score any LLaVA answer file (--json: everything measured)
    llava-consensus export vqav2 --answers FILE --out FILE   what the official server takes
    llava-consensus check-data [NAME...] --data DIR       what is there, what is missing and where it comes from
    llava-consensus ask PICTURE QUESTION --overlay o.png  one answer, its tokens and times, and what was kept
    llava-consensus judge mmvet --answers FILE ...        grades by a judge model; a rerun asks nothing again
    llava-consensus report --write docs/results.md        the tables of all results
    llava-consensus compare RUN_A RUN_B                   two runs, question by question: difference, interval, p
    llava-consensus list                                  methods, hosts, benchmarks

Whatever a user can mend ends with `error: ...` and the exit code of its kind (`errors.py`). Nothing heavy is imported
before it is needed.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_consensus import commands as on_files
from llava_consensus.errors import ConsensusError, DataError, OptionError
from llava_consensus.judge import command
from llava_consensus.report import command as tables

if TYPE_CHECKING:
    from llava_consensus.harness import RunResult

LINEUP = "consensusdrop consensusdrop:alpha=1.0 consensusdrop:alpha=0.0 consensusdrop:fuser=recovery random"
MODEL, DATA, OUT = "checkpoints/llava-mini", "playground/mini", "results"
SHORT = "\nAnswer the question using a single word or phrase."  # LLaVA's own suffix


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    _tell()
    try:
        arguments.command(arguments)
    except ConsensusError as error:
        print(f"error: {error}" if error.exit_code != 130 else str(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="llava-consensus", description="Fewer visual tokens for LLaVA, measured.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _eval_arguments(_command(commands, "eval", _eval, "accuracy of a model and method on one benchmark"))
    _sweep_arguments(_command(commands, "sweep", _sweep, "a grid of benchmarks, methods and budgets"))
    on_files.add(lambda name, lines, line: _command(commands, name, lambda given: _print(lines(given)), line), DATA)
    judge = _command(commands, "judge", _judge, "grade an answer file by a judge model")
    judge.add_argument("--data", default=DATA, type=Path, metavar="DIR", help="folder with eval/... (%(default)s)")
    command.arguments(judge)
    _ask_arguments(_command(commands, "ask", _ask, "ask one question about one picture"))
    tables.report_arguments(_command(commands, "report", _report, "tables of all results: Markdown, CSV, LaTeX"))
    tables.compare_arguments(_command(commands, "compare", _compare, "two runs against each other, by question"))
    _command(commands, "list", _list, "methods, hosts and benchmarks")
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], None], line: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=line, description=line)
    parser.set_defaults(command=run)
    return parser


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    _load_arguments(parser)
    parser.add_argument("--method", default="consensusdrop", help="see `llava-consensus list` (%(default)s)")
    parser.add_argument("--tokens", default=64, type=int, help="visual tokens per image for the LLM (%(default)s)")
    parser.add_argument("--merged", type=int, help="how many of them are merged ones (the paper's split)")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="option of the method")
    parser.add_argument("--conversation", help="LLaVA's conversation template (the benchmark's own, vicuna_v1)")
    parser.add_argument("--max-new-tokens", type=int, help="bound on the answer's length (the benchmark's own, 128)")


def _load_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=MODEL, help="checkpoint folder or hub name (%(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, float16, bfloat16 (%(default)s)")


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", default=DATA, help="folder with eval/... in LLaVA's layout (%(default)s)")
    parser.add_argument("--out", default=OUT, type=Path, help="folder of results (%(default)s)")
    parser.add_argument("--limit", type=int, help="only the first questions")
    parser.add_argument("--batch", default=16, type=int, help="questions answered together (%(default)s)")
    parser.add_argument("--workers", default=1, type=int, help="processes, each with its own model (%(default)s)")
    parser.add_argument("--engine", default="local", help="where several workers are: local, ray (%(default)s)")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")


def _eval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="BENCHMARK", help="see `llava-consensus list`")
    _model_arguments(parser)
    parser.add_argument("--match", default="kept", help="tokens counts what is kept, entering, average or flops")
    _run_arguments(parser)
    on_files.choice_argument(parser)


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bench", default="gqa pope textvqa", metavar="NAMES", help="benchmarks (%(default)s)")
    parser.add_argument("--methods", default=LINEUP, metavar="NAMES", help="NAME or NAME:key=value,... (%(default)s)")
    parser.add_argument("--tokens", default="192 128 64 32", metavar="NUMBERS", help="budgets (%(default)s)")
    _load_arguments(parser)
    _run_arguments(parser)


def _ask_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("picture", metavar="PICTURE")
    parser.add_argument("question", metavar="QUESTION")
    _model_arguments(parser)
    parser.add_argument("--short", action="store_true", help="ask for a single word or phrase, as the benchmarks do")
    parser.add_argument("--repeats", default=5, type=int, help="timings of the first token (%(default)s)")
    parser.add_argument("--overlay", type=Path, metavar="FILE", help="write a picture of what was kept")


def _tell() -> None:
    """Messages of the package go to stderr as they are; standard output is for results."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its hints are about packages we do not need
    logger = logging.getLogger("llava_consensus")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


def _sweep(arguments: argparse.Namespace) -> None:
    from llava_consensus import harness, sweep
    from llava_consensus.plan import RunConfig

    places = {name: getattr(arguments, name) for name in ("model", "data", "limit", "device", "dtype")}
    try:
        tokens = [int(text) for text in arguments.tokens.split()]
    except ValueError:
        raise OptionError(f"--tokens {arguments.tokens!r}: must be whole numbers, such as '192 64'") from None
    grid = sweep.cells(RunConfig("", **places), arguments.bench.split(), arguments.methods.split(), tokens)
    pace = harness.Pace(arguments.batch, arguments.workers, arguments.engine, not arguments.no_progress)

    def tell(number: int, cell: sweep.Cell) -> None:
        options = "".join(f" {key}={value}" for key, value in cell.config.options.items())
        what = f"{cell.config.benchmark} {cell.config.method}{options} {cell.config.tokens}"
        print(f"[{number}/{len(grid)}] {what}", flush=True)

    done = sweep.sweep(grid, arguments.out, pace, tell)
    failed = [cell for cell in done if cell.error]
    for cell in failed:
        print(f"failed: {cell.config.benchmark} {cell.config.method} {cell.config.tokens}: {cell.error}")
    print(f"{len(done) - len(failed)} of {len(done)} runs are complete: {arguments.out}")
    if failed and failed[0].error:
        raise failed[0].error


def _eval(arguments: argparse.Namespace) -> None:
    from llava_consensus import harness
    from llava_consensus.plan import RunConfig
    from llava_consensus.report import table
    from llava_consensus.sweep import parse_options

    config = RunConfig(
        benchmark=arguments.name,
        method=arguments.method,
        options=parse_options(arguments.option),
        tokens=arguments.tokens,
        merged=arguments.merged,
        match=arguments.match,
        model=arguments.model,
        data=arguments.data,
        limit=arguments.limit,
        device=arguments.device,
        dtype=arguments.dtype,
        conversation=arguments.conversation,
        max_new_tokens=arguments.max_new_tokens,
        choices=on_files.choices(arguments.benchmark_option),
    )
    pace = harness.Pace(arguments.batch, arguments.workers, arguments.engine, not arguments.no_progress)
    result = harness.run(config, arguments.out, pace)
    stored = json.loads((result.path / "config.json").read_bytes())
    print("\n".join(_summary(result, arguments.name, table.full_score(arguments.out, stored))))


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
    errors = f", {metrics['errors']} not asked: picture unreadable" if metrics["errors"] else ""
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


def _judge(arguments: argparse.Namespace) -> None:
    from llava_consensus.sweep import parse_options

    _print(command.run(arguments, parse_options(arguments.judge_option)))


def _ask(arguments: argparse.Namespace) -> None:
    from llava_consensus import hosts
    from llava_consensus.ask import ask, picture
    from llava_consensus.hosts.checkpoints import check_checkpoint, check_conversation
    from llava_consensus.images import open_image
    from llava_consensus.methods import make
    from llava_consensus.sweep import parse_options
    from llava_consensus.tokens import Budget

    method = make(arguments.method, **parse_options(arguments.option))
    budget = Budget(arguments.tokens, arguments.merged)
    _check_ask(arguments)
    check_checkpoint(arguments.model)
    if arguments.conversation:
        check_conversation(arguments.conversation)
    image = open_image(arguments.picture, upright=True)
    text = arguments.question + (SHORT if arguments.short else "")
    prompt = hosts.Prompt(text, arguments.conversation or "vicuna_v1", arguments.max_new_tokens or 128)
    host = hosts.load(arguments.model, arguments.device, arguments.dtype)
    reply = ask(host, image, prompt, method, budget, arguments.repeats)
    structural = f" (and {reply.answer.structural} structural ones)" if reply.answer.structural else ""
    print(reply.answer.text)
    print(f"visual tokens the language model saw: {reply.answer.after} of {reply.answer.before}{structural}")
    print(f"time to first token: {reply.reduced_ms:.1f} ms, with all tokens {reply.full_ms:.1f} ms")
    for note in reply.answer.notes:
        print(f"note: {note}")
    if arguments.overlay:
        picture(host, image, reply.answer).save(arguments.overlay)
        print(f"kept, merged and dropped: {arguments.overlay}")


def _check_ask(arguments: argparse.Namespace) -> None:
    """What `ask` alone needs to be right, before weights load."""
    for name in ("repeats", "max_new_tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise OptionError(f"{name}={value} must be at least 1")
    file = arguments.overlay
    if file and file.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise OptionError(f"--overlay {file}: must end with .png, .jpg or .webp")
    if file and not file.parent.is_dir():
        raise DataError(f"--overlay {file}: no folder {file.parent}")


def _report(arguments: argparse.Namespace) -> None:
    print(tables.report(arguments))


def _compare(arguments: argparse.Namespace) -> None:
    print(tables.compare(arguments))


def _list(arguments: argparse.Namespace) -> None:
    from llava_consensus.benchmarks import BENCHMARKS
    from llava_consensus.hosts import HOSTS
    from llava_consensus.methods import METHODS

    methods = {name: (method.__doc__ or "").strip().split("\n")[0] for name, method in METHODS.items()}
    hosts = {name: host.line for name, host in HOSTS.items()}
    benchmarks = {name: benchmark.line for name, benchmark in BENCHMARKS.items()}
    for title, entries in (("methods", methods), ("hosts", hosts), ("benchmarks", benchmarks)):
        print(title)
        for name, line in entries.items():
            print(f"  {name:14} {line}")


if __name__ == "__main__":
    sys.exit(main())
