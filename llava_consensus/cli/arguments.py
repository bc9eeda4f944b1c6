"""Arguments that several commands share, and the one place where their texts become objects: method, budget, benchmark,
run. Nothing below the command line parses.

`add_...` adds arguments to a command's parser; the others make objects of what was given.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_consensus.errors import OptionError
from llava_consensus.evaluation.runs import DATA, MODEL, OUT
from llava_consensus.evaluation.runs.execution import Execution

if TYPE_CHECKING:
    from llava_consensus.evaluation.benchmarks import Benchmark
    from llava_consensus.evaluation.runs.configuration import RunConfig
    from llava_consensus.hosts import Loading
    from llava_consensus.reduction.budget import Budget, Share
    from llava_consensus.reduction.method import Method

Lines = Callable[[argparse.Namespace], Iterator[str]]
Command = Callable[[str, Lines, str], argparse.ArgumentParser]  # name, what it does, its line -> its parser


def add_data(parser: argparse.ArgumentParser) -> None:
    """Where benchmarks are read."""
    line = "folder with eval/... in LLaVA's layout (%(default)s)"
    parser.add_argument("--data", default=DATA, type=Path, metavar="DIR", help=line)


def add_out(parser: argparse.ArgumentParser) -> None:
    """Where runs are stored."""
    parser.add_argument("--out", default=OUT, type=Path, metavar="DIR", help="folder of results (%(default)s)")


def add_model(parser: argparse.ArgumentParser) -> None:
    """What is loaded."""
    parser.add_argument("--model", default=MODEL, help="checkpoint folder or hub name (%(default)s)")
    add_loading(parser)


def add_loading(parser: argparse.ArgumentParser) -> None:
    """How it is loaded."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, float16, bfloat16 (%(default)s)")
    parser.add_argument("--device-map", metavar="MAP", help="over all devices: auto, balanced, sequential (accelerate)")
    bits = parser.add_mutually_exclusive_group()
    for count in (4, 8):
        line = f"weights of {count} bits (bitsandbytes)"
        bits.add_argument(f"--load-{count}bit", dest="bits", action="store_const", const=count, help=line)
    parser.add_argument(
        "--attn", default="auto", metavar="KERNEL", help="sdpa, flash_attention_2, eager (the model's own)"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a model of the hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that the checkpoint carries")
    line = "option of the model's host; a wrong one lists what there is"
    parser.add_argument("--host-option", action="append", default=[], metavar="KEY=VALUE", help=line)
    line = "of tiles: stock, or 2880 for the paper's fixed 2 x 2 grid; short for --host-option layout=..."
    parser.add_argument("--layout", help=line)


def add_method(parser: argparse.ArgumentParser) -> None:
    """How tokens are reduced, and how the model is asked."""
    add_model(parser)
    parser.add_argument("--method", default="consensusdrop", help="see `llava-consensus list` (%(default)s)")
    parser.add_argument(
        "--tokens",
        default=64,
        type=number,
        help="visual tokens per image for the LLM (%(default)s), or a share of its own such as 0.1; not for full",
    )
    parser.add_argument("--merged", type=int, help="how many of them are merged ones (the paper's split)")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="option of the method")
    parser.add_argument("--conversation", help="template of the prompts (the model's own)")
    parser.add_argument("--max-new-tokens", type=int, help="bound on the answer's length (the benchmark's own, 128)")


def add_run(parser: argparse.ArgumentParser) -> None:
    """What is asked, where it is stored, and how it is carried out."""
    add_data(parser)
    parser.add_argument("--match", default="kept", help="tokens counts what is kept, entering, average or flops")
    add_out(parser)
    parser.add_argument("--limit", type=int, help="only the first questions")
    parser.add_argument("--batch", default=Execution.batch, type=int, help="questions answered together (%(default)s)")
    parser.add_argument(
        "--workers", default=Execution.workers, type=int, help="processes, each with its own model (%(default)s)"
    )
    parser.add_argument(
        "--engine", default=Execution.engine, help="where several workers are: local, ray (%(default)s)"
    )
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    parser.add_argument("--retry-errors", action="store_true", help="ask questions that failed before again")
    parser.add_argument(
        "--allow-outside",
        action="store_true",
        help="pictures may lie outside their folder: absolute, .., through links",
    )
    parser.add_argument(
        "--fail-on-error", metavar="N|SHARE", help="stop with exit code 6 if more questions fail: 5, 0.01, 1%%"
    )


