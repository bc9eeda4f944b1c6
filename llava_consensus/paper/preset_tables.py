"""Tables of a preset (`preset.py`): ours with the paper's numbers beside, which differences are real, and how far the
paper's own numbers for one configuration lie apart.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from llava_consensus.evaluation.report import paper
from llava_consensus.evaluation.report.rows import Line, Row
from llava_consensus.evaluation.report.section import Cell, Grid, signed, with_interval
from llava_consensus.evaluation.report.stats import LEAST
from llava_consensus.evaluation.report.table import ABSENT, Cells, Group, Table, groups, one_decimal
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


def scale(column: str) -> float:
    """What a printed number is divided by to be a percentage."""
    return 20.0 if column.startswith("mme") else 1.0


@dataclass(frozen=True)
class Results(Grid):
    """A preset and its finished runs, each compared with the reference that has as many tokens."""

    preset: Preset
    runs: Mapping[Key, Row]

    @cached_property
    def names(self) -> list[str]:  # type: ignore[override]
        """The preset's benchmarks."""
        return list(self.preset.benchmarks)

    @cached_property
    def full(self) -> Line:  # type: ignore[override]
        """The runs with all tokens."""
        return self.line(None)

    @cached_property
    def lines(self) -> list[Line]:  # type: ignore[override]
        """All tokens, then a line for each row of the preset."""
        return [self.full, *map(self.line, self.preset.rows)]

    def line(self, row: PresetRow | None) -> Line:
        """A row's runs; None is all tokens."""
        found = {name: self.runs[key(row, name)] for name in self.preset.benchmarks if key(row, name) in self.runs}
        return Line(0, FULL, found) if row is None else Line(row.tokens, row.label, found)

    @property
    def unjudged(self) -> list[str]:
        """The benchmarks that no run has a score of, because nobody has judged them."""
        scored = {name for (_, name), run in self.runs.items() if run.score is not None}
        return [name for name in self.names if scored and name not in scored]

    def reference(self, line: Line, name: str) -> Row | None:
        """The run of the row that a line is compared with."""
        row = next((row for row in self.preset.rows if (row.tokens, row.label) == (line.tokens, line.label)), None)
        other = None if row is None else self.preset.reference_of(row)
        return None if other is None else self.runs.get(key(other, name))

    def at(self, row: PresetRow | None, name: str) -> Cell | None:
        """The cell of a row and a benchmark."""
        return self.cell(self.full if row is None else Line(row.tokens, row.label, {}), name)

    def printed(self, row: PresetRow | None, name: str) -> float | None:
        """What the paper prints."""
        printed = self.preset.printed_row(self.preset.full if row is None else row.printed)
        return None if printed is None else printed.get(self.preset.benchmarks[name])

    def means(self, row: PresetRow | None) -> tuple[str, str]:
        """Mean of the benchmarks in percent, where each has a score, and of the paper's numbers made as ours is."""
        ours = self.scores(self.line(row))
        theirs = [
            None if (value := self.printed(row, name)) is None else value / scale(self.preset.benchmarks[name])
            for name in self.averaged
        ]
        known = [value for value in theirs if value is not None]
        return (
            one_decimal(None if ours is None else float(np.mean(ours))),
            one_decimal(float(np.mean(known)) if known and len(known) == len(theirs) else None),
        )

    def title(self, name: str) -> str:
        """How papers write a benchmark's name."""
        return next((run.facts.title for (_, found), run in self.runs.items() if found == name), name)


def preset_tables(results: Results) -> list[Table]:
    """Scores, differences to the reference, and for the ablations the paper's own spread."""
    return [beside(results), differences(results), *([spread(results)] if results.preset.is_ablation else [])]


def beside(results: Results) -> Table:
    """Our scores and the paper's, column by column."""
    preset, papers = results.preset, bool(results.preset.printed)

    def line(row: PresetRow | None) -> Cells:
        cells = [FULL if row is None else row.label]
        for name in preset.benchmarks:
            cells += [with_interval(results.at(row, name)), *[one_decimal(results.printed(row, name))] * papers]
        return (*cells, *results.means(row)[: 1 + papers])

    beside_it = ["paper"] * papers
    head = ["", *(part for name in preset.benchmarks for part in (results.title(name), *beside_it)), "mean", *beside_it]
    printed = " The paper's numbers are for its own checkpoint on the complete benchmarks." if papers else ""
    parts = {name: run.part for name, run in results.full.runs.items() if run.limited}
    first = "".join(f" {results.title(name)}: {part}." for name, part in parts.items())
    near = results.guessed()
    guessed = f" Not in the mean, because all tokens cannot be told from guessing there: {near}." if near else ""
    note = (
        f"Ours: score ± half of its 95 % interval (MME in points).{printed}{first} Mean: of the columns that have "
        f"scores, MME / 20{', of ours and of the papers alike' if papers else ''}. † differs from "
        f"{preset.reference or 'the row it is compared with'} with as many tokens, paired by question (p < 0.05); ‡ "
        f"also after Holm's correction over the table.{guessed}"
    )
    return Table(preset.title, tuple(head), (Group(FULL, (line(None),)), *by_tokens(preset.rows, line)), note)


