"""The commands `list`, what there is to choose from; `data`, which brings and checks the files of benchmarks; and
`model`, which converts a checkpoint and checks that methods are handed what a model computes.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llava_consensus.cli import arguments, terminal
from llava_consensus.cli.arguments import arg, command
from llava_consensus.errors import ConsensusError, DataError, Interrupted, OptionError, any_case, unknown_name
from llava_consensus.evaluation.runs import DATA

if TYPE_CHECKING:
    from llava_consensus.evaluation.data.sources import Source

WIDTH = 100
WORKS = "works"
OFFICIAL = Path("playground/data")
DOWNLOADS = "downloads"  # folder in DATA of what is fetched and not unpacked yet
DONE = ".done"


class HostError(ConsensusError):
    """A host does not do on this model what the model itself does."""

    exit_code = 7


@command(
    "list",
    arg(
        "what",
        nargs="?",
        metavar="WHAT",
        names="lists",
        help="methods, hosts, benchmarks, or a method: its options, cost, paper",
    ),
    arg("--hosts", action="store_true", help="how many methods work on each host"),
    arg("--host", metavar="NAME", help="which methods work on this host, and why the others do not"),
    arg("--csv", action="store_true", help="with --hosts: every method and host"),
    arguments.JSON,
    examples=("list", "list methods", "list consensusdrop", "list --host qwen2.5-vl", "list --hosts --csv"),
)
def choices(given: argparse.Namespace) -> Iterator[str]:
    """Methods, hosts and benchmarks; or everything about one method."""
    if given.hosts or given.host is not None:
        yield from _hosts(given)
        return
    from llava_consensus.evaluation.benchmarks import known_benchmarks
    from llava_consensus.hosts import OTHER, known_hosts
    from llava_consensus.methods import PLUS, known_methods

    lists = known_methods(), {name: host.line for name, host in known_hosts().items()}, known_benchmarks()
    kinds = dict(zip(arguments.KINDS, lists, strict=True))
    if given.what and given.what not in kinds:
        name = any_case(given.what, kinds["methods"])
        if name not in kinds["methods"] and not PLUS.search(name):
            raise unknown_name("method", given.what, [*kinds, *kinds["methods"]])
        yield from _about(name, given.json)
    elif given.json:
        yield json.dumps(kinds.get(given.what, kinds), indent=1)
    elif given.what:
        yield from (terminal.wrapped(f"{name:14} {line}") for name, line in kinds[given.what].items())
        if given.what == "hosts":
            yield terminal.wrapped(
                f"{'other':14} {OTHER.line}; a budget is per tile, as the grouping of tiles is not known"
            )
    else:
        for title, entries in kinds.items():
            yield title
            yield from (terminal.wrapped(f"  {name:14} {line}", " " * 6) for name, line in entries.items())


def _about(name: str, as_json: bool) -> Iterator[str]:
    from llava_consensus.methods import about

    described = about(name)
    if as_json:
        found = {"method": name, "acts": described.place, "about": described.paragraphs}
        options = [one._asdict() for one in described.options]
        yield json.dumps({**found, "options": options, "counted": described.counted, "cost": described.cost}, indent=1)
        return
    yield terminal.wrapped(f"{name}, acts here: {described.place}")
    for paragraph in described.paragraphs:
        yield "\n" + terminal.wrapped(paragraph, "", WIDTH)
    yield "\noptions, each with its default:" if described.options else "\noptions: none"
    for one in described.options:
        values = f"  ({one.values})" if one.values else ""
        yield terminal.wrapped(f"  {one.name}={one.default}{values}", " " * 6, WIDTH)
        yield terminal.wrapped(" " * 6 + one.text, " " * 6, WIDTH)
    if described.options:
        first = described.options[0]
        yield terminal.wrapped(f"give them as: --method {name} --option {first.name}={first.default}")
    yield "\n" + terminal.wrapped("cost of one image, FLOPs, two for each multiply-add (docs/accounting.md):")
    yield from (
        terminal.wrapped(f"  {function}: {counted}", most=WIDTH) for function, counted in described.counted.items()
    )
    yield terminal.wrapped(f"  {described.cost}")


def _hosts(given: argparse.Namespace) -> Iterator[str]:
    """A line for each host, everything about one of them, or the whole matrix as CSV or JSON."""
    from llava_consensus.hosts import known_hosts
    from llava_consensus.hosts.matrix import UNTRIED, cells, keeping, otherwise, refusals

    hosts = known_hosts()
    if given.host is not None:
        name = any_case(given.host, hosts)
        if name not in hosts:
            raise unknown_name("host", given.host, list(hosts))
        yield from _host(name, hosts[name].line, refusals(name), keeping(), otherwise())
        return
    refused = cells()
    if given.json:
        yield json.dumps({"refused": refused, "keep_positions": keeping(), "read_otherwise": otherwise()}, indent=1)
        return
    tried = {host: {name: why * (why != UNTRIED) for name, why in own.items()} for host, own in refused.items()}
    if given.csv:
        yield ",".join(("method", *tried))
        for method in next(iter(tried.values())):
            yield ",".join((method, *("no" if tried[host][method] else WORKS for host in tried)))
        return
    for host, reasons in tried.items():
        missing = [method for method, reason in reasons.items() if reason]
        without = f" without {', '.join(missing)}" if 0 < len(missing) <= 6 else ""
        note = ", tried only on copies of the code that the checkpoint carries" if hosts[host].remote else ""
        yield terminal.wrapped(f"{host:16} {len(reasons) - len(missing)} of {len(reasons)} methods{without}{note}")
    yield terminal.wrapped("why a method does not work on one of them: llava-consensus list --host NAME")


def _host(
    name: str, line: str, reasons: dict[str, str], keeping: list[str], otherwise: dict[str, list[str]]
) -> Iterator[str]:
    """Which methods work on a host, and why the others do not."""
    yield f"{name}: {line}"
    yield terminal.wrapped(f"works: {', '.join(method for method, reason in reasons.items() if not reason)}")
    for reason in dict.fromkeys(filter(None, reasons.values())):
        methods = [method for method, why in reasons.items() if why == reason]
        yield terminal.wrapped(f"{', '.join(methods)}: {reason}")
    if name in keeping:
        yield terminal.wrapped("positions: kept, as they have three axes; positions=renumber is refused")
    if others := [method for method, hosts in otherwise.items() if name in hosts]:
        yield terminal.wrapped(f"read something else than on LLaVA (llava-consensus list METHOD): {', '.join(others)}")


@command(
    "data mini",
    arg("--to", type=Path, default=Path(), metavar="DIR", help="that folder (the current one)"),
    examples=("data mini", "data mini --to ~/llava-mini"),
)
def fetch_mini(given: argparse.Namespace) -> Iterator[str]:
    """Put the embedded model and its benchmarks into a folder to work in."""
    from llava_consensus.evaluation.data import mini

    folder = given.to.expanduser()
    checkpoint, playground = mini.copy(folder)
    yield f"model: {checkpoint}"
    yield f"benchmarks are generated from test scenes, which takes seconds: {playground / 'eval'}"
    mini.generate(folder)
    yield f"{f'cd {folder} && ' if folder != Path() else ''}llava-consensus eval gqa --tokens 64 --sample 60"


@command(
    "data download",
    arg("names", nargs="+", metavar="BENCHMARK", names="benchmarks", help="or all"),
    arg("--data", default=OFFICIAL, type=Path, metavar="DIR", help="folder that gets eval/... (%(default)s)"),
    arg("--yes", action="store_true", help="the licences are read and accepted: do not ask"),
    arg("--keep", action="store_true", help="keep archives that are unpacked"),
    examples=("data download pope --data playground/data", "data download all --yes"),
)
def download_data(given: argparse.Namespace) -> Iterator[str]:
    """Fetch official files of benchmarks: resumed, checked, unpacked."""
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
    from llava_consensus.evaluation.benchmarks import BENCHMARKS
    from llava_consensus.evaluation.data.sources import SOURCES

    for name in given:
        if name != "all" and name not in SOURCES:
            raise unknown_name("benchmark", name, [*SOURCES, "all"])
    return [name for name in BENCHMARKS if name in SOURCES and (name in given or "all" in given)]


def _plan(names: Sequence[str], todo: "Sequence[Source]", data: Path) -> Iterator[str]:
    from llava_consensus.evaluation.benchmarks import BENCHMARKS

    yield "licences:"
    yield from (f"  {name:11} {BENCHMARKS[name].licence or 'not stated'}" for name in names)
    yield f"to be fetched into {data}:"
    for source in todo:
        state = "here already" if _done(source, data).exists() else source.size or "size as its server says"
        yield f"  {source.name:28} {state:24} {source.url}"


def _agree(yes: bool) -> None:
    """Asks for consent. OptionError without a terminal; Interrupted if the answer is no."""
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
    from llava_consensus.evaluation.data.transfer import fetch
    from llava_consensus.evaluation.data.unpack import unpack
    from llava_consensus.evaluation.files import replace

    done, folder = _done(source, data), data / "eval" / source.to
    if done.exists():
        return f"{source.name}: here already"
    if not source.name.endswith(".zip"):
        fetch(source.url, folder / source.name, source.md5)
        done.parent.mkdir(parents=True, exist_ok=True)
        replace(done, source.url.encode())
        return f"{source.name}: {folder / source.name}"
    archive = data / DOWNLOADS / source.name
    fetch(source.url, archive, source.md5)
    count = unpack(archive, folder, source.only, source.without)
    replace(done, source.url.encode())
    if not keep:
        archive.unlink()
    return f"{source.name}: {count:,} files below {folder}"


@command(
    "data check",
    arg("names", nargs="*", metavar="BENCHMARK", names="benchmarks", help="all of them by default"),
    arguments.DATA_DIR,
    arguments.BENCHMARK_OPTION,
    arguments.JSON,
    examples=("data check --data playground/data", "data check gqa pope --data playground/data --json"),
)
def check_data(given: argparse.Namespace) -> Iterator[str]:
    """Which files are there, which are missing and where they come from."""
    from llava_consensus.evaluation import benchmarks
    from llava_consensus.evaluation.benchmarks.check import check, uses

    unready, found = [], {}
    for name in given.names or benchmarks.known_benchmarks():
        benchmark = arguments.benchmark(name, given)
        findings = list(check(benchmark, given.data))
        states = uses(benchmark, given.data, findings)
        unready += [name] if "not ready" in states.values() else []
        found[name] = {"licence": benchmark.licence, "uses": states, "files": [one._asdict() for one in findings]}
        if not given.json:
            yield f"{name}: {benchmark.licence or 'licence not noted'}"
            for one in findings:
                yield f"  {one.state:8} " + one.text.replace("\n", "\n           ")
            yield "  " + "; ".join(f"{use}: {state}" for use, state in states.items())
    if given.json:
        yield json.dumps(found, indent=1)
    elif unready and given.data != Path(DATA):
        yield f"official files are fetched by: llava-consensus data download {' '.join(unready)} --data {given.data}"
    if unready and given.names:
        raise DataError(f"not ready: {', '.join(unready)}. What is missing and where it comes from is said above")


@command(
    "model convert",
    arg("source", type=Path, metavar="CHECKPOINT", help="folder, in either layout"),
    arg("out", type=Path, metavar="OUT", help="folder that is not there yet"),
    examples=("model convert checkpoints/llava-mini checkpoints/llava-mini-hf",),
)
def convert(given: argparse.Namespace) -> Iterator[str]:
    """A LLaVA-1.5 or 1.6 checkpoint in Hugging Face's layout, and back."""
    from llava_consensus.evaluation.models.convert import convert as write

    yield write(given.source.expanduser(), given.out.expanduser())


