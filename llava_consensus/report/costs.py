"""What a method costs beside what it scores: the three token counts, FLOPs, KV cache, times. Pure functions of files.

Counts, FLOPs and bytes come from `account` in metrics.json (means over the benchmarks that all lines have finished; the
cache as measured where a run measured it); times from `bench.json` in the folder of results: rows with `method` (its
name, or its label in tables), `tokens`, `ttft_ms`, `tpot_ms`, `share` (the method's own part of the time to first
token). What was not measured is "-".
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError
from llava_consensus.report.layout import ABSENT, Table, grouped, mean, title_of
from llava_consensus.report.rows import FULL, Line, Row
from llava_consensus.report.section import Section

BENCH = "bench.json"
COUNTS = ("entering", "kept", "average")
TIMES = ("ttft_ms", "tpot_ms", "share")
MIB = 2**20
HEAD = (
    "method",
    "Acc",
    "Rel (%)",
    "entering",
    "kept",
    "layer average",
    "GFLOPs",
    "KV (MiB)",
    "TTFT (ms)",
    "TPOT (ms)",
    "selection (% of TTFT)",
)
NOTE = (
    "Visual tokens that enter the language model, that are kept after the last cut, and the mean over its layers. "
    "FLOPs of one prefill: language model, vision tower and the method's own work. KV: bytes of the cache after it. "
    "TTFT, TPOT: time to the first and to each further token, medians of interleaved measurements in one process."
)

Bench = Sequence[Mapping[str, Any]]


def read_bench(path: Path) -> list[dict[str, Any]]:
    """The rows of a bench file; none where there is no file. DataError for another kind of file."""
    if not path.is_file():
        return []
    try:
        rows = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}). Measure again, or move it away") from None
    rows = rows.get("rows") if isinstance(rows, dict) else rows
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and {"method", "tokens"} <= row.keys() for row in rows
    ):
        raise DataError(f"{path}: not a list of rows with method and tokens. Measure again, or move it away")
    return rows


def comparison(section: Section, bench: Bench = ()) -> Table | None:
    """Every line with its scores and costs; None where no cost is known."""
    lines = []
    for line in section.lines:
        costs = written(cost(section, line, bench))
        lines.append((line, (line.label, mean(section.accuracy(line)), mean(section.relative(line)), *costs)))
    if all(cell == ABSENT for _, cells in lines for cell in cells[3:]):
        return None
    over = f" Counts, FLOPs and KV: over {', '.join(map(title_of, section.common))}." if section.common else ""
    return Table("Scores and costs", HEAD, grouped(section, lines), NOTE + over)


def cost(section: Section, line: Line, bench: Bench = ()) -> dict[str, float | None]:
    """Counts, `flops`, `kv_bytes` and times of a line over the benchmarks all lines have in common, or its own where
    they have none; None for what is not known of each of its runs.
    """
    runs = [line.runs[name] for name in section.common or section.papers or section.names if name in line.runs]
    found = {key: _mean([of_run(row, key) for row in runs]) for key in (*COUNTS, "flops", "kv_bytes")}
    times = next((row for row in bench if _is(row, line, section)), {})
    return found | {key: times.get(key) for key in TIMES}


def of_run(row: Row, key: str) -> float | None:
    """One number of a run's account: as measured where it was, the total where it has parts; None without."""
    account = (row.metrics or {}).get("account") or {}
    value = (account.get("measured") or {}).get(key, account.get(key))
    return value.get("total") if isinstance(value, Mapping) else value


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _is(row: Mapping[str, Any], line: Line, section: Section) -> bool:
    """Whether a bench row measured a line: the full model, or its label or plain method with its budget."""
    if line is section.full:
        return bool(row["method"] == FULL)
    plain = {run.config["method"] for run in line.runs.values() if not run.config["changed"]}
    return row["tokens"] == line.tokens and row["method"] in {line.label, *plain}


def written(found: Mapping[str, float | None]) -> list[str]:
    """Costs as the table shows them."""
    scales = {"flops": 1e-9, "kv_bytes": 1 / MIB, "share": 100.0}
    counts = [ABSENT if found[key] is None else f"{found[key]:.1f}".removesuffix(".0") for key in COUNTS]
    return counts + [_number(found[key], scales.get(key, 1.0)) for key in ("flops", "kv_bytes", *TIMES)]


def _number(value: float | None, scale: float) -> str:
    """One decimal, and more for what is small."""
    if value is None:
        return ABSENT
    number = value * scale
    return f"{number:.1f}" if number >= 1 or not number else f"{number:.3f}"
