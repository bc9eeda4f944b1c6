"""Runs as lines and benchmarks: scores with intervals, means, paired tests against a reference, costs; as one frame and
as tables.

`Grid` is what all tables have in common: `Section` compares the runs of one setting in a folder of results, and
`paper.results.Results` those of a preset, beside the paper's numbers. Acc is the plain mean over the paper's benchmarks
(MME perception / 20), Rel is Acc in percent of all tokens'. Times come from `bench.json`: rows with `method` (its name,
or its label in tables), `tokens`, `ttft_ms`, `tpot_ms`, `share` (the method's part of the time to first token).
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from llava_consensus.errors import OptionError
from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.report.rows import (
    ALL,
    FULL,
    Line,
    Row,
    by_setting,
    compare,
    flipped,
    full_line,
    one_word,
    policy,
    reduced_lines,
)
from llava_consensus.evaluation.report.stats import (
    RESAMPLES,
    Comparison,
    Mean,
    MeanDifference,
    above_chance,
    calibration,
    corrected,
    draws,
    interval,
    mark,
    mean_difference,
)
from llava_consensus.evaluation.report.table import (
    ABSENT,
    PACKAGES,
    Table,
    decimal,
    grouped,
    latex,
    markdown,
    number,
    p_value,
)

if TYPE_CHECKING:
    import pandas as pd

MOVES = 5.0  # points above chance that all tokens must score for a benchmark to enter an average
NOTHING = "No results yet: `make tables` measures them."
COSTS = {  # of `Grid.frame`: title and unit of its column, which CSV has as it is
    "average": ("tokens per layer", 1.0),
    "flops": ("GFLOPs", 1e-9),
    "flips": ("flips (%)", 1.0),
    "ece": ("ECE (%)", 1.0),
    "aurc": ("AURC (%)", 1.0),
    "kv_bytes": ("KV (MiB)", 2**-20),
    "ttft_ms": ("TTFT (ms)", 1.0),
    "tpot_ms": ("TPOT (ms)", 1.0),
    "share": ("selection (% of TTFT)", 100.0),
}
CALIBRATION = ("ece", "aurc")
KNOWN_COSTS = ("average", "flops", "flips", *CALIBRATION, "kv_bytes")  # of the run itself

Bench = Sequence[Mapping[str, Any]]
Columns = Mapping[str, Sequence[str]]  # by title, the cells of the lines


class ScoreCell(NamedTuple):
    """A run, its test against the reference, and the test's p after Holm's correction over the table."""

    row: Row
    test: Comparison | None = None
    corrected: float = 1.0

    @property
    def mark(self) -> str:
        return "" if self.test is None else mark(self.test.p, self.corrected)


class Grid:
    """Lines and benchmarks; a line is a method with a budget, and its run of each benchmark."""

    full: Line | None
    reduced: Sequence[Line]
    names: Sequence[str]  # benchmarks
    averaged: Sequence[str]  # those of the mean
    against: str  # every line is compared with it
    bench: Bench  # rows of a bench file

    def reference(self, line: Line) -> Line | None:
        raise NotImplementedError

    def printed(self, line: Line, name: str) -> float | None:
        return None

    @property
    def lines(self) -> list[Line]:
        return [*([self.full] if self.full else []), *self.reduced]

    def title(self, name: str) -> str:
        runs = (line.runs[name] for line in self.lines if name in line.runs)
        return next((run.facts.title for run in runs if run.metrics), name)

    def about(self, line: Line) -> str:
        """Heading of a line: its budget, and the position policy if there are several."""
        if line is self.full:
            return f"All {line.tokens:g} tokens" if line.tokens else "All tokens"
        full, tokens = self.full.tokens if self.full else 0, line.tokens
        head = f"{100 * tokens:g} % of the tokens" if 0 < tokens < 1 else f"{tokens:g} tokens"
        fewer = f" ({100 * (1 - tokens / full):.1f} % fewer)" if full and 1 <= tokens <= full else ""
        several = len({one.policy for one in self.reduced}) > 1 and line.policy
        return head + fewer + (f", positions={line.policy}" if several else "")

    # ---- cells and means

    @cached_property
    def cells(self) -> Mapping[tuple[float, str, str], ScoreCell]:
        """By tokens and label of the line, and benchmark; nothing for what was not run."""
        cells = {}
        for line in self.lines:
            reference = self.reference(line)
            for name, row in line.runs.items():
                other = None if reference is None else reference.runs.get(name)
                paired = other is not None and other is not row and other.complete
                cells[line.tokens, line.label, name] = ScoreCell(row, compare(row, other) if paired and other else None)
        found = corrected({key: cell.test.p for key, cell in cells.items() if cell.test is not None})
        return cells | {key: cells[key]._replace(corrected=p) for key, p in found.items()}

    def cell(self, line: Line, name: str) -> ScoreCell | None:
        return self.cells.get((line.tokens, line.label, name))

    def test(self, line: Line, name: str) -> Comparison | None:
        cell = self.cell(line, name)
        return cell and cell.test

    def accuracy(self, line: Line) -> Mean | None:
        """Plain mean over the averaged benchmarks, each divided by its scale; None unless every run is complete. Its
        interval and p come from adding the independent resamples.
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
        tests = [test for name in self.averaged if (test := self.test(line, name)) is not None and test.enough]
        if not tests or len(tests) < len(self.averaged):
            return None
        return mean_difference(tests, [line.runs[name].scale for name in self.averaged])

    # ---- the frame

    @cached_property
    def frame(self) -> "pd.DataFrame":
        """Every cell as a line, unrounded: score with interval, test against the reference, cost of a question."""
        import pandas as pd

        places = [(place, line, name) for place, line in enumerate(self.lines) for name in self.names]
        cells = [(place, line, self.cell(line, name)) for place, line, name in places]
        records = [{"line": place, **self._record(line, cell)} for place, line, cell in cells if cell is not None]
        return pd.DataFrame(records, dtype=object)

    def _record(self, line: Line, cell: ScoreCell) -> dict[str, Any]:
        row, test, metrics = cell.row, cell.test, cell.row.metrics or {}
        full = self.full.runs.get(row.benchmark) if self.full and line is not self.full else None
        low, high = row.bounds or (None, None)
        below, above = (test and test.bounds) or (None, None)
        account = metrics.get("account") or {}
        account = {**account, **(account.get("measured") or {})}
        known = [calibration(one.report) for one in row.seeds or (row,)]
        account["flops"] = (account.get("flops") or {}).get("total")
        times = self._times(line)
        return {
            **{key: row.config.get(key) for key in ("model", "data", "limit", "sample")},
            "label": line.label,
            "method": row.config["method"],
            "positions": policy(row.config),
            "tokens": line.tokens or None,
            "merged": row.config["merged"],
            "benchmark": row.benchmark,
            "metric": metrics.get("metric"),
            "status": "complete" if row.complete else "incomplete",
            "questions": metrics.get("questions"),
            "pictures": row.images,
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
            "flips": flipped(row, full) if full else None,
            **{key: fmean(one[key] for one in known if one) if all(known) else None for key in CALIBRATION},
            **{key: account.get(key) for key in ("entering", "kept", "average", "flops", "kv_bytes")},
            **{key: account.get(key, times.get(key)) for key in COSTS if key not in KNOWN_COSTS},
        }

    def _times(self, line: Line) -> Mapping[str, Any]:
        """The bench row about a line: the full model's, or that of its label or plain method with its budget."""
        names = {line.label, *(run.config["method"] for run in line.runs.values() if not run.config["changed"])}
        for row in self.bench:
            if row["method"] == FULL if line is self.full else row["tokens"] == line.tokens and row["method"] in names:
                return row
        return {}

    # ---- tables

    def tabulated(self, title: str, columns: Columns, note: str, lines: Sequence[Line]) -> Table:
        """Lines under the headings of their budgets; without columns and lines that are empty."""
        used = {name: cells for name, cells in columns.items() if set(cells) - {ABSENT}}
        found = []
        for line, cells in zip(lines, zip(*used.values(), strict=True), strict=False):
            heading = self.about(line)
            name = line.label.removesuffix(f", positions={line.policy}") if "positions=" in heading else line.label
            if set(cells) - {ABSENT}:
                found.append((heading, (name, *cells)))
        return Table(title, ("method", *used), grouped(found), note)

    def score_columns(self) -> Columns:
        """Every benchmark that was run, each score with its interval, the paper's beside it."""
        columns = {}
        for name in self.names:
            runs = [line.runs[name] for line in self.lines if name in line.runs]
            run = next((row for row in runs if row.metrics), None)
            asked = "no complete run" if run is None else f"{run.metrics['questions']} questions"  # type: ignore[index]
            about = f", {run.images} images" if run and run.images else ""
            scores = [with_interval(self.cell(line, name)) for line in self.lines]
            columns[f"{self.title(name)} ({asked}{about})"] = scores
            columns[f"{self.title(name)}, paper"] = [decimal(self.printed(line, name)) for line in self.lines]
        return columns

    def mean_columns(self) -> Columns:
        if not self.averaged:
            return {}
        means = [self.accuracy(line) for line in self.lines]
        acc = [ABSENT if one is None else f"{one.value:.1f}{half(one.bounds)}{mark(one.p, 1.0)}" for one in means]
        return {"Acc": acc, "Rel (%)": [decimal(self.relative(line)) for line in self.lines]}

    def cost_columns(self) -> Columns:
        """Means over the benchmarks that every line with a finished run has finished, absent unless known for each."""
        finished = [{name for name, row in line.runs.items() if row.metrics is not None} for line in self.lines]
        common = set.intersection(*filter(None, finished)) if any(finished) else set()
        known = self.frame[self.frame["benchmark"].isin(common or self.names)]
        means = known.groupby("line")[list(COSTS)].agg(lambda values: values.astype(float).mean(skipna=False))
        whole = means["ece"].notna().all()  # calibration of some lines only cannot be compared
        columns = {}
        for key, (title, unit) in COSTS.items():
            if whole or key not in CALIBRATION:
                found = means[key].dropna().to_dict()
                columns[title] = [number(found.get(place), unit) for place in range(len(self.lines))]
        return columns

    @property
    def note(self) -> str:
        mean = f" Acc: mean of {', '.join(map(self.title, self.averaged))}." if self.averaged else ""
        whom = ALL if self.against == FULL else self.against or "the row it belongs to"
        return (
            f"Score ± half of its 95 % interval (bootstrap over images, {RESAMPLES} resamples). † p < 0.05 against "
            f"{whom}, paired; ‡ also after Holm's correction.{mean}"
        )

    def differences(self) -> Table:
        """Each line minus its reference, paired by question; p corrected over the lines under one heading."""
        columns = {
            self.title(name): self._differences([self.test(line, name) for line in self.reduced]) for name in self.names
        }
        if len(self.averaged) > 1:
            means = [self.difference(line) for line in self.reduced]
            columns[f"mean of {len(self.averaged)}"] = self._differences(means)
        note = (
            "Points with 95 % interval, paired by question; above zero the method of the line is better. p: exact, "
            "after Holm's correction over the methods of the block."
        )
        title = f"Difference to {self.against} with the same budget" if self.against else "Differences"
        return self.tabulated(title, columns, note, self.reduced)

    def _differences(self, tests: Sequence[Comparison | MeanDifference | None]) -> list[str]:
        """The cells of the reduced lines."""
        headings = [self.about(line) for line in self.reduced]
        holm: dict[int, float] = {}
        for heading in set(headings):
            own = {place: test.p for place, test in enumerate(tests) if test is not None and headings[place] == heading}
            holm |= corrected(own)
        p = [f", p {p_value(holm[place])}" if place in holm else "" for place in range(len(tests))]
        return [signed(test.difference, test.bounds) + p[place] if test else ABSENT for place, test in enumerate(tests)]


