"""The commands `list`, what there is to choose from; `data`, which brings and checks the files of benchmarks; and
`model`, which converts a checkpoint and checks that methods are handed what a model computes.
"""

import argparse
import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import arg, command
from llava_consensus.errors import ConsensusError, DataError, Interrupted, OptionError, unknown_name
from llava_consensus.evaluation.runs import DATA

if TYPE_CHECKING:
    from llava_consensus.evaluation.data.sources import Source
    from llava_consensus.evaluation.models.check_host import Finding
    from llava_consensus.reduction.method import Method

SHAPE, TOKENS, WIDTH = "llava-1.5-7b", 64, 100
BASE = "llava_consensus.reduction."  # what a method does not write itself, it has from there
WORDS = {True: "pass", False: "FAIL", None: "n/a"}
WORKS = "works"
OFFICIAL = Path("playground/data")
DOWNLOADS = "downloads"  # folder in DATA of what is fetched and not unpacked yet
DONE = ".done"


class HostError(ConsensusError):
    """A host does not do on this model what the model itself does."""

    exit_code = 7


@command(
    "list",
    "methods, hosts and benchmarks; or everything about one method",
    arg("what", nargs="?", metavar="WHAT", help="methods, hosts, benchmarks, or a method: its options, cost, paper"),
    arg("--hosts", action="store_true", help="which method works on which host, and why not"),
    examples=("list", "list methods", "list consensusdrop", "list --hosts"),
)
def choices(given: argparse.Namespace) -> Iterator[str]:
    """Every method, host and benchmark with a line about it, one kind of them, one method, or the matrix."""
    if given.hosts:
        yield from _matrix()
        return
    from llava_consensus.evaluation.benchmarks import known_benchmarks
    from llava_consensus.hosts import known_hosts
    from llava_consensus.methods import known_methods, method_class

    kinds = {
        "methods": known_methods(),
        "hosts": {name: host.line for name, host in known_hosts().items()},
        "benchmarks": known_benchmarks(),
    }
    if given.what in kinds:
        yield from (f"{name:14} {line}" for name, line in kinds[given.what].items())
    elif given.what:
        if given.what not in kinds["methods"]:
            raise unknown_name("method", given.what, [*kinds, *kinds["methods"]])
        yield from _about(given.what, method_class(given.what))
    else:
        for title, entries in kinds.items():
            yield title
            yield from (f"  {name:14} {line}" for name, line in entries.items())


def _about(name: str, method: "type[Method]") -> Iterator[str]:
    """What a method does, as its file says: idea, paper, and what differs; its options, and its cost."""
    from llava_consensus.methods import options

    yield f"{name}, acts here: {method.place.value}"
    for paragraph in paragraphs(method):
        yield "\n" + textwrap.fill(paragraph, WIDTH)
    found = options(method)
    yield "\noptions, each with its default:" if found else "\noptions: none"
    for one in found:
        text = textwrap.fill(one.text, WIDTH, initial_indent="      ", subsequent_indent="      ")
        yield f"  {one.name}={one.default}\n{text}"
    if found:
        yield f"give them as: --method {name} --option {found[0].name}={found[0].default}"
    yield "\ncost of one picture, FLOPs, two for each multiply-add (docs/accounting.md):"
    for title, words, body in formulas(method):
        yield textwrap.indent(f"{title}: {words}\n{textwrap.indent(body, '    ')}", "  ")
    yield comes_to(method)


def paragraphs(method: "type[Method]") -> Iterator[str]:
    """The summary of a method's class, then the paragraphs of its file, a line each."""
    summary = inspect.cleandoc(method.__doc__ or "").split("\n\n")[0]
    page = inspect.cleandoc(sys.modules[method.__module__].__doc__ or "")
    for paragraph in (summary, *page.split("\n\n")):
        yield " ".join(paragraph.split())


def formulas(method: "type[Method]") -> Iterator[tuple[str, str, str]]:
    """What a method says of its cost: name of the function, what it is, and its lines as they are written."""
    for name in ("entering", "vision_tokens", "flops"):
        function = getattr(method, name)
        if function.__module__.startswith(BASE) and name != "flops":
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        assert isinstance(node, ast.FunctionDef)
        said = ast.get_docstring(node)
        words = " ".join((said or "").split("\n\n")[0].split())  # without its `Raises`
        yield name, words, "\n".join(ast.unparse(line) for line in node.body[bool(said) :])


