"""A whole grid of runs: benchmarks x methods x budgets, and each benchmark with all tokens.

`llava-consensus sweep --bench "gqa pope" --methods "consensusdrop consensusdrop:alpha=1.0 random" --tokens "192 64"`,
or `make sweep BENCH="gqa pope"`. Every cell is checked before the first weight loads; the model is loaded once; what is
complete is not asked again, so a stopped sweep goes on where it was.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llava_consensus.errors import ConsensusError, OptionError
from llava_consensus.hosts.base import Host
from llava_consensus.runs.asking import HostLoader, load_host
from llava_consensus.runs.configuration import RunConfig, prepare
from llava_consensus.runs.loop import Interrupted, Pace, RunResult, run

FULL = "full"
ALL = 576  # visual tokens of LLaVA-1.5, the name a run with all tokens goes by


@dataclass(frozen=True)
class Cell:
    """One run of a sweep and what became of it: a result, or the error it ended with."""

    config: RunConfig
    result: RunResult | None = None
    error: ConsensusError | None = None

    @property
    def name(self) -> str:
        """Benchmark, method with its options, and budget."""
        options = ",".join(f"{key}={value}" for key, value in self.config.options.items())
        return f"{self.config.benchmark} {self.config.method}{':' if options else ''}{options} {self.config.tokens}"


def parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """`NAME` or `NAME:key=value,key=value` as a name and its options.

    Raises:
        OptionError: for a text that is neither.
    """
    name, _, rest = text.partition(":")
    return name, parse_options(filter(None, rest.split(",")))


def parse_options(pairs: Iterable[str]) -> dict[str, Any]:
    """`key=value` texts as options; a value is read as JSON where it is JSON (0.5, true, null), else as text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise OptionError(f"option {pair!r} must be KEY=VALUE, for example alpha=0.5")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def cells(shared: RunConfig, benchmarks: Sequence[str], methods: Sequence[str], tokens: Sequence[int]) -> list[Cell]:
    """All runs in order: benchmark by benchmark, all tokens first, then from many tokens to few."""
    chosen = [parse_method(text) for text in methods]
    found = []
    for benchmark in benchmarks:
        found.append(replace(shared, benchmark=benchmark, method=FULL, options={}, tokens=ALL, merged=None))
        for count in sorted(set(tokens), reverse=True):
            found += [
                replace(shared, benchmark=benchmark, method=name, options=options, tokens=count)
                for name, options in chosen
                if name != FULL
            ]
    return [Cell(config) for config in found]


def sweep(grid: Sequence[Cell], out: Path, pace: Pace, host_loader: HostLoader = load_host) -> Iterator[Cell]:
    """Runs every cell and yields it with its result; one that fails is yielded with its error, and the rest goes on.

    Args:
        grid: as `cells` makes it.
        out: folder of all runs.
        pace: how fast.
        host_loader: instead of `hosts.load`.
    Raises:
        ConsensusError: for a cell that is wrong, before anything is loaded; Interrupted on Ctrl-C.
    """
    pace.check()
    for cell in grid:
        prepare(cell.config)
    loader = host_loader if pace.workers > 1 else Kept(host_loader)
    for cell in grid:
        try:
            yield replace(cell, result=run(cell.config, out, pace, loader))
        except Interrupted:
            raise
        except ConsensusError as error:
            yield replace(cell, error=error)


class Kept:
    """Loads a host once for all runs that ask for the same one."""

    def __init__(self, loader: HostLoader) -> None:
        self._loader = loader
        self._key: tuple[str, str, str] | None = None
        self._host: Host

    def __call__(self, model: str, device: str, dtype: str) -> Host:
        if self._key != (model, device, dtype):
            self._host = self._loader(model, device, dtype)
            self._key = model, device, dtype
        return self._host
