"""The commands that bring data here: `fetch-mini`, the embedded model and its benchmarks, and `download-data`, official
files of benchmarks.

    llava-consensus fetch-mini --to ~/work
    llava-consensus download-data pope textvqa --data playground/data
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llava_consensus.cli.arguments import Command
from llava_consensus.errors import DataError, Interrupted, OptionError, unknown_name

if TYPE_CHECKING:
    from llava_consensus.evaluation.data.sources import Source

OFFICIAL = Path("playground/data")
DOWNLOADS = "downloads"  # folder in DATA of what is fetched and not unpacked yet
DONE = ".done"


def add(command: Command) -> None:
    """Adds both commands."""
    parser = command("fetch-mini", fetch_mini, "put the embedded model and its benchmarks into a folder to work in")
    parser.add_argument("--to", type=Path, default=Path(), metavar="DIR", help="that folder (the current one)")
    parser = command("download-data", download_data, "fetch official files of benchmarks: resumed, checked, unpacked")
    parser.add_argument("names", nargs="+", metavar="BENCHMARK", help="or all")
    line = "folder that gets eval/... in LLaVA's layout (%(default)s)"
    parser.add_argument("--data", default=OFFICIAL, type=Path, metavar="DIR", help=line)
    parser.add_argument("--yes", action="store_true", help="the licences are read and accepted: do not ask")
    parser.add_argument("--keep", action="store_true", help="keep archives that are unpacked")


def fetch_mini(given: argparse.Namespace) -> Iterator[str]:
    """Copies, generates, and says what to type next."""
    from llava_consensus.evaluation.data import mini

    folder = given.to.expanduser()
    checkpoint, playground = mini.copy(folder)
    yield f"model: {checkpoint}"
    yield f"benchmarks are generated from test scenes, which takes seconds: {playground / 'eval'}"
    mini.generate(folder)
    yield f"{f'cd {folder} && ' if folder != Path() else ''}llava-consensus eval gqa --tokens 64 --limit 60"


def download_data(given: argparse.Namespace) -> Iterator[str]:
    """Licences and sizes, then every file; at the end what `check-data` says of each benchmark."""
    from llava_consensus.evaluation.data.sources import BY_HAND, SOURCES

    names = _chosen(given.names)
    todo = list(dict.fromkeys(source for name in names for source in SOURCES[name]))
    yield from _plan(names, todo, given.data)
    _agree(given.yes)
    for number, source in enumerate(todo, 1):
        yield f"[{number}/{len(todo)}] {_bring(source, given.data, given.keep)}"
    unready = []
    for name in names:
        yield from (found := _checked(name, given.data))
        unready += [name] if any(line.startswith("  missing") for line in found) else []
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


def _checked(name: str, data: Path) -> list[str]:
    """What `check-data` says of a benchmark."""
    from llava_consensus.evaluation import benchmarks
    from llava_consensus.evaluation.benchmarks.check import check

    return [name, *(f"  {one.state:8} {one.text}" for one in check(benchmarks.make(name), data))]
