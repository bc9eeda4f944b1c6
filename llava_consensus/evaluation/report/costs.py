"""What a method costs beside what it scores: the three token counts, FLOPs, KV cache, times. Pure functions of files.

`COLUMNS` is the only list of costs: tables and CSV are made from it. Counts, FLOPs and bytes come from `account` in
metrics.json (means over the benchmarks that all lines have finished; the cache as measured where a run measured it);
times from `bench.json` in the folder of results: rows with `method` (its name, or its label in tables), `tokens`,
`ttft_ms`, `tpot_ms`, `share` (the method's own part of the time to first token). What was not measured is "-".
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import read_json
from llava_consensus.evaluation.report.columns import ABSENT, NAME, Column, Table, tabulate
from llava_consensus.evaluation.report.layout import means
from llava_consensus.evaluation.report.rows import FULL, Line, Row
from llava_consensus.evaluation.report.section import Section

BENCH = "bench.json"
AGAIN = "Measure again, or move it away"

Bench = Sequence[Mapping[str, Any]]


class Measured(NamedTuple):
    """What is known of the costs of one run: `account` of its metrics, and the row of bench.json about its method."""

    account: Mapping[str, Any]
    times: Mapping[str, Any]


def account(key: str) -> Callable[[Measured], float | None]:
    """Reads one number of a run's account: as measured where it was, the total where it has parts."""

    def read(run: Measured) -> float | None:
        value = (run.account.get("measured") or {}).get(key, run.account.get(key))
        return value.get("total") if isinstance(value, Mapping) else value

    return read


def timed(key: str) -> Callable[[Measured], float | None]:
    """Reads one number of the bench row."""
    return lambda run: run.times.get(key)


def count(value: float | None) -> str:
    """A number of tokens."""
    return ABSENT if value is None else f"{value:.1f}".removesuffix(".0")


def number(scale: float = 1.0) -> Callable[[float | None], str]:
    """Writes a value times `scale` with one decimal, and more for what is small."""

    def write(value: float | None) -> str:
        if value is None:
            return ABSENT
        scaled = value * scale
        return f"{scaled:.1f}" if scaled >= 1 or not scaled else f"{scaled:.3f}"

    return write


COUNTED = "Visual tokens that enter the language model, that are kept after the last cut, and the mean over its layers."
FLOPS = "FLOPs of one prefill: language model, vision tower and the method's own work."
TIMES = "TTFT, TPOT: time to the first and to each further token, medians of interleaved measurements in one process."
COLUMNS = (  # of one Measured
    Column("entering", account("entering"), count, note=COUNTED),
    Column("kept", account("kept"), count),
    Column("layer average", account("average"), count, "average"),
    Column("GFLOPs", account("flops"), number(1e-9), "flops", FLOPS),
    Column("KV (MiB)", account("kv_bytes"), number(2**-20), "kv_bytes", "KV: bytes of the cache after it."),
    Column("TTFT (ms)", timed("ttft_ms"), number(), "ttft_ms", TIMES),
    Column("TPOT (ms)", timed("tpot_ms"), number(), "tpot_ms"),
    Column("selection (% of TTFT)", timed("share"), number(100.0), "share"),
)


def read_bench(path: Path) -> list[dict[str, Any]]:
    """The rows of a bench file; none where there is no file. DataError for another kind of file."""
    if not path.is_file():
        return []
    rows = read_json(path, AGAIN)
    rows = rows.get("rows") if isinstance(rows, dict) else rows
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and {"method", "tokens"} <= row.keys() for row in rows
    ):
        raise DataError(f"{path}: not a list of rows with method and tokens. {AGAIN}")
    return rows


def comparison(section: Section, bench: Bench = ()) -> Table | None:
    """Every line with its scores and costs; None where no cost is known."""
    costs = [Column(column.title, partial(line_mean, section, bench, column), column.format) for column in COLUMNS]
    scope = f" Counts, FLOPs and KV: over {', '.join(map(section.title, section.common))}." if section.common else ""
    note = " ".join(column.note for column in COLUMNS if column.note) + scope
    table = tabulate(section, "Scores and costs", [NAME, *means(section), *costs], note)
    has_costs = any(cell != ABSENT for group in table.groups for line in group.lines for cell in line[-len(costs) :])
    return table if has_costs else None


def line_mean(section: Section, bench: Bench, column: Column, line: Line) -> float | None:
    """Mean of one cost over the benchmarks that all lines have finished, or over the line's own benchmarks where there
    are none in common; None unless the cost is known for each of these runs.
    """
    runs = [line.runs[name] for name in section.common or section.papers or section.names if name in line.runs]
    times = times_of(section, line, bench)
    values = [column.read(measured(row, times)) for row in runs] or [column.read(Measured({}, times))]
    known_values = [value for value in values if value is not None]
    return sum(known_values) / len(known_values) if len(known_values) == len(values) else None


def measured(row: Row, times: Mapping[str, Any]) -> Measured:
    """What is known of the costs of a run."""
    return Measured((row.metrics or {}).get("account") or {}, times)


def times_of(section: Section, line: Line, bench: Bench) -> Mapping[str, Any]:
    """The bench row about a line: the full model's, or that of its label or plain method with its budget."""
    plain_methods = {run.config["method"] for run in line.runs.values() if not run.config["changed"]}
    full = line is section.full
    return next(
        (
            row
            for row in bench
            if (
                row["method"] == FULL
                if full
                else row["tokens"] == line.tokens and row["method"] in {line.label, *plain_methods}
            )
        ),
        {},
    )
