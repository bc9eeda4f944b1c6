"""Tables of a preset (`preset.py`): ours with the paper's numbers beside, which differences are real, and how far the
paper's own numbers for one configuration lie apart.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.report.rows import Row
from llava_consensus.evaluation.report.section import Cell, beside_chance, half, state
from llava_consensus.evaluation.report.stats import (
    SIGNIFICANT,
    Comparison,
    above_chance,
    compare,
    draws,
    holm,
    interval,
)
from llava_consensus.evaluation.report.table import ABSENT, Group, Table
from llava_consensus.paper.preset import Preset, PresetRow

FULL = "all tokens"
SAME = (  # the default configuration at 128 tokens, which the paper prints four times: table, values, its name there
    ("ablation_alpha", {"alpha": 0.7}, "T5, alpha 0.7"),
    ("ablation_anchor", {"merge": 20.0}, "T8, M = 20"),
    ("ablation_score", {"vision": "class", "cross": "all"}, "T9, class and all"),
    ("llava_1_5_7b", {"tokens": 128, "method": "ConsensusDrop"}, "T1, ConsensusDrop at 128"),
)
ALIASES = {"mme": "mme_perception", "scienceqa": "sqa_img"}  # columns that T1 calls otherwise
Key = tuple[str, str]  # label of a row with its tokens, benchmark


def key(row: PresetRow | None, benchmark: str) -> Key:
    """Under which the run of a row is found; None is all tokens."""
    return (FULL if row is None else f"{row.label} {row.tokens}", benchmark)


@dataclass(frozen=True)
class Results:
    """A preset and its finished runs. Every test of it is corrected for their number (Holm)."""

    preset: Preset
    runs: Mapping[Key, Row]

    @cached_property
    def tests(self) -> dict[Key, tuple[Comparison, float]]:
        """Each run against the reference with as many tokens, paired by question, with the corrected p."""
        found = {}
        for row in self.preset.rows:
            reference = self.preset.reference_of(row)
            for benchmark in self.preset.benchmarks:
                pair = self.runs.get(key(row, benchmark)), self.runs.get(key(reference, benchmark))
                if reference not in (None, row) and pair[0] and pair[1]:
                    found[key(row, benchmark)] = compare(pair[0], pair[1])
        made = {place: test for place, test in found.items() if test is not None}
        return dict(zip(made, zip(made.values(), holm([test.p for test in made.values()]), strict=True), strict=True))

    def mark(self, row: PresetRow | None, benchmark: str) -> str:
        """† for p < 0.05, ‡ where it is so after the correction."""
        if row is None or key(row, benchmark) not in self.tests:
            return ""
        test, corrected = self.tests[key(row, benchmark)]
        return "‡" if corrected < SIGNIFICANT else "†" if test.p < SIGNIFICANT else ""

    def score(self, row: PresetRow | None, benchmark: str) -> str:
        """A score with half of its interval and its mark."""
        run = self.runs.get(key(row, benchmark))
        said = state(None if run is None else Cell(run))
        if said or run is None or run.sample is None:
            return said or (ABSENT if run is None else f"{run.score:.1f}")
        return f"{run.score:.1f}{half(interval(draws(run.sample, benchmark)))}{self.mark(row, benchmark)}"

    @cached_property
    def averaged(self) -> list[str]:
        """The benchmarks that enter means: without those that no run has a score of, because nobody has judged them,
        and those in which all tokens cannot be told from guessing.
        """
        scored = {benchmark for (_, benchmark), run in self.runs.items() if run.score is not None}
        names = [benchmark for benchmark in self.preset.benchmarks if benchmark in scored or not scored]
        return [benchmark for benchmark in names if benchmark not in self.near_chance]

    @cached_property
    def near_chance(self) -> dict[str, Cell]:
        """The run of all tokens on each benchmark in which it cannot be told from guessing."""
        found: dict[str, Cell] = {}
        for benchmark in self.preset.benchmarks:
            run = self.runs.get(key(None, benchmark))
            if run is not None and run.complete:
                cell = Cell(run)
                found |= {} if above_chance(run.score, run.bounds, run.chance) else {benchmark: cell}
        return found

    def mean(self, row: PresetRow | None) -> str:
        """Mean of the benchmarks in percent, where each has a score."""
        runs = [self.runs.get(key(row, benchmark)) for benchmark in self.averaged]
        if not runs or not all(run is not None and run.complete for run in runs):
            return ABSENT
        return f"{np.mean([run.score / run.facts.scale for run in runs if run and run.score is not None]):.1f}"

    def printed(self, row: PresetRow | None, benchmark: str) -> float | None:
        """What the paper prints."""
        printed = self.preset.printed_row(self.preset.full if row is None else row.printed)
        return None if printed is None else printed.get(self.preset.benchmarks[benchmark])

    def printed_mean(self, row: PresetRow | None) -> str:
        """Mean of the paper's numbers, as ours is made."""
        values = [self.printed(row, benchmark) for benchmark in self.averaged]
        if not values or None in values:
            return ABSENT
        scales = (scale(self.preset.benchmarks[benchmark]) for benchmark in self.averaged)
        return f"{np.mean([value / one for value, one in zip(values, scales, strict=True) if value is not None]):.1f}"

    def title(self, benchmark: str) -> str:
        """How papers write a benchmark's name."""
        return next((run.facts.title for (_, name), run in self.runs.items() if name == benchmark), benchmark)


