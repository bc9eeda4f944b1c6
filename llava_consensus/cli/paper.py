"""The command `paper`: every table of the paper that one model can give, and which weights the others need.

`llava-consensus paper --model MODEL --limit 40`. Each table is a preset (`ablation.py`), then comes the controlled
study (`study.py`). A run that fails leaves its cell blank, is named at the end, and does not keep the rest back.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from llava_consensus.cli import ablation, arguments, study
from llava_consensus.cli.arguments import Command
from llava_consensus.cli.grids import loaded_once
from llava_consensus.errors import ConsensusError, Interrupted


class Part(NamedTuple):
    """One part of the paper: what it is, where it will be, what makes it, and why it cannot be made if so."""

    title: str
    file: Path
    lines: Callable[[], Iterator[str]]
    why: str = ""


def add(command: Command) -> None:
    """Adds the command."""
    parser = command("paper", paper, "every table of the paper that the model can give; stopped, it goes on")
    parser.add_argument("--bench", metavar="NAMES", help="only these benchmarks (those of each table)")
    arguments.add_model(parser)
    arguments.add_run(parser)
    parser.set_defaults(format="markdown", **study.DEFAULTS)


def paper(given: argparse.Namespace) -> Iterator[str]:
    """Everything that every part prints, then a line for each part: where it is, or what it needs.

    Raises:
        ConsensusError: the first error of a part that failed, when all others are done.
    """
    became, errors = {}, []
    for part in parts(given):
        became[part.title] = part.why or str(part.file)
        try:
            yield from () if part.why else part.lines()
        except Interrupted:
            raise
        except ConsensusError as error:
            became[part.title] = f"failed ({error})"
            errors.append(error)
    yield from (f"{title}: {what}" for title, what in became.items())
    if errors:
        raise errors[0]


def parts(given: argparse.Namespace) -> Iterator[Part]:
    """The tables, then the study, each with the benchmarks that were asked for."""
    from llava_consensus.paper import preset as presets

    load = loaded_once(given)
    for preset in map(presets.read, presets.names()):
        if not preset.printed:
            continue
        names = _asked(given, preset.benchmarks)
        why = ablation.unfit(preset, given) if names else f"asks none of {given.bench}"
        own = argparse.Namespace(**{**vars(given), "bench": " ".join(names)})
        file = given.out / ablation.TABLES / f"{preset.name}.md"
        yield Part(preset.title, file, partial(ablation.measured, preset, own, load), why)
    names = _asked(given, study.BENCHMARKS.split())
    own = argparse.Namespace(**{**vars(given), "bench": " ".join(names)})
    why = "" if names else f"asks none of {given.bench}"
    yield Part("The controlled study", given.out / "study.md", partial(study.study, own), why)


def _asked(given: argparse.Namespace, benchmarks: Iterable[str]) -> list[str]:
    """Those of a part's benchmarks that were asked for; all where none was named."""
    return [name for name in benchmarks if given.bench is None or name in given.bench.split()]
