"""Cells of tables: runs with the interval of each score and its paired test, corrected over all tests of the table.

A `Grid` is lines of runs, each compared with a line of reference; every table of scores is made of one. A `Section` is
the grid of all runs of one setting, compared with the full model; a preset's grid is in `paper/preset.py`. Incomplete
runs are in a grid, but enter no mean.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.report.rows import Catalogue, Line, Row, compare, full_line, reduced_lines, version
from llava_consensus.evaluation.report.stats import (
    Bounds,
    Comparison,
    Mean,
    above_chance,
    corrected,
    draws,
    interval,
    mark,
    mean_difference,
    mean_draws,
)
from llava_consensus.evaluation.report.table import ABSENT


class ScoreCell(NamedTuple):
    """A run and its test."""

    row: Row
    test: Comparison | None = None  # against the line of reference
    corrected: float = 1.0  # the test's p after Holm's correction over the grid

    @property
    def bounds(self) -> Bounds | None:
        """The 95 % interval of the score; None where its scorer's rows do not make it up."""
        return self.row.bounds

    @property
    def mark(self) -> str:
        """Mark of a difference from the reference: † p < 0.05, ‡ also after the correction; empty without a test."""
        return "" if self.test is None else mark(self.test.p, self.corrected)

    @property
    def percent(self) -> float:
        """The score in percent."""
        return (self.row.score or 0.0) / self.row.scale

    @property
    def percent_bounds(self) -> Bounds:
        """Its interval in percent; the score itself where it has none."""
        low, high = self.bounds or (self.row.score or 0.0,) * 2
        return low / self.row.scale, high / self.row.scale


class Grid(ABC):
    """Lines of runs of one setting, each compared with a line of reference."""

    names: Sequence[str]  # the benchmarks, in the order of columns
    full: Line | None  # the full model's runs
    lines: Sequence[Line]  # all lines, the full model's on top

    @property
    def papers(self) -> Sequence[str]:
        """The benchmarks of which means are made, if nothing speaks against it."""
        return self.names

    @property
    @abstractmethod
    def unjudged(self) -> list[str]:
        """The names in `papers` that have no score."""

    @abstractmethod
    def reference(self, line: Line, name: str) -> Row | None:
        """The run that a line's run of a benchmark is compared with."""

    def cell(self, line: Line, name: str) -> ScoreCell | None:
        """The cell of a line and a benchmark; None where nothing was run."""
        return self._cells.get((line.tokens, line.label, name))

    @cached_property
    def _cells(self) -> Mapping[tuple[float, str, str], ScoreCell]:
        cells = {}
        for line in self.lines:
            for name, row in line.runs.items():
                other = None if row.sample is None else self.reference(line, name)
                test = None if other is None or other is row else compare(row, other)
                cells[line.tokens, line.label, name] = ScoreCell(row, test)
        found = corrected({key: cell.test.p for key, cell in cells.items() if cell.test is not None})
        return cells | {key: cells[key]._replace(corrected=p) for key, p in found.items()}

    @property
    def tested(self) -> list[ScoreCell]:
        """The cells that have a test."""
        return [cell for cell in self._cells.values() if cell.test is not None]

    @cached_property
    def near_chance(self) -> dict[str, ScoreCell]:
        """Benchmarks in which the full model is not above guessing, with its cells: scores of reduced runs mean nothing
        there, so they enter no average. None if the full model was not run.
        """
        cells = {} if self.full is None else {name: self.cell(self.full, name) for name in self.names}
        return {
            name: cell
            for name, cell in cells.items()
            if cell and cell.row.complete and not above_chance(cell.row.score, cell.bounds, cell.row.chance)
        }

    @cached_property
    def averaged(self) -> list[str]:
        """The benchmarks included in Acc: `papers` without those `unjudged` and those `near_chance`."""
        return [name for name in self.papers if name not in (*self.unjudged, *self.near_chance)]

    def scores(self, line: Line) -> list[float] | None:
        """Scores over the averaged benchmarks in percent; None unless all are complete."""
        runs = [line.runs[name] for name in self.averaged if name in line.runs]
        if not runs or len(runs) < len(self.averaged) or not all(row.complete for row in runs):
            return None
        return [(row.score or 0.0) / row.scale for row in runs]

    def guessed(self, names: Sequence[str] | None = None) -> str:
        """The benchmarks of `near_chance` with the full model's scores there, as words of a note."""
        cells = {name: cell for name, cell in self.near_chance.items() if names is None or name in names}
        return "; ".join(f"{cell.row.facts.title} {beside_chance(cell)}" for cell in cells.values())