def scale(column: str) -> float:
    """What a printed number is divided by to be a percentage."""
    return 20.0 if column.startswith("mme") else 1.0


def tables(results: Results) -> list[Table]:
    """Scores, differences to the reference, and for the ablations the paper's own spread."""
    return [beside(results), differences(results), *([spread(results)] if results.preset.is_ablation else [])]


def beside(results: Results) -> Table:
    """Our scores and the paper's, column by column."""
    preset = results.preset

    papers = bool(preset.printed)

    def line(row: PresetRow | None) -> tuple[str, ...]:
        cells = [FULL if row is None else row.label]
        for benchmark in preset.benchmarks:
            cells += [results.score(row, benchmark), *([number(results.printed(row, benchmark))] if papers else [])]
        return (*cells, results.mean(row), *([results.printed_mean(row)] if papers else []))

    beside_it = ["paper"] if papers else []
    head = ["", *(part for name in preset.benchmarks for part in (results.title(name), *beside_it)), "mean", *beside_it]
    printed = " The paper's numbers are for its own checkpoint on the complete benchmarks." if papers else ""
    first = "".join(f" {results.title(name)}: the first {count:,} questions." for name, count in preset.limits.items())
    near = "; ".join(f"{results.title(name)} {beside_chance(cell)}" for name, cell in results.near_chance.items())
    guessed = f" Not in the mean, because all tokens cannot be told from guessing there: {near}." if near else ""
    note = (
        f"Ours: score ± half of its 95 % interval (MME in points).{printed}{first} Mean: of the columns that have "
        f"scores, MME / 20{', of ours and of the papers alike' if papers else ''}. † differs from "
        f"{preset.reference or 'the row it is compared with'} with as many tokens, paired by question (p < 0.05); ‡ "
        f"also after Holm's correction over the table.{guessed}"
    )
    return Table(preset.title, tuple(head), (Group(FULL, (line(None),)), *by_tokens(preset, line)), note)


def differences(results: Results) -> Table:
    """Each row less the reference with as many tokens, with its interval."""
    preset = results.preset

    def cell(row: PresetRow, benchmark: str) -> str:
        if key(row, benchmark) not in results.tests:
            return ABSENT
        test, _ = results.tests[key(row, benchmark)]
        return f"{test.difference:+.1f} ({test.low:+.1f} to {test.high:+.1f}){results.mark(row, benchmark)}"

    def line(row: PresetRow) -> tuple[str, ...]:
        return (compared(preset, row), *(cell(row, benchmark) for benchmark in preset.benchmarks))

    marks = [results.mark(row, benchmark) for row in preset.rows for benchmark in preset.benchmarks]
    note = (
        f"Difference and 95 % interval, paired by question. Of {len(results.tests)} differences {marks.count('‡')} are "
        f"real after Holm's correction (‡), {marks.count('†')} more only where each is looked at alone (†)."
    )
    head = ("", *(results.title(benchmark) for benchmark in preset.benchmarks))
    title = f"Difference to {preset.reference}" if preset.reference else "Differences"
    return Table(title, head, by_tokens(preset, line, compared_rows(preset)), note)


