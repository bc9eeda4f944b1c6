"""Runs of one setting: scores with intervals, and paired tests against a line of reference, as one frame."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from llava_consensus.errors import OptionError
from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.report.rows import (
    FULL,
    Line,
    Row,
    compare,
    flipped,
    full_line,
    one_word,
    policy,
    reduced_lines,
)
from llava_consensus.evaluation.report.stats import (
    Comparison,
    Mean,
    MeanDifference,
    above_chance,
    corrected,
    draws,
    interval,
    mark,
    mean_difference,
)
from llava_consensus.evaluation.report.table import ABSENT

if TYPE_CHECKING:
    import pandas as pd

MOVES = 5.0  # points above chance that all tokens must score for a benchmark to enter an average


class ScoreCell(NamedTuple):
    """A run, its test against the reference, and the test's p after Holm's correction over the table."""

    row: Row
    test: Comparison | None = None
    corrected: float = 1.0

    @property
    def mark(self) -> str:
        return "" if self.test is None else mark(self.test.p, self.corrected)

    @property
    def record(self) -> dict[str, Any]:
        """The run's score and its test, unrounded, as columns of a CSV file."""
        row, test, metrics = self.row, self.test, self.row.metrics or {}
        low, high = row.bounds or (None, None)
        below, above = (test and test.bounds) or (None, None)
        return {
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
            "p_corrected": test and self.corrected,
            "test": test and test.test,
        }


@dataclass(frozen=True)
class Section:
    """Runs that differ in method, budget and benchmark only, each compared with a reference of the same questions.

    Args:
        against: the method of the reference as the command line takes it, with the same budget and position policy;
            by default all tokens.
    """

    rows: Sequence[Row]
    against: str = FULL

    @cached_property
    def full(self) -> Line | None:
        return full_line(self.rows)

    @cached_property
    def reduced(self) -> list[Line]:
        return reduced_lines(self.rows)

    @cached_property
    def lines(self) -> list[Line]:
        return [*([self.full] if self.full else []), *self.reduced]

    @cached_property
    def names(self) -> list[str]:
        """The benchmarks that were run: those of the paper's Acc in its order, then others by name."""
        columns = paper.averaged()

        def rank(name: str) -> tuple[int, str]:
            column = self._column(name)
            return columns.index(column) if column in columns else len(columns), name

        return sorted({row.benchmark for row in self.rows}, key=rank)

    def _column(self, name: str) -> str:
        return next(row.facts.column or "" for row in self.rows if row.benchmark == name)

    def title(self, name: str) -> str:
        return next((row.facts.title for row in self.rows if row.benchmark == name and row.metrics), name)

    def about(self, line: Line) -> str:
        """Heading of a line: its budget, and the position policy if the section has several."""
        if line is self.full:
            return f"All {line.tokens} tokens" if line.tokens else "All tokens"
        full, tokens = self.full.tokens if self.full else 0, line.tokens
        head = f"{100 * tokens:g} % of the tokens" if 0 < tokens < 1 else f"{tokens:g} tokens"
        fewer = f" ({100 * (1 - tokens / full):.1f} % fewer)" if full and 1 <= tokens <= full else ""
        several = len({one.policy for one in self.reduced}) > 1 and line.policy
        return head + fewer + (f", positions={line.policy}" if several else "")

    # ---- cells

    @cached_property
    def cells(self) -> Mapping[tuple[float, str, str], ScoreCell]:
        """By tokens and label of the line, and benchmark; nothing for what was not run."""
        cells = {}
        for line in self.lines:
            for name, row in line.runs.items():
                other = self._reference(line, name)
                test = None if other is None or other is row else compare(row, other)
                cells[line.tokens, line.label, name] = ScoreCell(row, test)
        found = corrected({key: cell.test.p for key, cell in cells.items() if cell.test is not None})
        return cells | {key: cells[key]._replace(corrected=p) for key, p in found.items()}

    def cell(self, line: Line, name: str) -> ScoreCell | None:
        return self.cells.get((line.tokens, line.label, name))

    def _reference(self, line: Line, name: str) -> Row | None:
        chosen = self.full
        if self.against != FULL:
            chosen = None if line is self.full else self._others.get((line.tokens, line.policy))
        other = None if chosen is None else chosen.runs.get(name)
        return other if other and other.complete else None

    @cached_property
    def _others(self) -> Mapping[tuple[float, str | None], Line]:
        """The lines of `against` by budget and position policy. OptionError if it was not run."""
        found, known = {}, set()
        for line in self.reduced:
            row = next(iter(line.runs.values()))
            word = one_word(row.config["method"], row.config["changed"])
            known.add(word)
            if self.against in (word, row.variant):
                found[line.tokens, line.policy] = line
        if not found:
            raise OptionError(f"--against {self.against}: no such runs, only of {', '.join(sorted(known))}")
        return found

    # ---- averages

    @cached_property
    def averaged(self) -> list[str]:
        """The benchmarks of Acc: those of the paper that have scores, and can move if all tokens were run."""
        scored = {row.benchmark for row in self.rows if row.score is not None or row.metrics is None}
        full = self.full.runs if self.full else {}
        still = {name for name, row in full.items() if row.complete and not can_move(row)}
        papers = [name for name in self.names if self._column(name) in paper.averaged()]
        return [name for name in papers if name in scored - still]

    @cached_property
    def common(self) -> list[str]:
        """The benchmarks that every line with a finished run has finished: costs over these can be compared."""
        finished = [{name for name, row in line.runs.items() if row.metrics is not None} for line in self.lines]
        shared = set.intersection(*filter(None, finished)) if any(finished) else set()
        return [name for name in self.names if name in shared]

    def accuracy(self, line: Line) -> Mean | None:
        """Plain mean over the averaged benchmarks, each divided by its scale; None unless every run is complete.

        Its interval and p come from adding the benchmarks' independent resamples.
        """
        runs = [line.runs.get(name) for name in self.averaged]
        done = [row for row in runs if row is not None and row.complete]
        if not done or len(done) < len(runs):
            return None
        value = fmean((row.score or 0.0) / row.scale for row in done)
        if any(row.bounds is None for row in done):
            return Mean(value, None)
        total = np.mean([draws(row.sample, row.benchmark) / row.scale for row in done if row.sample], axis=0)
        difference = self.difference(line)
        return Mean(value, interval(total), difference and difference.p)

    def relative(self, line: Line) -> float | None:
        own, full = self.accuracy(line), self.accuracy(self.full) if self.full else None
        return 100 * own.value / full.value if own and full and full.value else None

    def difference(self, line: Line) -> MeanDifference | None:
        """Mean difference to the reference over the averaged benchmarks; None unless each has a test."""
        cells = [cell for name in self.averaged if (cell := self.cell(line, name)) is not None]
        tests = [cell.test for cell in cells if cell.test is not None and cell.test.enough]
        if not tests or len(tests) < len(self.averaged):
            return None
        return mean_difference(tests, [cell.row.scale for cell in cells])

    @cached_property
    def frame(self) -> "pd.DataFrame":
        """Every cell as a line, unrounded: what was run, the score with its interval, the test against the reference,
        and what a question costs.
        """
        import pandas as pd

        places = [(place, line, name) for place, line in enumerate(self.lines) for name in self.names]
        cells = [(place, line, self.cell(line, name)) for place, line, name in places]
        records = [{"line": place, **self._record(line, cell)} for place, line, cell in cells if cell is not None]
        return pd.DataFrame(records, dtype=object)

    def _record(self, line: Line, cell: ScoreCell) -> dict[str, Any]:
        row, metrics = cell.row, cell.row.metrics or {}
        full = self.full.runs.get(row.benchmark) if self.full and line is not self.full else None
        known = metrics.get("account") or {}
        account = {**known, **(known.get("measured") or {})}
        account["flops"] = (account.get("flops") or {}).get("total")
        return {
            **{key: row.config.get(key) for key in ("model", "data", "limit", "sample")},
            "label": line.label,
            "method": row.config["method"],
            "positions": policy(row.config),
            "tokens": line.tokens or None,
            "merged": row.config["merged"],
            **cell.record,
            "flips": flipped(row, full) if full else None,
            **{key: account.get(key) for key in ("entering", "kept", "average", "flops", "kv_bytes")},
        }