def add_benchmark_option(parser: argparse.ArgumentParser) -> None:
    """An option of the benchmark."""
    line = "option of the benchmark, for example split=test; a wrong one lists what there is"
    parser.add_argument("--benchmark-option", action="append", default=[], metavar="KEY=VALUE", help=line)


def benchmark(name: str, given: argparse.Namespace) -> "Benchmark":
    """The benchmark called `name` with the options that were given."""
    from llava_consensus.evaluation import benchmarks

    return benchmarks.make(name, **_texts("--benchmark-option", given.benchmark_option, "split=test"))


def host_options(given: argparse.Namespace) -> dict[str, str]:
    """The options of the model's host that were given."""
    layout = {"layout": given.layout} if given.layout else {}
    return _texts("--host-option", given.host_option, "layout=2880") | layout


def method(given: argparse.Namespace) -> "Method":
    """The method with the options that were given."""
    from llava_consensus.methods import make

    return make(given.method, **options(given.option))


def one_word_method(text: str) -> "Method":
    """The method of one word: `NAME` or `NAME:key=value,key=value`.

    Raises:
        OptionError: for a text that is neither, or a method that is not there.
    """
    from llava_consensus.methods import make

    name, _, rest = text.partition(":")
    return make(name, **options(filter(None, rest.split(","))))


def number(text: str) -> int | float:
    """A whole number, or a fraction where the text has a point."""
    return int(text) if text.lstrip("+-").isdigit() else float(text)


def budget(given: argparse.Namespace) -> "Budget | Share":
    """The visual tokens of one picture, and how many of them are merged ones."""
    from llava_consensus.reduction import budget as budgets

    return budgets.budget(given.tokens, given.merged)


def budgets(text: str) -> "list[Budget | Share]":
    """The budgets of a text such as `192 64 0.1`."""
    from llava_consensus.reduction import budget as budgets

    try:
        return [budgets.budget(number(word)) for word in text.split()]
    except OptionError:
        raise
    except ValueError:
        raise OptionError(f"--tokens {text!r}: must be whole numbers or shares, such as '192 64 0.1'") from None


def loading(given: argparse.Namespace) -> "Loading":
    """How the model is loaded."""
    from llava_consensus.hosts import Loading

    return Loading(
        given.device,
        given.dtype,
        given.device_map,
        given.bits,
        given.attn,
        given.revision,
        given.trust_remote_code,
    )


def config(
    given: argparse.Namespace, benchmark: "Benchmark", method: "Method", budget: "Budget | Share | None" = None
) -> "RunConfig":
    """What is measured: a benchmark with a method, in the setting that was given."""
    from llava_consensus.evaluation.runs.configuration import RunConfig

    names = ("match", "model", "data", "limit")
    return RunConfig(
        benchmark,
        method,
        budget,
        loading=loading(given),
        host_options=host_options(given),
        **{name: getattr(given, name) for name in names},
    )


def execution(given: argparse.Namespace) -> Execution:
    """How a run is carried out."""
    return Execution(
        given.batch,
        given.workers,
        given.engine,
        not given.no_progress,
        given.retry_errors,
        given.fail_on_error,
        given.allow_outside,
    )


def options(pairs: Iterable[str]) -> dict[str, Any]:
    """`key=value` texts as options; a value is read as JSON where it is JSON (0.5, true, null), else as text.

    Raises:
        OptionError: for a text without a key or `=`.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise OptionError(f"option {pair!r} must be KEY=VALUE, for example alpha=0.5")
        try:
            found[key] = json.loads(value, parse_constant=str)  # NaN and Infinity are no JSON: text
        except (ValueError, RecursionError):
            found[key] = value
    return found


def _texts(argument: str, pairs: Iterable[str], example: str) -> dict[str, str]:
    """`key=value` texts of an argument as texts. OptionError for one without a key or a value."""
    for pair in pairs:
        key, _, value = pair.partition("=")
        if not key or not value:
            raise OptionError(f"{argument} {pair}: must be KEY=VALUE, for example {example}")
    return dict(pair.split("=", 1) for pair in pairs)
