"""Every cell as one line of CSV, for spreadsheets and scripts: our runs and the paper's printed numbers.

Scores in percent (MME in points), unrounded; what is not known is empty. `status` is complete, incomplete or printed.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from llava_consensus.report import costs, paper
from llava_consensus.report.catalogue import Catalogue
from llava_consensus.report.columns import Column
from llava_consensus.report.rows import Line
from llava_consensus.report.section import Cell, Section
from llava_consensus.report.stats import Comparison


class One(NamedTuple):
    """What a line of CSV is about."""

    line: Line
    cell: Cell


def config(key: str) -> Column:
    """A key of the run's configuration."""
    return Column(key, lambda one: one.cell.row.config[key])


def metrics(key: str) -> Column:
    """A key of the run's metrics."""
    return Column(key, lambda one: (one.cell.row.metrics or {}).get(key))


def bound(key: str, place: int) -> Column:
    """An end of the score's interval."""
    return Column(key, lambda one: None if one.cell.bounds is None else one.cell.bounds[place])


def test(key: str, read: Callable[[Comparison], Any]) -> Column:
    """A number of the test against the full model."""
    return Column(key, lambda one: None if one.cell.test is None else read(one.cell.test))


COLUMNS = (  # of One; those of costs follow
    Column("source", lambda one: "ours"),
    *map(config, ("model", "data", "limit")),
    Column("label", lambda one: one.line.label),
    config("method"),
    Column("tokens", lambda one: one.line.tokens or None),
    config("benchmark"),
    metrics("metric"),
    Column("status", lambda one: "complete" if one.cell.row.complete else "incomplete"),
    metrics("questions"),
    Column("answered", lambda one: (one.cell.row.metrics or {}).get("answered", one.cell.row.answered)),
    Column("score", lambda one: one.cell.row.score),
    bound("low", 0),
    bound("high", 1),
    test("difference", lambda one: one.difference),
    test("difference_low", lambda one: one.low),
    test("difference_high", lambda one: one.high),
    test("p", lambda one: one.p),
    Column("p_corrected", lambda one: None if one.cell.test is None else one.cell.corrected),
    test("test", lambda one: one.name),
)


def table(sections: Iterable[Section], bench: costs.Bench = ()) -> str:
    """All sections, and below them the paper's tables that stand beside one of them. Lines end as RFC 4180 says."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [_key(column) for column in (*COLUMNS, *costs.COLUMNS)], restval="")
    writer.writeheader()
    beside: dict[str, Catalogue] = {}
    for section in sections:
        cells = [(line, section.cell(line, name)) for line in section.lines for name in section.names]
        writer.writerows(_ours(section, One(line, cell), bench) for line, cell in cells if cell is not None)
        full = section.full.tokens if section.full else 0
        found = paper.printed([section.catalogue.benchmark(name).column for name in section.names], full)
        beside |= {one: section.catalogue for one in found if one not in beside}
    for one, catalogue in beside.items():
        writer.writerows(_printed(one, catalogue))
    return out.getvalue()


def _key(column: Column) -> str:
    return column.key or column.title


def _ours(section: Section, one: One, bench: costs.Bench) -> dict[str, Any]:
    cost = costs.measured(one.cell.row, costs.times_of(section, one.line, bench))
    values = [(_key(column), column.read(one)) for column in COLUMNS]
    values += [(_key(column), column.read(cost)) for column in costs.COLUMNS]
    return {key: value for key, value in values if value is not None}


def _printed(table: str, catalogue: Catalogue) -> Iterator[Mapping[str, Any]]:
    """The cells of one of the paper's tables; times stand beside each score, as in our lines."""
    for row in paper.tables()[table]:
        for column in paper.columns(table):
            if row.get(column) is not None:
                shared = {"source": "paper", "model": paper.MODELS[table], "label": row["method"], "status": "printed"}
                found = {"tokens": row["tokens"], "benchmark": catalogue.named(column), "score": row[column]}
                times = {key: row[key] for key in ("ttft_ms", "tpot_ms") if row.get(key) is not None}
                yield {**shared, **found, **times}
