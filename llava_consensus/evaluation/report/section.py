"""One section of the tables: runs of one setting, with the interval of each score and its test against the full model.

Every table is made of this (`columns.py`). Incomplete runs are in it, but enter no mean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.report.catalogue import Catalogue
from llava_consensus.evaluation.report.rows import Line, Row, full_line, reduced_lines, version
from llava_consensus.evaluation.report.stats import Comparison, bootstrap_p, compare, draws, holm, interval

SIGNIFICANT = 0.05


class Cell(NamedTuple):
    """A run with its 95 % interval (None where its scorer's rows do not make up the score) and its test."""

    row: Row
    bounds: tuple[float, float] | None = None
    test: Comparison | None = None  # against the full model
    corrected: float = 1.0  # the test's p after Holm's correction over the section

    @property
    def mark(self) -> str:
        """Whether it differs from the full model: † p < 0.05, ‡ also after the correction."""
        if self.test is None or self.test.p >= SIGNIFICANT:
            return ""
        return "‡" if self.corrected < SIGNIFICANT else "†"


def told_from_chance(cell: Cell) -> bool:
    """Whether the interval of a score, or without one the score, lies above what guessing scores."""
    low = cell.row.score if cell.bounds is None else cell.bounds[0]
    return low is not None and low > cell.row.chance


class Mean(NamedTuple):
    """A number made of several benchmarks, and its interval where each of them has one."""

    value: float
    bounds: tuple[float, float] | None
    p: float | None = None  # of no difference to the full model


@dataclass(frozen=True)
class Section:
    """Runs that differ in method, budget and benchmark only."""

    rows: Sequence[Row]

    @cached_property
    def full(self) -> Line | None:
        """The full model's runs."""
        return full_line(self.rows)

    @cached_property
    def reduced(self) -> list[Line]:
        """Lines of the reduced runs, most tokens first."""
        return reduced_lines(self.rows)

    @property
    def lines(self) -> list[Line]:
        """All lines, the full model's on top."""
        return [*([self.full] if self.full else []), *self.reduced]

    @property
    def catalogue(self) -> Catalogue:
        """What tables call its methods and benchmarks."""
        return self.rows[0].catalogue

    def title(self, name: str) -> str:
        """A benchmark's name as papers write it."""
        return self.catalogue.benchmark(name).title

    @cached_property
    def names(self) -> list[str]:
        """The benchmarks that were run: those of the paper's Acc in its order, then others by name."""
        return self.papers + sorted({row.benchmark for row in self.rows} - set(self.papers))

    @cached_property
    def papers(self) -> list[str]:
        """The benchmarks of the paper's Acc that were run, in its order."""
        places = {column: place for place, column in enumerate(paper.averaged())}
        order = {row.benchmark: places[row.facts.column] for row in self.rows if row.facts.column in places}
        return sorted(order, key=lambda name: order[name])

    @cached_property
    def averaged(self) -> list[str]:
        """The benchmarks included in Acc: `papers` without those `unjudged` and those `near_chance`."""
        return [name for name in self.papers if name not in (*self.unjudged, *self.near_chance)]

    @cached_property
    def unjudged(self) -> list[str]:
        """Benchmarks of `papers` that were finished and have no score.

        A benchmark that needs a judge and has none must not leave every line without an Acc.
        """
        finished = {row.benchmark for row in self.rows if row.metrics is not None}
        scored = {row.benchmark for row in self.rows if row.score is not None}
        return [name for name in self.papers if name in finished - scored]

    @cached_property
    def near_chance(self) -> dict[str, Cell]:
        """The benchmarks in which the full model cannot be told from guessing, with its cells: what reduced runs score
        there says nothing, so no average has it. None where the full model was not run.
        """
        cells = {} if self.full is None else {name: self.cell(self.full, name) for name in self.names}
        return {
            name: cell
            for name, cell in cells.items()
            if cell is not None and cell.row.complete and not told_from_chance(cell)
        }

    @cached_property
    def common(self) -> list[str]:
        """The benchmarks that every line with a finished run has finished: costs over these can be compared."""
        finished = [{name for name, row in line.runs.items() if row.metrics is not None} for line in self.lines]
        shared = set.intersection(*filter(None, finished)) if any(finished) else set()
        return [name for name in self.names if name in shared]

    def reference(self, row: Row) -> Row | None:
        """The full model's complete run of the same questions."""
        full_run = None if self.full is None else self.full.runs.get(row.benchmark)
        return full_run if full_run is not None and full_run.complete and version(full_run) == version(row) else None

    def cell(self, line: Line, name: str) -> Cell | None:
        """The cell of a line and a benchmark; None where nothing was run."""
        return self._cells.get((line.tokens, line.label, name))

    @cached_property
    def _cells(self) -> Mapping[tuple[float, str, str], Cell]:
        cells = {
            (line.tokens, line.label, name): self._measured(row)
            for line in self.lines
            for name, row in line.runs.items()
        }
        tested = [key for key, cell in cells.items() if cell.test is not None]
        corrected = holm([cells[key].test.p for key in tested])  # type: ignore[union-attr]
        return cells | {key: cells[key]._replace(corrected=p) for key, p in zip(tested, corrected, strict=True)}

    def _measured(self, row: Row) -> Cell:
        if row.sample is None:
            return Cell(row)
        reference = self.reference(row)
        test = None if reference is None or reference is row else compare(row, reference)
        return Cell(row, interval(draws(row.sample, row.benchmark)), test)

    def accuracy(self, line: Line) -> Mean | None:
        """Plain mean over the averaged benchmarks, each divided by its scale; None unless every run is complete.

        Its interval and p come from adding the benchmarks' independent resamples.
        """
        scores = self._scores(line)
        if scores is None:
            return None
        value, pairs = sum(scores) / len(scores), self._resampled_pairs(line)
        if pairs is not None:
            full = self._scores(self.full) if self.full else None
            p = bootstrap_p(pairs[:, 0] - pairs[:, 1], value - sum(full) / len(full)) if full else None
            tests = [cell.test for name in self.averaged if (cell := self.cell(line, name)) and cell.test]
            return Mean(value, interval(pairs[:, 0]), tests[0].p if len(tests) == 1 else p)
        resampled = self._resampled(line)
        return Mean(value, None if resampled is None else interval(resampled))

    def relative(self, line: Line) -> Mean | None:
        """Acc in percent of the full model's (the paper's Rel); None without either."""
        scores, full = self._scores(line), None if self.full is None else self._scores(self.full)
        if scores is None or not full or not sum(full) or any(self.reference(row) is None for row in self._runs(line)):
            return None
        value, pairs = 100 * sum(scores) / sum(full), self._resampled_pairs(line)
        if pairs is None or not pairs[:, 1].all():
            return Mean(value, None)
        return Mean(value, interval(100 * pairs[:, 0] / pairs[:, 1]))

    def _runs(self, line: Line) -> list[Row]:
        return [line.runs[name] for name in self.averaged if name in line.runs]

    def _scores(self, line: Line) -> list[float] | None:
        """Scores over the averaged benchmarks as they enter a mean; None unless all are complete."""
        runs = self._runs(line)
        if not runs or len(runs) < len(self.averaged) or not all(row.complete for row in runs):
            return None
        return [(row.score or 0.0) / row.facts.scale for row in runs]

    def _resampled(self, line: Line) -> np.ndarray | None:
        """Resampled Acc [resamples]; None where a benchmark has no interval."""
        total = []
        for row in self._runs(line):
            if row.sample is None:
                return None
            total.append(draws(row.sample, row.benchmark) / row.facts.scale)
        return np.mean(total, axis=0)

    def _resampled_pairs(self, line: Line) -> np.ndarray | None:
        """Resampled Acc of a reduced line and of the full model, [resamples, 2]; None where a benchmark has no test."""
        total = []
        for row in self._runs(line):
            cell = self.cell(line, row.benchmark)
            if cell is None or cell.test is None:
                return None
            total.append(cell.test.draws / row.facts.scale)
        return np.mean(total, axis=0)
