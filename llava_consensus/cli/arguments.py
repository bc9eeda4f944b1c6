"""Declaration of commands, the arguments that several commands share, and the one place where their texts become
objects: method, budget, benchmark, run. A command is a function under `@command`, whose docstring is its help.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llava_consensus.errors import OptionError
from llava_consensus.evaluation import benchmarks
from llava_consensus.evaluation.runs import DATA, MODEL, OUT
from llava_consensus.evaluation.runs.execution import Execution
from llava_consensus.methods import PLUS, make
from llava_consensus.reduction import budget as reductions
from llava_consensus.reduction.options import options

if TYPE_CHECKING:
    from llava_consensus.evaluation.benchmarks import Benchmark
    from llava_consensus.evaluation.models import Loading, Runner
    from llava_consensus.evaluation.runs.configuration import RunConfig
    from llava_consensus.reduction.budget import Budget, Share
    from llava_consensus.reduction.method import Method

Lines = Callable[[argparse.Namespace], Iterator[str]]


class Argument(NamedTuple):
    flags: tuple[str, ...]
    settings: dict[str, Any]


class Command(NamedTuple):
    lines: Lines
    line: str
    arguments: tuple[Argument, ...]
    examples: tuple[str, ...]


COMMANDS: dict[str, Command] = {}  # of the files that are imported so far


class Once(argparse.Action):
    """Stores a value, and refuses a second one."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: Any = None
    ) -> None:
        if getattr(namespace, self.dest) is not self.default:
            parser.error(f"{flag} is given twice, first as {getattr(namespace, self.dest)}: give it once")
        setattr(namespace, self.dest, values)


def arg(*flags: str, **settings: Any) -> Argument:
    if flags == ("--tokens",):
        settings.setdefault("action", Once)
    return Argument(flags, settings)


def pairs(flag: str, help: str) -> Argument:
    return arg(flag, action="append", default=[], metavar="KEY=VALUE", help=help)


def command(name: str, *given: Argument, examples: tuple[str, ...]) -> Callable[[Lines], Lines]:
    """Declares the function below as the command `name`; it yields what is printed."""

    def declare(lines: Lines) -> Lines:
        text = " ".join((lines.__doc__ or "").split()).removesuffix(".")
        COMMANDS[name] = Command(lines, text[:1].lower() + text[1:], given, examples)
        return lines

    return declare


DATA_DIR = arg("--data", default=DATA, type=Path, metavar="DIR", help="folder with the benchmarks' files (%(default)s)")
OUT_DIR = arg("--out", default=OUT, type=Path, metavar="DIR", help="folder of results (%(default)s)")
LIMIT = arg("--limit", type=int, help="only the first questions (smoke test; biased: neighbours share images)")
SAMPLE = arg("--sample", type=int, help="random sample of this many questions, the same one for every run")
NO_PROGRESS = arg("--no-progress", action="store_true", help="no progress bar")
FORMAT = arg("--format", choices=("markdown", "csv", "latex"), default="markdown", help="of tables (%(default)s)")
BENCHMARK = arg("name", metavar="BENCHMARK", help="see `list benchmarks`")
BENCHMARK_OPTION = pairs("--benchmark-option", help="of the benchmark, such as split=test; a wrong key lists them")
METHOD = arg("--method", default="consensusdrop", help="see `list methods` (%(default)s)")
OPTION = pairs("--option", help="option of the method, see `list METHOD`")
MATCH = arg("--match", default="kept", help="count that --tokens bounds: kept, entering, average, flops (%(default)s)")
LOADING = (
    arg("--device", default="auto", help="auto, cpu, cuda, cuda:N (%(default)s)"),
    arg("--dtype", default="auto", help="auto, float32, float16, bfloat16 (%(default)s)"),
    arg("--device-map", metavar="MAP", help="spread over all devices: auto, balanced, sequential (needs accelerate)"),
    arg("--load-4bit", dest="bits", action="store_const", const=4, help="quantised weights (needs bitsandbytes)"),
    arg("--load-8bit", dest="bits", action="store_const", const=8, help="quantised weights (needs bitsandbytes)"),
    arg("--attn", default="auto", metavar="KERNEL", help="sdpa, flash_attention_2, eager (the model's own)"),
    arg("--revision", help="branch, tag or commit of a model of the hub"),
    arg("--trust-remote-code", action="store_true", help="run code that the checkpoint carries"),
    pairs("--host-option", help="option of the model, such as layout=2880 for 2 x 2 tiles; a wrong key lists them"),
)
LOADED = (arg("--model", "--model-path", default=MODEL, help="checkpoint folder or hub name (%(default)s)"), *LOADING)
REDUCED = (
    *LOADED,
    METHOD,
    arg("--tokens", type=lambda text: number(text), help="visual tokens of an image, or a share like 0.1 (64)"),
    arg("--merged", type=int, help="merged tokens among --tokens (the paper's ratio, 10 of 64)"),
    OPTION,
    arg("--conversation", "--conv-mode", help="template of the prompts (the model's own)"),
    arg("--max-new-tokens", "--max_new_tokens", type=int, help="longest answer (the benchmark's bound, else 128)"),
)
RUN = (
    DATA_DIR,
    MATCH,
    OUT_DIR,
    LIMIT,
    SAMPLE,
    arg("--batch", default=Execution.batch, type=int, help="questions answered together (%(default)s)"),
    arg("--workers", default=Execution.workers, type=int, help="processes, each with its own model (%(default)s)"),
    NO_PROGRESS,
    arg("--retry-errors", action="store_true", help="ask questions that failed before again"),
    arg("--allow-outside", action="store_true", help="allow images outside their folder: absolute, .., symlinks"),
)
SHARDED = (
    arg("--shard", type=lambda text: shard(text), metavar="N/COUNT", help="one of COUNT equal parts; then --merge"),
    arg("--merge", action="append", default=[], type=Path, metavar="DIR", help="take answers from these results too"),
)