def can_move(row: Row) -> bool:
    far = row.score is not None and (row.score - row.chance) / row.scale >= MOVES
    return far and above_chance(row.score, row.bounds, row.chance)


# ---- cells as text


def with_interval(cell: ScoreCell | None) -> str:
    """A score with half of its interval, marked if it differs from the reference; of several seeds with their spread.
    Of an incomplete run why there is none.
    """
    if cell is None:
        return ABSENT
    row = cell.row
    if row.metrics is None:
        return f"incomplete ({row.answered} answered)"
    if row.score is None:
        contains = row.metrics["report"].get("contains")
        return "not scored" if contains is None else f"not judged ({contains:.1f} contain the answer)"
    if row.unanswered:
        return f"incomplete ({row.metrics['answered']} of {row.metrics['questions']})"
    seeds = "" if row.spread is None else f" (sd {row.spread:.1f})"
    return f"{row.score:.1f}{half(row.bounds)}{cell.mark}{seeds}"


def half(bounds: Sequence[float] | None) -> str:
    return "" if bounds is None else f" ± {(bounds[1] - bounds[0]) / 2:.1f}"


def signed(difference: float | None, bounds: Sequence[float] | None = None, places: int = 1) -> str:
    if difference is None:
        return ABSENT
    between = "" if bounds is None else f" ({bounds[0]:+.{places}f} to {bounds[1]:+.{places}f})"
    return f"{difference:+.{places}f}{between}"
