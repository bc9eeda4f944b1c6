"""Output of commands: tables and paragraphs that fit the terminal."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llava_consensus.cli import columns, printable

if TYPE_CHECKING:
    from rich.table import Table as Drawing

    from llava_consensus.evaluation.report.table import Table

FORMATS = ("markdown", "latex", "csv")  # of tables on standard output


def wrapped(text: str, indent: str = "    ", most: int | None = None) -> str:
    """A text in lines that fit, those after the first behind `indent`; `most`: no wider than that anywhere."""
    width = min(columns() or most or len(text) + 1, most or len(text) + 1)
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def heading(text: str) -> Any:
    """Bold words over tables."""
    from rich.text import Text

    return Text(printable(text), style="bold")


def drawn(content: "Table") -> "Drawing":
    """A table as a person reads it, under its title with its note below."""
    from rich import box
    from rich.table import Table as Drawing
    from rich.text import Text

    title, note = (Text(printable(words)) if words else None for words in (content.title, content.note))
    drawing = Drawing(box=box.SIMPLE_HEAD, title=title, title_justify="left", caption=note, caption_justify="left")
    for place, name in enumerate(content.head):
        drawing.add_column(Text(printable(name)), justify="right" if place else "left", overflow="fold")
    for group in content.groups:
        if group.heading:
            drawing.add_row(Text(printable(group.heading), style="bold"))
        for line in group.lines:
            drawing.add_row(*(Text(printable(cell)) for cell in line))
        drawing.add_section()
    return drawing


def written(kind: str, tables: "Sequence[Table]", rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Tables in one of FORMATS; CSV holds `rows`, which are not rounded, in their place. A table that is wider than
    the terminal is written line by line.
    """
    from llava_consensus.evaluation.report.table import rendered

    width = columns()
    if kind == "markdown" and width and any(len(row) > width for table in tables for row in _rows(table)):
        for table in tables:
            yield from _narrow(table)
        return
    yield from (text if kind == "csv" else f"{text}\n" for text in rendered(tables, rows, kind))


def _rows(table: "Table") -> list[str]:
    """The lines of a table in Markdown, without title and note."""
    from llava_consensus.evaluation.report.table import markdown

    return [line for line in markdown(table).splitlines() if line.startswith("|")]


def _narrow(table: "Table") -> Iterator[str]:
    """A table whose every line is a paragraph: its name, then each number behind its heading."""
    from llava_consensus.evaluation.report.table import ABSENT

    yield wrapped(table.title, "") + "\n"
    for group in table.groups:
        yield wrapped(group.heading, "")
        for name, *cells in group.lines:
            filled = [pair for pair in zip(table.head[1:], cells, strict=True) if pair[1] not in ("", ABSENT)]
            yield wrapped(f"  {name}: {', '.join(map(' '.join, filled))}")
        yield ""
    yield wrapped(table.note, "")
