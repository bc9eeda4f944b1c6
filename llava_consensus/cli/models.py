"""The commands `list` (methods, hosts, benchmarks), `data` (files of benchmarks) and `model` (checkpoints)."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import arg, command
from llava_consensus.errors import ConsensusError, DataError, OptionError, unknown_name
from llava_consensus.evaluation.benchmarks import BENCHMARKS, known_benchmarks
from llava_consensus.evaluation.benchmarks.check import check, uses
from llava_consensus.evaluation.data.sources import BY_HAND, SOURCES, Source
from llava_consensus.evaluation.data.transfer import fetch
from llava_consensus.evaluation.data.unpack import unpack
from llava_consensus.evaluation.files import replace
from llava_consensus.evaluation.runs import DATA
from llava_consensus.hosts import CROSS, OTHER, known_hosts
from llava_consensus.methods import PLUS, about, known_methods

OFFICIAL = Path("playground/data")
DOWNLOADS = "downloads"  # folder in DATA of files that are fetched and not unpacked yet
DONE = ".done"


class HostError(ConsensusError):
    exit_code = 7


@command(
    "list",
    arg("what", nargs="?", metavar="WHAT", help="methods, hosts, benchmarks, or a method: its options, cost, paper"),
    arg("--hosts", action="store_true", help="how many methods work on each host"),
    arg("--host", metavar="NAME", help="which methods work on this host, and why the others do not"),
    examples=("list", "list methods", "list consensusdrop", "list --host qwen2.5-vl", "list --hosts"),
)
def choices(given: argparse.Namespace) -> Iterator[str]:
    """Methods, hosts and benchmarks; or everything about one method."""
    if given.hosts or given.host is not None:
        yield from _hosts() if given.host is None else _host(given.host)
        return
    hosts = {name: host.line for name, host in known_hosts().items()}
    kinds = {"methods": known_methods(), "hosts": hosts, "benchmarks": known_benchmarks()}
    if given.what and given.what not in kinds:
        if given.what not in kinds["methods"] and not PLUS.search(given.what):
            raise unknown_name("method", given.what, [*kinds, *kinds["methods"]])
        yield from _about(given.what)
    elif given.what:
        yield from (f"{name:14} {line}" for name, line in kinds[given.what].items())
        if given.what == "hosts":
            yield f"{'cross':14} {CROSS.line}: {', '.join(CROSS.types)}"
            yield f"{'other':14} {OTHER.line}; a budget is per tile, as the grouping of tiles is not known"
    else:
        for title, entries in kinds.items():
            yield title
            yield from (f"  {name:14} {line}" for name, line in entries.items())


def _about(name: str) -> Iterator[str]:
    described = about(name)
    yield f"{name}, acts here: {described.place}"
    yield from (f"\n{paragraph}" for paragraph in described.paragraphs)
    yield "\noptions, each with its default:" if described.options else "\noptions: none"
    for one in described.options:
        values = f"  ({one.values})" if one.values else ""
        yield f"  {one.name}={one.default}{values}\n      {one.text}"
    yield "\ncost of one image, FLOPs, two for each multiply-add (docs/accounting.md):"
    yield from (f"  {function}: {counted}" for function, counted in described.counted.items())
    yield f"  {described.cost}"


def _hosts() -> Iterator[str]:
    from llava_consensus.hosts.matrix import UNTRIED, cells

    hosts = known_hosts()
    for host, reasons in cells().items():
        missing = [method for method, reason in reasons.items() if reason and reason != UNTRIED]
        without = f" without {', '.join(missing)}" if 0 < len(missing) <= 6 else ""
        note = ", tried only on copies of the code that the checkpoint carries" if hosts[host].remote else ""
        yield f"{host:16} {len(reasons) - len(missing)} of {len(reasons)} methods{without}{note}"
    yield "why a method does not work on one of them: llava-consensus list --host NAME"


def _host(name: str) -> Iterator[str]:
    from llava_consensus.hosts.matrix import keeping, refusals

    hosts = known_hosts()
    if name not in hosts:
        raise unknown_name("host", name, list(hosts))
    reasons = refusals(name)
    yield f"{name}: {hosts[name].line}"
    yield f"works: {', '.join(method for method, reason in reasons.items() if not reason)}"
    for reason in dict.fromkeys(filter(None, reasons.values())):
        methods = [method for method, why in reasons.items() if why == reason]
        yield f"{', '.join(methods)}: {reason}"
    if name in keeping():
        yield "positions: kept, as they have three axes; positions=renumber is refused"


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
    arg("names", nargs="+", metavar="BENCHMARK", help="or all"),
    arg("--data", default=OFFICIAL, type=Path, metavar="DIR", help="folder that gets eval/... (%(default)s)"),
    arg("--yes", action="store_true", help="the licences are read and accepted: do not ask"),
    examples=("data download pope --data playground/data", "data download all --yes"),
)
def download_data(given: argparse.Namespace) -> Iterator[str]:
    """Fetch official files of benchmarks: resumed, checked, unpacked."""
    names = _chosen(given.names)
    todo = list(dict.fromkeys(source for name in names for source in SOURCES[name]))
    yield from _plan(names, todo, given.data)
    if not given.yes:
        raise OptionError("--yes: say it when the licences above are read and accepted")
    for number, source in enumerate(todo, 1):
        yield f"[{number}/{len(todo)}] {_bring(source, given.data)}"
    yield from (f"{name}, by hand: {BY_HAND[name]}" for name in names if name in BY_HAND)
    yield from check_data(argparse.Namespace(names=names, data=given.data, benchmark_option=[]))


def _chosen(given: Sequence[str]) -> list[str]:
    for name in given:
        if name != "all" and name not in SOURCES:
            raise unknown_name("benchmark", name, [*SOURCES, "all"])
    return [name for name in BENCHMARKS if name in SOURCES and (name in given or "all" in given)]


def _plan(names: Sequence[str], todo: Sequence[Source], data: Path) -> Iterator[str]:
    yield "licences:"
    yield from (f"  {name:11} {BENCHMARKS[name].licence or 'not stated'}" for name in names)
    yield f"to be fetched into {data}:"
    for source in todo:
        state = "here already" if _done(source, data).exists() else source.size or "size as its server says"
        yield f"  {source.name:28} {state:24} {source.url}"


def _done(source: Source, data: Path) -> Path:
    return data / DOWNLOADS / f"{source.name}{DONE}"


def _bring(source: Source, data: Path) -> str:
    done, folder = _done(source, data), data / "eval" / source.to
    if done.exists():
        return f"{source.name}: here already"
    zipped = source.name.endswith(".zip")
    target = (data / DOWNLOADS if zipped else folder) / source.name
    fetch(source.url, target, source.md5)
    what = f"{unpack(target, folder, source.only, source.without):,} files below {folder}" if zipped else target
    done.parent.mkdir(parents=True, exist_ok=True)
    replace(done, source.url.encode())
    if zipped:
        target.unlink()
    return f"{source.name}: {what}"


@command(
    "data check",
    arg("names", nargs="*", metavar="BENCHMARK", help="all of them by default"),
    arguments.DATA_DIR,
    arguments.BENCHMARK_OPTION,
    examples=("data check --data playground/data", "data check gqa pope --data playground/data"),
)
def check_data(given: argparse.Namespace) -> Iterator[str]:
    """Which files are there, which are missing and where they come from."""
    unready = []
    for name in given.names or known_benchmarks():
        benchmark = arguments.benchmark(name, given)
        findings = list(check(benchmark, given.data))
        states = uses(benchmark, given.data, findings)
        unready += [name] if "not ready" in states.values() else []
        yield f"{name}: {benchmark.licence or 'licence not noted'}"
        for one in findings:
            yield f"  {one.state:8} " + one.text.replace("\n", "\n           ")
        yield "  " + "; ".join(f"{use}: {state}" for use, state in states.items())
    if unready and given.data != Path(DATA):
        yield f"official files are fetched by: llava-consensus data download {' '.join(unready)} --data {given.data}"
    if unready and given.names:
        raise DataError(f"not ready: {', '.join(unready)}. What is missing and where it comes from is said above")


@command(
    "model convert",
    arg("source", type=Path, metavar="CHECKPOINT", help="folder of official LLaVA"),
    arg("out", type=Path, metavar="OUT", help="folder that is not there yet"),
    examples=("model convert checkpoints/llava-mini checkpoints/llava-mini-hf",),
)
def convert(given: argparse.Namespace) -> Iterator[str]:
    """A LLaVA-1.5 or 1.6 checkpoint in Hugging Face's layout."""
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
    from llava_consensus.evaluation.models.convert import merge as write

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
    """Check that an attached model with all tokens equals the model, and that budgets hold."""
    from llava_consensus.evaluation.models.check_host import findings

    method = arguments.method(given)
    found = findings(arguments.load(given), method)
    yield from (f"{name:20} {'pass' if passed else 'FAIL'}  {note}" for name, passed, note in found)
    failed = sum(not finding.passed for finding in found)
    if failed:
        raise HostError(
            f"{failed} of {len(found)} checks failed: numbers of this model with a method are not to be trusted. A "
            "model of another version than the host was written for is the usual reason"
        )
