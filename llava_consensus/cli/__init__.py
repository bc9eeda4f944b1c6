"""The front door: arguments in, one call, numbers out.

    llava-consensus eval gqa --tokens 64                  accuracy on a benchmark; go on, or read what is complete
    llava-consensus score gqa --answers FILE --data DIR   score any LLaVA answer file (--json: everything measured)
    llava-consensus export vqav2 --answers FILE --out FILE   what the official server takes
    llava-consensus check-data [NAME...] --data DIR       what is there, what is missing and where it comes from
    llava-consensus ask PICTURE QUESTION --overlay o.png  one answer, its tokens and times, and what was kept
    llava-consensus judge mmvet --answers FILE ...        grades by a judge model; a rerun asks nothing again
    llava-consensus report --write docs/results.md        the tables of all results
    llava-consensus compare RUN_A RUN_B                   two runs, question by question: difference, interval, p
    llava-consensus convert CHECKPOINT OUT                a LLaVA checkpoint in Hugging Face's layout, and back
    llava-consensus list                                  methods, hosts, benchmarks

Whatever a user can mend ends with `error: ...` and the exit code of its kind (`errors.py`). Nothing heavy is imported
before it is needed.
"""

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence

from llava_consensus.cli import ask, evaluate, files, judge, models, tables
from llava_consensus.cli.arguments import Lines
from llava_consensus.errors import ConsensusError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    given = _parser().parse_args(argv)
    _tell()
    try:
        for line in given.lines(given):
            print(line, flush=True)
    except ConsensusError as error:
        print(f"error: {error}" if error.exit_code != 130 else str(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llava-consensus", description="Fewer visual tokens for vision-language models, measured."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, lines: Lines, line: str) -> argparse.ArgumentParser:
        one: argparse.ArgumentParser = commands.add_parser(name, help=line, description=line)
        one.set_defaults(lines=lines)
        return one

    for group in (evaluate, files, judge, ask, tables, models):
        group.add(command)
    command("list", _list, "methods, hosts and benchmarks")
    return parser


def _tell() -> None:
    """Messages of the package go to stderr as they are; standard output is for results."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its hints are about packages we do not need
    logger = logging.getLogger("llava_consensus")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


def _list(given: argparse.Namespace) -> Iterator[str]:
    from llava_consensus.benchmarks import BENCHMARKS
    from llava_consensus.hosts import HOSTS
    from llava_consensus.methods import known_methods

    hosts = {name: host.line for name, host in HOSTS.items()}
    benchmarks = {name: benchmark.line for name, benchmark in BENCHMARKS.items()}
    for title, entries in (("methods", known_methods()), ("hosts", hosts), ("benchmarks", benchmarks)):
        yield title
        yield from (f"  {name:14} {line}" for name, line in entries.items())
