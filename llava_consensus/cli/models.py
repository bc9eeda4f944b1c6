"""Commands about models: `convert`, a checkpoint in another layout; `check-host`, whether a host fits a model; and
`list`, what there is to choose from.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import Command
from llava_consensus.errors import ConsensusError

if TYPE_CHECKING:
    from llava_consensus.hosts.probe.checks import Finding

WORDS = {True: "pass", False: "FAIL", None: "n/a"}
WORKS = "works"


class HostError(ConsensusError):
    """A host does not do on this model what the model itself does."""

    exit_code = 7


def add(command: Command) -> None:
    """Adds the commands."""
    parser = command("convert", convert, "a LLaVA-1.5 or 1.6 checkpoint in Hugging Face's layout, and back")
    parser.add_argument("source", type=Path, metavar="CHECKPOINT", help="folder, in either layout")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder that is not there yet")
    parser = command("check-host", check_host, "try on a model whether methods are handed what it computes itself")
    parser.add_argument("model", metavar="MODEL", help="checkpoint folder or hub name")
    parser.add_argument("--method", default="consensusdrop", help="the one that is tried (%(default)s)")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="option of the method")
    arguments.add_loading(parser)
    parser = command("list", choices, "methods, hosts and benchmarks")
    parser.add_argument("--hosts", action="store_true", help="which method works on which host, and why not")
    parser.add_argument("--try", dest="again", action="store_true", help="with --hosts: try it with what is installed")


def convert(given: argparse.Namespace) -> Iterator[str]:
    """Says how many tensors were written and read back."""
    from llava_consensus.evaluation.models.convert import convert as write

    yield write(given.source.expanduser(), given.out.expanduser())


def choices(given: argparse.Namespace) -> Iterator[str]:
    """Every method, host and benchmark with a line about it, or the matrix of hosts and methods."""
    if given.hosts:
        yield from _matrix(given.again)
        return
    from llava_consensus.evaluation.benchmarks import known_benchmarks
    from llava_consensus.hosts import HOSTS
    from llava_consensus.methods import known_methods

    hosts = {name: host.line for name, host in HOSTS.items()}
    for title, entries in (("methods", known_methods()), ("hosts", hosts), ("benchmarks", known_benchmarks())):
        yield title
        yield from (f"  {name:14} {line}" for name, line in entries.items())


def _matrix(again: bool) -> Iterator[str]:
    """A line for each method, a column for each host; why a host refuses stands in numbered notes."""
    from llava_consensus.hosts import tried

    if again:
        from llava_consensus.hosts.matrix import cells

        refusals, version = cells(), ""
    else:
        refusals, version = (tried.read()[key] for key in ("cells", "transformers"))
    notes = dict.fromkeys(reason for host in refusals.values() for reason in host.values() if reason)
    numbers = {reason: f"[{number}]" for number, reason in enumerate(notes, 1)}
    widths = {host: max(len(host), len(WORKS)) for host in refusals}
    methods = list(next(iter(refusals.values())))
    first = max(map(len, methods))
    yield " " * first + "".join(f"  {host:{width}}" for host, width in widths.items()).rstrip()
    for method in methods:
        marks = (f"  {numbers.get(refusals[host][method], WORKS):{width}}" for host, width in widths.items())
        yield f"{method:{first}}" + "".join(marks).rstrip()
    yield from (f"{number} {reason}" for reason, number in numbers.items())
    if version:
        yield f"as tried with transformers {version}; --try tries it with what is installed here"


def check_host(given: argparse.Namespace) -> Iterator[str]:
    """A line for each check: passed or not, the largest difference and its bound.

    Raises:
        HostError: where a check failed.
    """
    from llava_consensus import hosts
    from llava_consensus.hosts.probe.checks import probe

    method, loading = arguments.method(given), arguments.loading(given)
    host_options = arguments.host_options(given)
    hosts.check(given.model, None, loading, host_options=host_options)
    host = hosts.load(given.model, loading, host_options)
    findings = probe(host, method)
    yield f"{'check':20} {'result':6} {'difference':>10} {'bound':>7}"
    yield from map(_line, findings)
    failed = sum(finding.passed is False for finding in findings)
    if failed:
        raise HostError(
            f"{failed} of {len(findings)} checks failed: numbers of this model with a method are not to be trusted. A "
            "model of another version than the host was written for is the usual reason"
        )


def _line(finding: "Finding") -> str:
    numbers = ["" if value is None else f"{value:.1g}" for value in (finding.difference, finding.bound)]
    line = f"{finding.check:20} {WORDS[finding.passed]:6} {numbers[0]:>10} {numbers[1]:>7}  {finding.note}"
    return line.rstrip()
