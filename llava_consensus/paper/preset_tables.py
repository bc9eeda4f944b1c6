"""Tables of a preset (`preset.py`): ours with the paper's numbers beside, and which differences are real."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from llava_consensus.evaluation.report.rows import Line, Row
from llava_consensus.evaluation.report.section import Grid, ScoreCell, record, signed, with_interval
from llava_consensus.evaluation.report.stats import LEAST
from llava_consensus.evaluation.report.table import ABSENT, Table, one_decimal, pivoted
from llava_consensus.paper.preset import Preset, PresetRow

FULL = "all tokens"
Key = tuple[str, str]  # label of a row with its tokens, benchmark


def key(row: PresetRow | None, benchmark: str) -> Key:
    """Under which the run of a row is found; None is all tokens."""
    return (FULL if row is None else f"{row.label} {row.tokens}", benchmark)


def scale(column: str) -> float:
    """Divisor that makes a printed number a percentage."""
    return 20.0 if column.startswith("mme") else 1.0


@dataclass(frozen=True)
class Results(Grid):
    """A preset and its finished runs, each compared with the reference that has as many tokens."""

    preset: Preset
    runs: Mapping[Key, Row]
    benches: Sequence[Mapping[str, Any]] = ()  # contents of bench files: the times of `costs`

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
        """Benchmarks without a score in any run, because their answers were not judged."""
        scored = {name for (_, name), run in self.runs.items() if run.score is not None}
        return [name for name in self.names if scored and name not in scored]

    def reference(self, line: Line, name: str) -> Row | None:
        """The run of the row that a line is compared with."""
        row = next((row for row in self.preset.rows if (row.tokens, row.label) == (line.tokens, line.label)), None)
        other = None if row is None else self.preset.reference_of(row)
        return None if other is None else self.runs.get(key(other, name))

    def at(self, row: PresetRow | None, name: str) -> ScoreCell | None:
        """The cell of a row and a benchmark."""
        return self.cell(self.full if row is None else Line(row.tokens, row.label, {}), name)

    def printed(self, row: PresetRow | None, name: str) -> float | None:
        """The paper's number."""
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

    def timed(self, row: PresetRow | None) -> Mapping[str, Any]:
        """The measurement of a row in the bench files, the first that has its method and budget; empty without one."""
        method, tokens = ("full", None) if row is None else (row.method, row.tokens)
        rows = (one for content in self.benches for one in content["rows"])
        return next((one for one in rows if one["method"] == method and tokens in (None, one["tokens"])), {})

    def cache_bytes(self, row: PresetRow | None) -> float | None:
        """Bytes of the KV cache after a prefill, mean over the benchmarks that were run."""
        accounts = [run.metrics["account"] for run in self.line(row).runs.values() if run.metrics]
        found = [one["measured"]["kv_bytes"] for one in accounts if one and one.get("measured")]
        return float(np.mean(found)) if found else None

    def title(self, name: str) -> str:
        """A benchmark's name as papers write it."""
        return next((run.facts.title for (_, found), run in self.runs.items() if found == name), name)


def preset_tables(results: Results) -> list[Table]:
    """Our scores and the paper's, column by column, the differences to the reference, accuracy beside cost where the
    paper's table has both, and the judge's scores where it has them.
    """
    printed = results.preset.printed_row(results.preset.full) or {}
    further = [costs(results)] if "rel_percent" in printed else []
    further += [judged_scores(results)] if any(name.endswith("_score") for name in printed) else []
    return [beside(results), differences(results), *further]


def costs(results: Results) -> Table:
    """Acc, Rel, times and KV cache of every row, ours and the paper's."""
    titles = {
        "acc": "Acc",
        "rel_percent": "Rel (%)",
        "ttft_ms": "TTFT (ms)",
        "tpot_ms": "TPOT (ms)",
        "kv_mb": "KV (MiB)",
    }
    columns = {
        key: words for name, title in titles.items() for key, words in ((name, title), (f"{name} paper", "paper"))
    }
    full = results.scores(results.full)

    def cells() -> Iterator[tuple[str, str, str, str]]:
        for row in (None, *results.preset.rows):
            line = (FULL, FULL) if row is None else (f"{row.tokens:g} tokens", row.label)
            printed = results.preset.printed_row(results.preset.full if row is None else row.printed) or {}
            ours = results.scores(results.line(row))
            timed, cache = results.timed(row), results.cache_bytes(row)
            found = {
                "acc": None if ours is None else float(np.mean(ours)),
                "rel_percent": None if ours is None or not full or not sum(full) else 100 * sum(ours) / sum(full),
                "ttft_ms": timed.get("ttft_ms"),
                "tpot_ms": timed.get("tpot_ms"),
                "kv_mb": None if cache is None else cache / 2**20,
            }
            for name, value in found.items():
                yield *line, name, one_decimal(value)
                yield *line, f"{name} paper", one_decimal(printed.get(name))

    note = (
        f"Acc and Rel over {', '.join(map(results.title, results.averaged)) or 'no benchmark'}. Times: bench*.json "
        "beside the runs (llava-consensus bench with these methods and budgets), those of the paper on its GPU. KV: "
        "as the caches of these runs were, mean over benchmarks."
    )
    return pivoted(f"{results.preset.title}: accuracy and cost", "", columns, cells(), note)


