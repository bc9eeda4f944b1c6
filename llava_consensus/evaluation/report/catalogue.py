"""What tables call methods and benchmarks, and where a benchmark stands in the paper's tables.

A finished run says it for its own method and benchmark (`titles`, `scale`, `column` in metrics.json), so that results
are understood without the code that made them. What no run says is what the caller knows, else the plain name.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple


class Facts(NamedTuple):
    """What tables must know of a benchmark."""

    title: str
    scale: float = 1.0  # its score divided by this is a percentage
    column: str | None = None  # of the paper's tables
    chance: float = 0.0  # what guessing scores, for runs that do not say it


@dataclass(frozen=True)
class Catalogue:
    """Titles of methods and facts of benchmarks, by name; one that is not in it goes by its name.

    Args:
        guessing: what guessing scores on the questions of a run of an older version, which does not say it, by its
            configuration; None where that cannot be known any more.
    """

    methods: Mapping[str, str] = field(default_factory=dict)
    benchmarks: Mapping[str, Facts] = field(default_factory=dict)
    guessing: Callable[[Mapping[str, Any]], float | None] | None = None

    def method(self, name: str) -> str:
        """A method's title."""
        return self.methods.get(name, name)

    def benchmark(self, name: str) -> Facts:
        """What is known of a benchmark."""
        return self.benchmarks.get(name, Facts(name))

    def named(self, column: str) -> str:
        """The benchmark that stands in a column of the paper's tables."""
        return next((name for name, facts in self.benchmarks.items() if facts.column == column), column)

    def told_by(self, runs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any] | None]]) -> "Catalogue":
        """This and what runs, given as (config, metrics), say of themselves; runs of older versions say nothing."""
        methods, benchmarks = dict(self.methods), dict(self.benchmarks)
        for config, metrics in runs:
            if metrics and "titles" in metrics:
                methods[config["method"]] = metrics["titles"]["method"]
                name, chance = config["benchmark"], self.benchmark(config["benchmark"]).chance
                benchmarks[name] = Facts(metrics["titles"]["benchmark"], metrics["scale"], metrics["column"], chance)
        return replace(self, methods=methods, benchmarks=benchmarks)