class Section(Grid):
    """Runs that differ in method, budget and benchmark only, each compared with a reference of the same questions: the
    method `against`, with the same budget and position policy.
    """

    def __init__(self, rows: Sequence[Row], against: str = FULL, bench: Bench = ()) -> None:
        self.rows, self.against, self.bench = rows, against, bench
        self.full, self.reduced = full_line(rows), reduced_lines(rows)

    @cached_property
    def names(self) -> list[str]:  # type: ignore[override]
        """The benchmarks that were run: those of the paper's Acc in its order, then others by name."""
        columns = paper.averaged()

        ranks = {name: columns.index(own) for name, own in self._columns.items() if own in columns}
        return sorted(self._columns, key=lambda name: (ranks.get(name, len(columns)), name))

    @cached_property
    def _columns(self) -> Mapping[str, str]:
        """The paper's column of each benchmark that was run."""
        return {row.benchmark: row.facts.column or "" for row in reversed(self.rows)}

    def reference(self, line: Line) -> Line | None:
        if self.against == FULL:
            return self.full
        return None if line is self.full else self.others.get((line.tokens, line.policy))

    @staticmethod
    def words(line: Line) -> tuple[str, str]:
        """The method of a line with all its options, and with those that distinguish it from others."""
        row = next(iter(line.runs.values()))
        return one_word(row.config["method"], row.config["changed"]), row.variant

    @cached_property
    def others(self) -> Mapping[tuple[float, str | None], Line]:
        """The lines of `against` by budget and position policy."""
        return {(line.tokens, line.policy): line for line in self.reduced if self.against in self.words(line)}

    @cached_property
    def averaged(self) -> list[str]:  # type: ignore[override]
        """The benchmarks of Acc: those of the paper that have scores, and can move if all tokens were run."""
        scored = {row.benchmark for row in self.rows if row.score is not None or row.metrics is None}
        full = self.full.runs if self.full else {}
        still = {name for name, row in full.items() if row.complete and not can_move(row)}
        papers = [name for name in self.names if self._columns[name] in paper.averaged()]
        return [name for name in papers if name in scored - still]

    def scores(self) -> Table:
        columns = {**self.score_columns(), **self.mean_columns(), **self.cost_columns()}
        return self.tabulated("Scores", columns, self.note, self.lines)

    def tables(self) -> list[Table]:
        """Scores with intervals and costs; differences to the method that the section is compared against."""
        found = [self.scores(), *([self.differences()] if self.against != FULL else [])]
        return [table for table in found if table.groups]


