"""Every cell as one line of CSV, for spreadsheets and scripts: our runs and the paper's printed numbers.

Scores in percent (MME in points), unrounded; what is not known is empty. `status` is complete, incomplete or printed.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from llava_consensus.report import costs, paper
from llava_consensus.report.rows import Line
from llava_consensus.report.section import Cell, Section

COLUMNS = (
    *("source", "model", "data", "limit", "label", "method", "tokens", "benchmark", "metric", "status"),
    *("questions", "answered", "score", "low", "high", "difference", "difference_low", "difference_high"),
    *("p", "p_corrected", "test", "entering", "kept", "average", "flops", "kv_bytes", "ttft_ms", "tpot_ms", "share"),
)


def table(sections: Iterable[Section], bench: costs.Bench = ()) -> str:
    """All sections, and below them the paper's tables that stand beside one of them. Lines end as RFC 4180 says."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, restval="")
    writer.writeheader()
    beside: list[str] = []
    for section in sections:
        cells = [(line, section.cell(line, name)) for line in section.lines for name in section.names]
        writer.writerows(_known(_ours(section, line, cell, bench)) for line, cell in cells if cell is not None)
        full = section.full.tokens if section.full else 0
        beside += [one for one in paper.printed(section.names, full) if one not in beside]
    for one in beside:
        writer.writerows(_known(row) for row in _printed(one))
    return out.getvalue()


def _known(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None}


def _ours(section: Section, line: Line, cell: Cell, bench: costs.Bench) -> dict[str, Any]:
    row, config, metrics = cell.row, cell.row.config, cell.row.metrics or {}
    low, high = cell.bounds or (None, None)
    found = {
        "source": "ours",
        **{key: config[key] for key in ("model", "data", "limit", "method", "benchmark")},
        "label": line.label,
        "tokens": line.tokens,
        "metric": metrics.get("metric"),
        "status": "complete" if row.complete else "incomplete",
        "questions": metrics.get("questions"),
        "answered": metrics.get("answered", row.answered),
        "score": row.score,
        "low": low,
        "high": high,
        **{key: costs.of_run(row, key) for key in (*costs.COUNTS, "flops", "kv_bytes")},
        **{key: value for key, value in costs.cost(section, line, bench).items() if key in costs.TIMES},
    }
    if cell.test is not None:
        test = cell.test
        found |= {"difference": test.difference, "difference_low": test.low, "difference_high": test.high}
        found |= {"p": test.p, "p_corrected": cell.corrected, "test": test.name}
    return found


def _printed(table: str) -> Iterator[dict[str, Any]]:
    for row in paper.tables()[table]:
        for name, key in paper.PRINTED.items():
            if row.get(key) is not None:
                shared = {"source": "paper", "model": paper.MODELS[table], "label": row["method"], "status": "printed"}
                times = {time: row.get(time) for time in ("ttft_ms", "tpot_ms")}
                yield {**shared, "tokens": row["tokens"], "benchmark": name, "score": row[key], **times}