@command(
    "model merge",
    arg("lora", type=Path, metavar="LORA", help="folder with adapter_config.json"),
    arg("base", type=Path, metavar="BASE", help="folder of the model that was adapted"),
    arg("out", type=Path, metavar="OUT", help="folder that is not there yet"),
    examples=("model merge llava-v1.5-7b-lora vicuna-7b-v1.5 llava-v1.5-7b-merged",),
)
def merge(given: argparse.Namespace) -> Iterator[str]:
    """A LoRA checkpoint of LLaVA and its base, as one checkpoint."""
    from llava_consensus.evaluation.models.merge import merge as write

    yield write(given.lora.expanduser(), given.base.expanduser(), given.out.expanduser())


@command(
    "model check",
    arg("model", metavar="MODEL", help="checkpoint folder or hub name"),
    arguments.METHOD,
    arguments.OPTION,
    *arguments.LOADING,
    examples=("model check checkpoints/llava-mini",),
)
def check_host(given: argparse.Namespace) -> Iterator[str]:
    """Try on a model whether methods are handed what it computes itself."""
    from llava_consensus.evaluation.models.check_host import findings

    method = arguments.method(given)
    found = findings(arguments.load(given), method)
    yield f"{'check':20} {'result':6} {'difference':>10} {'bound':>7}"
    for name, passed, *numbers, note in found:
        shown = ["" if value is None else f"{value:.1g}" for value in numbers]
        yield f"{name:20} {'pass' if passed else 'FAIL':6} {shown[0]:>10} {shown[1]:>7}  {note}".rstrip()
    failed = sum(not finding.passed for finding in found)
    if failed:
        raise HostError(
            f"{failed} of {len(found)} checks failed: numbers of this model with a method are not to be trusted. A "
            "model of another version than the host was written for is the usual reason"
        )
