"""A whole grid of runs: benchmarks x methods x budgets, and each benchmark with all tokens.

Every cell is checked before the first weight loads; the model is loaded once; complete runs are not asked again, so a
stopped sweep resumes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llava_consensus.errors import ConsensusError, Interrupted
from llava_consensus.evaluation import models
from llava_consensus.evaluation.models import Loading, Runner
from llava_consensus.evaluation.runs.configuration import RunConfig, RunPlan, prepare
from llava_consensus.evaluation.runs.execution import Execution, RunResult
from llava_consensus.evaluation.runs.loop import RunnerLoader, evaluate
from llava_consensus.evaluation.runs.store import ALL
from llava_consensus.reduction.budget import Budget, Share, most_first
from llava_consensus.reduction.method import Method


@dataclass(frozen=True)
class Cell:
    plan: RunPlan
    result: RunResult | None = None
    error: ConsensusError | None = None

    @property
    def name(self) -> str:
        run = self.plan.description
        options = ",".join(f"{key}={value}" for key, value in run["changed"].items())
        merged = "" if run["merged"] is None else f", merged={run['merged']}"
        return f"{run['benchmark']} {run['method']}{':' if options else ''}{options} {run['tokens'] or ALL}{merged}"


def cells(full: Sequence[RunConfig], methods: Sequence[Method], budgets: Sequence[Budget | Share]) -> list[Cell]:
    """All runs in order, each of them checked: benchmark by benchmark, all tokens first, then from many tokens to few.

    Args:
        full: the run with all tokens of each benchmark; its `match` is that of the others too.
        methods: those that reduce nothing are left out, `full` is there already.
        budgets: in any order.
    """
    found = []
    for config in full:
        first = prepare(config)
        found.append(first)
        for budget in most_first(set(budgets)):
            found += [first.reduced_by(method, budget, config.match) for method in methods if method.reduces]
    return [Cell(plan) for plan in found]


def sweep(
    grid: Sequence[Cell], out: Path, execution: Execution, runner_loader: RunnerLoader | None = None
) -> Iterator[Cell]:
    """Runs every cell and yields it with its result; a failed one is yielded with its error, and the next is run.

    Raises:
        ConsensusError: for an impossible execution, before anything is loaded; Interrupted on Ctrl-C.
    """
    execution.check()
    load = runner_loader or models.load
    loader = load if execution.workers > 1 else LoadedOnce(load)
    for cell in grid:
        try:
            yield replace(cell, result=evaluate(cell.plan, out, execution, loader))
        except Interrupted:
            raise
        except ConsensusError as error:
            yield replace(cell, error=error)


class LoadedOnce:
    """A loader that loads a runner once for all runs in a row that ask for the same one."""

    def __init__(self, loader: RunnerLoader) -> None:
        self._loader = loader
        self._key: tuple[str, Loading, Mapping[str, str]] | None = None
        self._host: Runner

    def __reduce__(self) -> tuple[type, tuple[RunnerLoader]]:
        """For another process, which loads its own runner."""
        return LoadedOnce, (self._loader,)

    def __call__(self, model: str, loading: Loading, host_options: Mapping[str, str]) -> Runner:
        key = model, loading, host_options
        if self._key != key:
            self._host, self._key = self._loader(*key), key
        return self._host