def benchmark(name: str, given: argparse.Namespace) -> "Benchmark":
    return benchmarks.make(name, **texts(given.benchmark_option))


def host_options(given: argparse.Namespace) -> dict[str, str]:
    return texts(given.host_option)


def texts(pairs: Iterable[str]) -> dict[str, str]:
    return {name: str(value) for name, value in options(pairs).items()}


def method(given: argparse.Namespace) -> "Method":
    return make(given.method, **options(given.option))


def one_word_method(text: str) -> "Method":
    """The method of `NAME`, `NAME:key=value,key=value`, or several with `+` between them."""
    if PLUS.search(text):
        return make(text)
    name, _, rest = text.partition(":")
    return make(name, **options(filter(None, rest.split(","))))


def number(text: str) -> int | float:
    """A whole number, or a fraction if the text has a point. ArgumentTypeError for another text."""
    try:
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, or a share such as 0.1") from None


def shard(text: str) -> tuple[int, int]:
    part, _, count = text.partition("/")
    if not (part.isdecimal() and count.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} must be N/COUNT, for example 2/4")
    return int(part), int(count)


def budget(given: argparse.Namespace) -> "Budget | Share":
    return reductions.budget(64 if given.tokens is None else given.tokens, given.merged)


def budgets(text: str) -> "list[Budget | Share]":
    try:
        return [reductions.budget(number(word)) for word in text.split()]
    except OptionError:
        raise
    except argparse.ArgumentTypeError:
        raise OptionError(f"--tokens {text!r}: must be whole numbers or shares, such as '192 64 0.1'") from None


def loading(given: argparse.Namespace) -> "Loading":
    from llava_consensus.evaluation.models import Loading

    names = ("device", "dtype", "device_map", "bits", "attn", "revision", "trust_remote_code")
    return Loading(*(getattr(given, name) for name in names))


def load(given: argparse.Namespace) -> "Runner":
    from llava_consensus.evaluation import models

    options, own = loading(given), host_options(given)
    models.check(given.model, None, options, host_options=own)
    return models.load(given.model, options, own)


def config(
    given: argparse.Namespace, benchmark: "Benchmark", method: "Method", budget: "Budget | Share | None" = None
) -> "RunConfig":
    from llava_consensus.evaluation.runs.configuration import RunConfig

    return RunConfig(
        benchmark,
        method,
        budget,
        loading=loading(given),
        host_options=host_options(given),
        # of those that the command has
        **{name: vars(given)[name] for name in ("match", "model", "data", "limit", "sample") if name in given},
    )


def execution(given: argparse.Namespace) -> Execution:
    own = {field.name: getattr(given, field.name) for field in fields(Execution) if field.name in given}
    return Execution(**own | {"progress": not given.no_progress, "merge": tuple(own.get("merge", ()))})
