"""A column of a table, and tables as data made of columns. No markup yet: `markdown.py` and `latex.py` write it.

A new column is one entry in a list of columns; Markdown, LaTeX and CSV are made from the same list.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llava_consensus.evaluation.report.rows import Line
from llava_consensus.evaluation.report.section import Section

ABSENT = "-"


@dataclass(frozen=True)
class Column:
    """One column.

    Args:
        title: its heading.
        read: takes what the list of columns is about (a line of a section, a measured run, ...), gives the value.
        format: the value as tables show it; CSV has it as it is.
        key: its heading in CSV, where that is another one.
        note: what a reader must know of it, for the note below the table.
    """

    title: str
    read: Callable[[Any], Any]
    format: Callable[[Any], str] = str
    key: str = ""
    note: str = ""


@dataclass(frozen=True)
class Group:
    """Lines of one budget under a heading."""

    heading: str
    lines: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Table:
    """What any markup is written from; the first column holds names, the others numbers."""

    title: str
    head: tuple[str, ...]
    groups: tuple[Group, ...]
    note: str = ""


NAME = Column("method", lambda line: line.label)


def heading(tokens: float, full: float | None) -> str:
    """The paper's line over a budget; a fraction is a share of each picture's own tokens."""
    if 0 < tokens < 1:
        return f"Retain {100 * tokens:g} % of each picture's tokens"
    if full is None or tokens > full:
        return f"Retain {tokens} tokens"
    return f"Retain {tokens} tokens ({100 * (1 - tokens / full):.1f} % fewer)"


def upper_bound(tokens: float) -> str:
    """The line over the full model; 0 stands for a number that no finished run tells."""
    return f"Upper bound, {tokens or 'all'} tokens"


def tabulate(
    section: Section, title: str, columns: Sequence[Column], note: str, lines: Sequence[Line] | None = None
) -> Table:
    """Lines of a section (all of them unless given) under the headings of their budgets, a cell for each column."""
    full = section.full
    rows_by_heading: dict[str, list[tuple[str, ...]]] = {}
    for line in section.lines if lines is None else lines:
        group_heading = (
            upper_bound(line.tokens) if line is full else heading(line.tokens, full.tokens if full else None)
        )
        rows_by_heading.setdefault(group_heading, []).append(
            tuple(column.format(column.read(line)) for column in columns)
        )
    groups = tuple(Group(group_heading, tuple(rows)) for group_heading, rows in rows_by_heading.items())
    return Table(title, tuple(column.title for column in columns), groups, note)