def in_sections(rows: Iterable[Row], against: str = FULL, bench: Bench = ()) -> list[Section]:
    """Runs in sections, those of all questions before those of the first few. OptionError without runs of `against`."""
    found = [Section(own, against, bench) for own in by_setting(rows)]
    if found and against != FULL and not any(section.others for section in found):
        known = {section.words(line)[0] for section in found for line in section.reduced}
        raise OptionError(f"--against {against}: no such runs, only of {', '.join(sorted(known))}")
    return sorted(found, key=lambda section: bool(section.rows[0].part))


def title(section: Section) -> str:
    config, parts = section.rows[0].config, sorted({row.part for row in section.rows if row.limited})
    versions = {name: config["versions"].get(name) for name in ("torch", "transformers")}
    later = {name: config["versions"].get(name, 1) for name in ("reduction", "host", "serving")}
    later |= {row.benchmark: row.config.get("benchmark_version", 1) for row in section.rows}
    raised = {f"{name} version": number for name, number in later.items() if number != 1}
    where = [str(config["device"]), *(f"{name} {number}" for name, number in {**versions, **raised}.items())]
    return f"**{config['model']}** on `{config['data']}`{''.join(f', {part}' for part in parts)} ({', '.join(where)})"


def written(sections: Sequence[Section], form: str = "markdown") -> str:
    """All tables as `markdown`, `latex` or `csv`: a part for every setting; CSV has every cell as a line."""
    import pandas as pd

    if form == "csv":
        found = [section.frame.drop(columns="line") for section in sections]
        return pd.concat(found).to_csv(index=False, lineterminator="\r\n") if found else ""
    write, head = (latex, "% ") if form == "latex" else (markdown, "")
    parts = [PACKAGES] if form == "latex" else []
    for section in sections:
        parts += [head + title(section), *map(write, section.tables())]
    return "\n\n".join(parts) or NOTHING


def can_move(row: Row) -> bool:
    far = row.score is not None and (row.score - row.chance) / row.scale >= MOVES
    return far and above_chance(row.score, row.bounds, row.chance)


# ---- cells as text


def with_interval(cell: ScoreCell | None) -> str:
    """A score with half of its interval, mark and spread over seeds; of an incomplete run why there is none."""
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