@dataclass(frozen=True)
class Section(Grid):
    """Runs that differ in method, budget and benchmark only, compared with the full model."""

    rows: Sequence[Row]

    @cached_property
    def full(self) -> Line | None:  # type: ignore[override]
        """The full model's runs."""
        return full_line(self.rows)

    @cached_property
    def reduced(self) -> list[Line]:
        """Lines of the reduced runs, most tokens first."""
        return reduced_lines(self.rows)

    @property
    def lines(self) -> list[Line]:  # type: ignore[override]
        """All lines, the full model's on top."""
        return [*([self.full] if self.full else []), *self.reduced]

    @property
    def catalogue(self) -> Catalogue:
        """Titles of its methods and benchmarks."""
        return self.rows[0].catalogue

    def title(self, name: str) -> str:
        """A benchmark's name as papers write it."""
        return self.catalogue.benchmark(name).title

    @cached_property
    def names(self) -> list[str]:  # type: ignore[override]
        """The benchmarks that were run: those of the paper's Acc in its order, then others by name."""
        return self.papers + sorted({row.benchmark for row in self.rows} - set(self.papers))

    @cached_property
    def papers(self) -> list[str]:
        """The benchmarks of the paper's Acc that were run, in its order."""
        places = {column: place for place, column in enumerate(paper.averaged())}
        order = {row.benchmark: places[row.facts.column] for row in self.rows if row.facts.column in places}
        return sorted(order, key=lambda name: order[name])

    @cached_property
    def unjudged(self) -> list[str]:
        """Benchmarks of `papers` that were finished and have no score.

        A benchmark that needs a judge and has none must not leave every line without an Acc.
        """
        finished = {row.benchmark for row in self.rows if row.metrics is not None}
        scored = {row.benchmark for row in self.rows if row.score is not None}
        return [name for name in self.papers if name in finished - scored]

    @cached_property
    def common(self) -> list[str]:
        """The benchmarks that every line with a finished run has finished: costs over these can be compared."""
        finished = [{name for name, row in line.runs.items() if row.metrics is not None} for line in self.lines]
        shared = set.intersection(*filter(None, finished)) if any(finished) else set()
        return [name for name in self.names if name in shared]

    def reference(self, line: Line, name: str) -> Row | None:
        """The full model's complete run of the same questions."""
        full_run = None if self.full is None else self.full.runs.get(name)
        same = full_run is not None and full_run.complete and version(full_run) == version(line.runs[name])
        return full_run if same else None

    def accuracy(self, line: Line) -> Mean | None:
        """Plain mean over the averaged benchmarks, each divided by its scale; None unless every run is complete.

        Its interval and p come from adding the benchmarks' independent resamples.
        """
        scores = self.scores(line)
        if scores is None:
            return None
        value, runs = sum(scores) / len(scores), [line.runs[name] for name in self.averaged]
        if any(row.bounds is None for row in runs):
            return Mean(value, None)
        total = [draws(row.sample, row.benchmark) / row.scale for row in runs if row.sample]
        tests = self._tests(line)
        return Mean(value, interval(np.mean(total, axis=0)), None if tests is None else mean_difference(*tests).p)

    def relative(self, line: Line) -> Mean | None:
        """Acc in percent of the full model's (the paper's Rel); None without either."""
        scores, full = self.scores(line), None if self.full is None else self.scores(self.full)
        if scores is None or not full or not sum(full):
            return None
        if any(self.reference(line, name) is None for name in self.averaged):
            return None
        value, tests = 100 * sum(scores) / sum(full), self._tests(line)
        pairs = None if tests is None else mean_draws(*tests)
        if pairs is None or not pairs[:, 1].all():
            return Mean(value, None)
        return Mean(value, interval(100 * pairs[:, 0] / pairs[:, 1]))

    def _tests(self, line: Line) -> tuple[list[Comparison], list[float]] | None:
        """The tests that a mean is made of, with their scales; None where a benchmark has none."""
        cells = [cell for name in self.averaged if (cell := self.cell(line, name)) is not None]
        tests = [cell.test for cell in cells if cell.test is not None and cell.test.enough]
        return (tests, [cell.row.scale for cell in cells]) if tests and len(tests) == len(self.averaged) else None