def spread(results: Results) -> Table:
    """What the paper prints for one and the same configuration, and how far the rows of this table lie apart in it."""
    preset, columns = results.preset, list(results.preset.benchmarks.values())
    same = _same()
    here = [found for row in preset.rows if (found := preset.printed_row(row.printed)) is not None]

    def apart(rows: Sequence[Mapping[str, Any]], column: str) -> str:
        values = [row[column] for row in rows if row.get(column) is not None]
        return f"{max(values) - min(values):.1f}" if values else ABSENT

    lines = [(name, *(number(row.get(column)) for column in columns)) for name, row in same]
    ends = [
        ("largest less smallest of these", *(apart([row for _, row in same], column) for column in columns)),
        (f"largest less smallest of {preset.title.split(':')[0]}", *(apart(here, column) for column in columns)),
    ]
    note = (
        "All four rows are the paper's default configuration at 128 tokens, so differences no larger than theirs mean "
        "nothing between its tables."
    )
    head = ("", *(results.title(benchmark) for benchmark in preset.benchmarks))
    groups = (Group("one configuration, printed four times", tuple(lines)), Group("how far apart", tuple(ends)))
    return Table("The paper's own spread", head, groups, note)


def _same() -> list[tuple[str, Mapping[str, Any]]]:
    """The paper's four rows of its default configuration, with their names, all with the columns of the ablations."""
    found: list[tuple[str, Mapping[str, Any]]] = []
    for table, values, name in SAME:
        row = next(row for row in paper.tables()[table] if values.items() <= row.items())
        found.append((name, {**row, **{old: row[new] for old, new in ALIASES.items() if new in row}}))
    return found


def compared(preset: Preset, row: PresetRow) -> str:
    """What a row's difference is called: its own label, or both labels where the row says what it is compared with."""
    reference = preset.reference_of(row)
    return f"{row.label} less {reference.label}" if row.against and reference else row.label


def compared_rows(preset: Preset) -> Sequence[PresetRow]:
    """The rows of the table of differences: all, or those that are compared where there is no common reference."""
    return preset.rows if preset.reference else [row for row in preset.rows if row.against]


def by_tokens(
    preset: Preset, line: Callable[[PresetRow], tuple[str, ...]], rows: Sequence[PresetRow] | None = None
) -> tuple[Group, ...]:
    """Lines of a preset under the headings of their budgets."""
    shown = preset.rows if rows is None else rows
    return tuple(
        Group(f"{count:g} tokens", tuple(line(row) for row in shown if row.tokens == count))
        for count in dict.fromkeys(row.tokens for row in shown)
    )


def number(value: float | None) -> str:
    """A printed number."""
    return ABSENT if value is None else f"{value:.1f}"


def csv_rows(results: Results) -> list[dict[str, Any]]:
    """Every cell as a line: unrounded, with its interval, its difference to the reference, and the paper's number."""
    lines = []
    for row in (None, *results.preset.rows):
        for benchmark in results.preset.benchmarks:
            run, tested = results.runs.get(key(row, benchmark)), results.tests.get(key(row, benchmark))
            sample = None if run is None else run.sample
            low, high = (None, None) if sample is None else interval(draws(sample, benchmark))
            test, corrected = tested or (None, None)
            lines.append(
                {
                    "preset": results.preset.name,
                    "label": FULL if row is None else row.label,
                    "method": "full" if row is None else row.method,
                    "tokens": None if row is None else row.tokens,
                    "merged": None if row is None else row.merged,
                    "benchmark": benchmark,
                    "score": None if run is None else run.score,
                    "low": low,
                    "high": high,
                    "difference": None if test is None else test.difference,
                    "difference_low": None if test is None else test.low,
                    "difference_high": None if test is None else test.high,
                    "p": None if test is None else test.p,
                    "p_corrected": corrected,
                    "printed": results.printed(row, benchmark),
                }
            )
    return lines