def comes_to(method: "type[Method]") -> str:
    """The formulas on the model of the paper, in a line."""
    from llava_consensus.reduction.budget import Budget
    from llava_consensus.reduction.costs import SHAPES, account

    found = account(method(), Budget(TOKENS), SHAPES[SHAPE])
    if found.flops.method is None or found.flops.total is None:
        return f"on {SHAPE} at {TOKENS} tokens: not known ({found.note})"
    own, total = found.flops.method / 1e9, found.flops.total / 1e12
    return f"on {SHAPE} at {TOKENS} tokens: {own:.3g} GFLOP of its own, {total:.3g} TFLOP in all"


def _matrix() -> Iterator[str]:
    """A line for each method, a column for each host; why a host refuses stands in numbered notes."""
    from llava_consensus.hosts.matrix import cells, keeping

    refusals = cells()
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
    yield f"positions are kept, as they have three axes, on {', '.join(keeping())}; positions=renumber is refused there"


@command(
    "data mini",
    "put the embedded model and its benchmarks into a folder to work in",
    arg("--to", type=Path, default=Path(), metavar="DIR", help="that folder (the current one)"),
    examples=("data mini", "data mini --to ~/llava-mini"),
)
def fetch_mini(given: argparse.Namespace) -> Iterator[str]:
    """Copies, generates, and says what to type next."""
    from llava_consensus.evaluation.data import mini

    folder = given.to.expanduser()
    checkpoint, playground = mini.copy(folder)
    yield f"model: {checkpoint}"
    yield f"benchmarks are generated from test scenes, which takes seconds: {playground / 'eval'}"
    mini.generate(folder)
    yield f"{f'cd {folder} && ' if folder != Path() else ''}llava-consensus eval gqa --tokens 64 --sample 60"


@command(
    "data download",
    "fetch official files of benchmarks: resumed, checked, unpacked",
    arg("names", nargs="+", metavar="BENCHMARK", help="or all"),
    arg("--data", default=OFFICIAL, type=Path, metavar="DIR", help="folder that gets eval/... (%(default)s)"),
    arg("--yes", action="store_true", help="the licences are read and accepted: do not ask"),
    arg("--keep", action="store_true", help="keep archives that are unpacked"),
    examples=("data download pope --data playground/data", "data download all --yes"),
)
def download_data(given: argparse.Namespace) -> Iterator[str]:
    """Licences and sizes, then every file; at the end what `data check` says of each benchmark."""
    from llava_consensus.evaluation import benchmarks
    from llava_consensus.evaluation.benchmarks.check import check
    from llava_consensus.evaluation.data.sources import BY_HAND, SOURCES

    names = _chosen(given.names)
    todo = list(dict.fromkeys(source for name in names for source in SOURCES[name]))
    yield from _plan(names, todo, given.data)
    _agree(given.yes)
    for number, source in enumerate(todo, 1):
        yield f"[{number}/{len(todo)}] {_bring(source, given.data, given.keep)}"
    unready = []
    for name in names:
        found = list(check(benchmarks.make(name), given.data))
        yield from (name, *(f"  {one.state:8} {one.text}" for one in found))
        unready += [name] if any(one.state.startswith("missing") for one in found) else []
        if name in BY_HAND:
            yield f"  by hand: {BY_HAND[name]}"
    if unready:
        raise DataError(f"something is missing still of {', '.join(unready)}: it is named above")


def _chosen(given: Sequence[str]) -> list[str]:
    """The benchmarks that are meant. OptionError for one that is not there."""
    from llava_consensus.evaluation.benchmarks import BENCHMARKS
    from llava_consensus.evaluation.data.sources import SOURCES

    for name in given:
        if name != "all" and name not in SOURCES:
            raise unknown_name("benchmark", name, [*SOURCES, "all"])
    return [name for name in BENCHMARKS if name in SOURCES and (name in given or "all" in given)]


def _plan(names: Sequence[str], todo: "Sequence[Source]", data: Path) -> Iterator[str]:
    """The licence of each benchmark, and what will be fetched."""
    from llava_consensus.evaluation.benchmarks import BENCHMARKS

    yield "licences:"
    yield from (f"  {name:11} {BENCHMARKS[name].licence or 'not stated'}" for name in names)
    yield f"to be fetched into {data}:"
    for source in todo:
        state = "here already" if _done(source, data).exists() else source.size or "size as its server says"
        yield f"  {source.name:28} {state:24} {source.url}"


