"""Arguments that several commands share, with their defaults."""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

from llava_consensus.errors import OptionError

Lines = Callable[[argparse.Namespace], Iterator[str]]
Command = Callable[[str, Lines, str], argparse.ArgumentParser]  # name, what it does, its line -> its parser

MODEL, DATA, OUT = "checkpoints/llava-mini", "playground/mini", "results"


def data(parser: argparse.ArgumentParser) -> None:
    """Where benchmarks are read."""
    parser.add_argument(
        "--data", default=DATA, metavar="DIR", help="folder with eval/... in LLaVA's layout (%(default)s)"
    )


def load(parser: argparse.ArgumentParser) -> None:
    """What is loaded."""
    parser.add_argument("--model", default=MODEL, help="checkpoint folder or hub name (%(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N (%(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, float16, bfloat16 (%(default)s)")


def method(parser: argparse.ArgumentParser) -> None:
    """How tokens are reduced, and how the model is asked."""
    load(parser)
    parser.add_argument("--method", default="consensusdrop", help="see `llava-consensus list` (%(default)s)")
    parser.add_argument("--tokens", default=64, type=int, help="visual tokens per image for the LLM (%(default)s)")
    parser.add_argument("--merged", type=int, help="how many of them are merged ones (the paper's split)")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="option of the method")
    parser.add_argument("--conversation", help="LLaVA's conversation template (the benchmark's own, vicuna_v1)")
    parser.add_argument("--max-new-tokens", type=int, help="bound on the answer's length (the benchmark's own, 128)")


def run(parser: argparse.ArgumentParser) -> None:
    """What is asked, where it is stored, and how fast."""
    data(parser)
    parser.add_argument("--match", default="kept", help="tokens counts what is kept, entering, average or flops")
    parser.add_argument("--out", default=OUT, type=Path, help="folder of results (%(default)s)")
    parser.add_argument("--limit", type=int, help="only the first questions")
    parser.add_argument("--batch", default=16, type=int, help="questions answered together (%(default)s)")
    parser.add_argument("--workers", default=1, type=int, help="processes, each with its own model (%(default)s)")
    parser.add_argument("--engine", default="local", help="where several workers are: local, ray (%(default)s)")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")


def choice(parser: argparse.ArgumentParser) -> None:
    """An option of the benchmark."""
    help_line = "option of the benchmark, for example split=test; a wrong one lists what there is"
    parser.add_argument("--benchmark-option", action="append", default=[], metavar="KEY=VALUE", help=help_line)


def choices(pairs: list[str]) -> dict[str, str]:
    """`key=value` texts as options of a benchmark."""
    found = dict(pair.partition("=")[::2] for pair in pairs)
    for name, value in found.items():
        if not name or not value:
            raise OptionError(f"--benchmark-option {name}={value}: must be KEY=VALUE, for example split=test")
    return found