def differences(results: Results) -> Table:
    """Each row less the reference with as many tokens, with its interval."""
    preset = results.preset

    def difference(row: PresetRow, name: str) -> str:
        cell = results.at(row, name)
        if cell is None or cell.test is None:
            return ABSENT
        return signed(cell.test.difference, cell.test.bounds) + cell.mark

    def line(row: PresetRow) -> Cells:
        other = preset.reference_of(row)
        label = f"{row.label} less {other.label}" if row.against and other else row.label
        return (label, *(difference(row, name) for name in preset.benchmarks))

    marks = [cell.mark for cell in results.tested if cell.test and cell.test.enough]
    note = (
        f"Difference and 95 % interval, paired by question, pictures drawn together. Of {len(marks)} differences that "
        f"have a test {marks.count('‡')} are real after Holm's correction (‡), {marks.count('†')} more only where each "
        f"is looked at alone (†). From fewer than {LEAST} pictures there is no interval and no test."
    )
    head = ("", *(results.title(name) for name in preset.benchmarks))
    title = f"Difference to {preset.reference}" if preset.reference else "Differences"
    shown = preset.rows if preset.reference else [row for row in preset.rows if row.against]
    return Table(title, head, by_tokens(shown, line), note)


def spread(results: Results) -> Table:
    """What the paper prints for one and the same configuration, and how far the rows of this table lie apart in it."""
    preset, columns, same = results.preset, list(results.preset.benchmarks.values()), {}
    for table, values, name in SAME:
        row = next(row for row in paper.printed_tables()[table] if values.items() <= row.items())
        same[name] = row | {old: row[new] for old, new in ALIASES.items() if new in row}
    here = [found for row in preset.rows if (found := preset.printed_row(row.printed)) is not None]

    def apart(rows: Sequence[Mapping[str, Any]], column: str) -> str:
        values = [row[column] for row in rows if row.get(column) is not None]
        return one_decimal(max(values) - min(values) if values else None)

    lines = [(name, *(one_decimal(row.get(column)) for column in columns)) for name, row in same.items()]
    ends = [
        ("largest less smallest of these", *(apart(list(same.values()), column) for column in columns)),
        (f"largest less smallest of {preset.title.split(':')[0]}", *(apart(here, column) for column in columns)),
    ]
    note = (
        "All four rows are the paper's default configuration at 128 tokens, so differences no larger than theirs mean "
        "nothing between its tables."
    )
    head = ("", *(results.title(name) for name in preset.benchmarks))
    parts = (Group("one configuration, printed four times", tuple(lines)), Group("how far apart", tuple(ends)))
    return Table("The paper's own spread", head, parts, note)


def by_tokens(rows: Sequence[PresetRow], line: Callable[[PresetRow], Cells]) -> tuple[Group, ...]:
    """Lines of a preset under the headings of their budgets."""
    return groups((f"{row.tokens:g} tokens", line(row)) for row in rows)


def csv_rows(results: Results) -> list[dict[str, Any]]:
    """Every cell as a line: unrounded, with its interval, its difference to the reference, and the paper's number."""
    lines = []
    for row in (None, *results.preset.rows):
        for name in results.preset.benchmarks:
            cell = results.at(row, name)
            test = None if cell is None else cell.test
            low, high = (None, None) if cell is None or cell.bounds is None else cell.bounds
            apart = (None, None) if test is None or test.bounds is None else test.bounds
            lines.append(
                {
                    "preset": results.preset.name,
                    "label": FULL if row is None else row.label,
                    "method": "full" if row is None else row.method,
                    "tokens": None if row is None else row.tokens,
                    "merged": None if row is None else row.merged,
                    "benchmark": name,
                    "score": None if cell is None else cell.row.score,
                    "low": low,
                    "high": high,
                    "difference": None if test is None else test.difference,
                    "difference_low": apart[0],
                    "difference_high": apart[1],
                    "p": None if test is None else test.p,
                    "p_corrected": cell.corrected if cell is not None and test is not None else None,
                    "printed": results.printed(row, name),
                }
            )
    return lines