def _agree(yes: bool) -> None:
    """Asks whether to go on. OptionError where nobody can be asked; Interrupted where the answer is no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise OptionError("--yes: say it when the licences above are read and accepted; nobody can be asked here")
    print("Are the licences accepted, and shall it be fetched? [y/N] ", end="", flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Interrupted("nothing was fetched")


def _done(source: "Source", data: Path) -> Path:
    return data / DOWNLOADS / f"{source.name}{DONE}"


def _bring(source: "Source", data: Path, keep: bool) -> str:
    """Fetches and unpacks one file; what became of it."""
    from llava_consensus.evaluation.data.transfer import fetch, mark
    from llava_consensus.evaluation.data.unpack import unpack

    done, folder = _done(source, data), data / "eval" / source.to
    if done.exists():
        return f"{source.name}: here already"
    if not source.name.endswith(".zip"):
        fetch(source.url, folder / source.name, source.md5)
        done.parent.mkdir(parents=True, exist_ok=True)
        mark(done, source.url)
        return f"{source.name}: {folder / source.name}"
    archive = data / DOWNLOADS / source.name
    fetch(source.url, archive, source.md5)
    count = unpack(archive, folder, source.only, source.without)
    mark(done, source.url)
    if not keep:
        archive.unlink()
    return f"{source.name}: {count:,} files below {folder}"


@command(
    "data check",
    "which files are there, which are missing and where they come from",
    arg("names", nargs="*", metavar="BENCHMARK", help="all of them by default"),
    arguments.DATA_DIR,
    arguments.BENCHMARK_OPTION,
    examples=("data check --data playground/data", "data check gqa pope --data playground/data"),
)
def check_data(given: argparse.Namespace) -> Iterator[str]:
    """One block for each benchmark; DataError at the end if one that was named is not ready for all it can be."""
    from llava_consensus.evaluation import benchmarks
    from llava_consensus.evaluation.benchmarks.check import check, uses

    unready = []
    for name in given.names or benchmarks.BENCHMARKS:
        benchmark = arguments.benchmark(name, given)
        yield f"{name}: {benchmark.licence or 'licence not noted'}"
        findings = list(check(benchmark, given.data))
        for one in findings:
            yield f"  {one.state:8} " + one.text.replace("\n", "\n           ")
        states = uses(benchmark, given.data, findings)
        yield "  " + "; ".join(f"{use}: {state}" for use, state in states.items())
        unready += [name] if "not ready" in states.values() else []
    if unready and given.data != Path(DATA):
        yield f"official files are fetched by: llava-consensus data download {' '.join(unready)} --data {given.data}"
    if unready and given.names:
        raise DataError(f"not ready: {', '.join(unready)}. What is missing and where it comes from is said above")


@command(
    "model convert",
    "a LLaVA-1.5 or 1.6 checkpoint in Hugging Face's layout, and back",
    arg("source", type=Path, metavar="CHECKPOINT", help="folder, in either layout"),
    arg("out", type=Path, metavar="OUT", help="folder that is not there yet"),
    examples=("model convert checkpoints/llava-mini checkpoints/llava-mini-hf",),
)
def convert(given: argparse.Namespace) -> Iterator[str]:
    """Says how many tensors were written and read back."""
    from llava_consensus.evaluation.models.convert import convert as write

    yield write(given.source.expanduser(), given.out.expanduser())


@command(
    "model check",
    "try on a model whether methods are handed what it computes itself",
    arg("model", metavar="MODEL", help="checkpoint folder or hub name"),
    arguments.METHOD,
    arguments.OPTION,
    *arguments.LOADING,
    examples=("model check checkpoints/llava-mini",),
)
def check_host(given: argparse.Namespace) -> Iterator[str]:
    """A line for each check: passed or not, the largest difference and its bound.

    Raises:
        HostError: where a check failed.
    """
    from llava_consensus.evaluation.models.check_host import findings

    method = arguments.method(given)
    found = findings(arguments.load(given), method)
    yield f"{'check':20} {'result':6} {'difference':>10} {'bound':>7}"
    yield from map(_line, found)
    failed = sum(finding.passed is False for finding in found)
    if failed:
        raise HostError(
            f"{failed} of {len(found)} checks failed: numbers of this model with a method are not to be trusted. A "
            "model of another version than the host was written for is the usual reason"
        )


def _line(finding: "Finding") -> str:
    numbers = ["" if value is None else f"{value:.1g}" for value in (finding.difference, finding.bound)]
    line = f"{finding.check:20} {WORDS[finding.passed]:6} {numbers[0]:>10} {numbers[1]:>7}  {finding.note}"
    return line.rstrip()
