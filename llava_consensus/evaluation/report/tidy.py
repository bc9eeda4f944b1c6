"""Every cell as one line of CSV, for spreadsheets and scripts: our runs and the paper's printed numbers.

Scores in percent (MME in points), unrounded; what is not known is empty. `status` is complete, incomplete or printed.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from llava_consensus.evaluation.report import costs, paper
from llava_consensus.evaluation.report.catalogue import Catalogue
from llava_consensus.evaluation.report.columns import Column
from llava_consensus.evaluation.report.rows import Line
from llava_consensus.evaluation.report.section import Cell, Section
from llava_consensus.evaluation.report.stats import Comparison


class Entry(NamedTuple):
    """One of our lines of CSV: a line of a section, and its cell of one benchmark."""

    line: Line
    cell: Cell


def config(key: str) -> Column:
    """A key of the run's configuration."""
    return Column(key, lambda entry: entry.cell.row.config[key])


def metrics(key: str) -> Column:
    """A key of the run's metrics."""
    return Column(key, lambda entry: (entry.cell.row.metrics or {}).get(key))


def bound(key: str, place: int) -> Column:
    """An end of the score's interval."""
    return Column(key, lambda entry: None if entry.cell.bounds is None else entry.cell.bounds[place])


def test(key: str, read: Callable[[Comparison], Any]) -> Column:
    """A number of the test against the full model."""
    return Column(key, lambda entry: None if entry.cell.test is None else read(entry.cell.test))


COLUMNS = (  # of Entry; those of costs follow
    Column("source", lambda entry: "ours"),
    *map(config, ("model", "data", "limit")),
    Column("label", lambda entry: entry.line.label),
    config("method"),
    Column("tokens", lambda entry: entry.line.tokens or None),
    config("benchmark"),
    metrics("metric"),
    Column("status", lambda entry: "complete" if entry.cell.row.complete else "incomplete"),
    metrics("questions"),
    Column("answered", lambda entry: (entry.cell.row.metrics or {}).get("answered", entry.cell.row.answered)),
    Column("score", lambda entry: entry.cell.row.score),
    bound("low", 0),
    bound("high", 1),
    Column("chance", lambda entry: entry.cell.row.chance),
    test("difference", lambda comparison: comparison.difference),
    test("difference_low", lambda comparison: comparison.low),
    test("difference_high", lambda comparison: comparison.high),
    test("p", lambda comparison: comparison.p),
    Column("p_corrected", lambda entry: None if entry.cell.test is None else entry.cell.corrected),
    test("test", lambda comparison: comparison.name),
)


def table(sections: Iterable[Section], bench: costs.Bench = ()) -> str:
    """All sections, and below them the paper's tables that stand beside one of them. Lines end as RFC 4180 says."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [_key(column) for column in (*COLUMNS, *costs.COLUMNS)], restval="")
    writer.writeheader()
    catalogues: dict[str, Catalogue] = {}
    for section in sections:
        cells = [(line, section.cell(line, name)) for line in section.lines for name in section.names]
        writer.writerows(_ours(section, Entry(line, cell), bench) for line, cell in cells if cell is not None)
        full = section.full.tokens if section.full else 0
        printed_tables = paper.printed([section.catalogue.benchmark(name).column for name in section.names], full)
        catalogues |= {
            printed_table: section.catalogue for printed_table in printed_tables if printed_table not in catalogues
        }
    for printed_table, catalogue in catalogues.items():
        writer.writerows(_printed(printed_table, catalogue))
    return out.getvalue()


def lines(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows that have the same keys as CSV; what is not known is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _key(column: Column) -> str:
    return column.key or column.title


def _ours(section: Section, entry: Entry, bench: costs.Bench) -> dict[str, Any]:
    cost = costs.measured(entry.cell.row, costs.times_of(section, entry.line, bench))
    values = [(_key(column), column.read(entry)) for column in COLUMNS]
    values += [(_key(column), column.read(cost)) for column in costs.COLUMNS]
    return {key: value for key, value in values if value is not None}


def _printed(table: str, catalogue: Catalogue) -> Iterator[Mapping[str, Any]]:
    """The cells of one of the paper's tables; times stand beside each score, as in our lines."""
    for row in paper.tables()[table]:
        for column in paper.columns(table):
            if row.get(column) is not None:
                shared = {"source": "paper", "model": paper.MODELS[table], "label": row["method"], "status": "printed"}
                cell = {"tokens": row["tokens"], "benchmark": catalogue.named(column), "score": row[column]}
                times = {key: row[key] for key in ("ttft_ms", "tpot_ms") if row.get(key) is not None}
                yield {**shared, **cell, **times}
