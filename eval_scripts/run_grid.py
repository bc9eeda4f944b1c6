"""Every run behind the results table, one after another: benchmarks x the line-up x budgets, and with all tokens.

Run: `make tables`, or `python eval_scripts/run_grid.py --tokens 192 64 --benchmarks gqa`. A complete run is not asked
again, and a stopped grid goes on where it was.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

from llava_consensus import cli
from llava_consensus.report.table import LINEUP, Variant

FULL = Variant("all tokens", "full")


def commands(arguments: argparse.Namespace) -> Iterator[list[str]]:
    """The arguments of every `llava-consensus eval`, in order: all tokens first, then from many tokens to few."""
    shared = ["--model", arguments.model, "--data", arguments.data, "--out", arguments.out, "--batch", arguments.batch]
    shared += ["--limit", arguments.limit] if arguments.limit else []
    for benchmark in arguments.benchmarks:
        for tokens in sorted(map(int, arguments.tokens), reverse=True):
            variants = [FULL] if tokens >= arguments.all else LINEUP
            for one in variants:
                options = [part for key, value in one.options.items() for part in ("--option", f"{key}={value}")]
                yield ["eval", benchmark, "--method", one.method, "--tokens", str(tokens), *options, *shared]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the grid; stops at the first run that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=cli.MODEL)
    parser.add_argument("--data", default=cli.DATA)
    parser.add_argument("--out", default=cli.OUT)
    parser.add_argument("--batch", default="16")
    parser.add_argument("--limit")
    parser.add_argument("--benchmarks", nargs="+", default=["gqa", "pope", "textvqa"])
    parser.add_argument("--tokens", nargs="+", default=["576", "192", "128", "64", "32"])
    parser.add_argument("--all", type=int, default=576, help="from this budget on it is the full model, asked once")
    grid = list(commands(parser.parse_args(argv)))
    for number, command in enumerate(grid, 1):
        print(f"\n[{number}/{len(grid)}] llava-consensus {' '.join(command)}", flush=True)
        code = cli.main(command)
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