def judged_scores(results: Results) -> Table:
    """The judge's mean scores, 0 to 5, ours and the paper's."""
    columns: dict[str, str] = {}
    for name in results.names:
        columns |= {name: results.title(name), f"{name} paper": "paper"}

    def cells() -> Iterator[tuple[str, str, str, str]]:
        for row in (None, *results.preset.rows):
            line = (FULL, FULL) if row is None else (f"{row.tokens:g} tokens", row.label)
            printed = results.preset.printed_row(results.preset.full if row is None else row.printed) or {}
            for name, column in results.preset.benchmarks.items():
                run = results.runs.get(key(row, name))
                ours = None if run is None else run.report.get("average_score")
                theirs = printed.get(column.replace("_acc", "_score"))
                yield *line, name, ABSENT if ours is None else f"{ours:.2f}"
                yield *line, f"{name} paper", ABSENT if theirs is None else f"{theirs:.2f}"

    note = "Of runs that a judge graded (llava-consensus judge); the others are blank."
    return pivoted(f"{results.preset.title}: scores of the judge", "", columns, cells(), note)


def beside(results: Results) -> Table:
    """Our scores and the paper's."""
    preset, papers = results.preset, bool(results.preset.printed)
    columns: dict[str, str] = {}
    for name in preset.benchmarks:
        columns |= {name: results.title(name), f"{name} paper": "paper"} if papers else {name: results.title(name)}
    columns |= {"mean": "mean", "mean paper": "paper"} if papers else {"mean": "mean"}

    def cells() -> Iterator[tuple[str, str, str, str]]:
        for row in (None, *preset.rows):
            line = (FULL, FULL) if row is None else (f"{row.tokens:g} tokens", row.label)
            for name in preset.benchmarks:
                yield *line, name, with_interval(results.at(row, name))
                yield *line, f"{name} paper", one_decimal(results.printed(row, name))
            for column, text in zip(("mean", "mean paper"), results.means(row), strict=True):
                yield *line, column, text

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
    return pivoted(preset.title, "", columns, cells(), note)


def differences(results: Results) -> Table:
    """Each row less the reference with as many tokens, with its interval."""
    preset = results.preset

    def cells() -> Iterator[tuple[str, str, str, str]]:
        for row in preset.rows if preset.reference else [row for row in preset.rows if row.against]:
            other = preset.reference_of(row)
            label = f"{row.label} less {other.label}" if row.against and other else row.label
            for name in preset.benchmarks:
                cell = results.at(row, name)
                test = None if cell is None else cell.test
                text = ABSENT if cell is None or test is None else signed(test.difference, test.bounds) + cell.mark
                yield f"{row.tokens:g} tokens", label, name, text

    marks = [cell.mark for cell in results.tested if cell.test and cell.test.enough]
    note = (
        f"Difference and 95 % interval, paired by question, pictures drawn together. Of {len(marks)} differences that "
        f"have a test {marks.count('‡')} are real after Holm's correction (‡), {marks.count('†')} more only where each "
        f"is looked at alone (†). From fewer than {LEAST} pictures there is no interval and no test."
    )
    title = f"Difference to {preset.reference}" if preset.reference else "Differences"
    return pivoted(title, "", {name: results.title(name) for name in preset.benchmarks}, cells(), note)


def csv_rows(results: Results) -> list[dict[str, Any]]:
    """Every cell that was run as a line, with the paper's number."""
    lines = []
    for row in (None, *results.preset.rows):
        for name in results.preset.benchmarks:
            line, cell = results.line(row), results.at(row, name)
            if cell is not None:
                lines.append({**record(line, cell), "printed": results.printed(row, name)})
    return lines