# ---- cells in words and as records


def record(line: Line, cell: ScoreCell) -> dict[str, Any]:
    """A cell as a line of CSV: unrounded, with interval and test against the reference; None where not known."""
    row, metrics, test = cell.row, cell.row.metrics or {}, cell.test
    low, high = cell.bounds or (None, None)
    below, above = (test and test.bounds) or (None, None)
    return {
        "label": line.label,
        "method": row.config["method"],
        "tokens": line.tokens or None,
        "merged": row.config["merged"],
        "benchmark": row.benchmark,
        "metric": metrics.get("metric"),
        "status": "complete" if row.complete else "incomplete",
        "questions": metrics.get("questions"),
        "pictures": row.pictures,
        "answered": metrics.get("answered", row.answered),
        "score": row.score,
        "spread": row.spread,
        "low": low,
        "high": high,
        "chance": row.chance,
        "difference": test and test.difference,
        "difference_low": below,
        "difference_high": above,
        "p": test and test.p,
        "p_corrected": test and cell.corrected,
        "test": test and test.test,
    }


def state(cell: ScoreCell | None) -> str:
    """Why there is no number; nothing if there is one."""
    if cell is None:
        return ABSENT
    row = cell.row
    if row.metrics is None:
        return f"incomplete ({row.answered} answered)"
    if row.score is None:
        return "not scored"
    return f"incomplete ({row.metrics['answered']} of {row.metrics['questions']})" if row.unanswered else ""


def score(cell: ScoreCell | None, interval: str = "") -> str:
    """A score as papers print it, marked where it differs from the reference; of several seeds with their spread."""
    if cell is None or state(cell):
        return state(cell)
    seeds = "" if cell.row.spread is None else f" (sd {cell.row.spread:.1f})"
    return f"{cell.row.score:.1f}{interval}{cell.mark}{seeds}"


def with_interval(cell: ScoreCell | None) -> str:
    """The same with half of its interval."""
    return score(cell, "" if cell is None else half(cell.bounds))


def half(bounds: Sequence[float] | None) -> str:
    """Half the width of an interval, after its number."""
    return "" if bounds is None else f" ± {(bounds[1] - bounds[0]) / 2:.1f}"


def beside_chance(cell: ScoreCell) -> str:
    """A score with its interval, and what guessing scores."""
    between = "" if cell.bounds is None else f" [{cell.bounds[0]:.1f}, {cell.bounds[1]:.1f}]"
    return f"{cell.row.score:.1f}{between}, chance {cell.row.chance:.1f}"


def signed(difference: float | None, bounds: Sequence[float] | None = None, places: int = 1) -> str:
    """A difference with its interval, where it has one."""
    if difference is None:
        return ABSENT
    between = "" if bounds is None else f" ({bounds[0]:+.{places}f} to {bounds[1]:+.{places}f})"
    return f"{difference:+.{places}f}{between}"
