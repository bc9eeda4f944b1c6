"""Output of commands: tables and paragraphs that fit the terminal."""

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llava_consensus.cli import columns, printable

if TYPE_CHECKING:
    from rich.table import Table as Drawing

    from llava_consensus.evaluation.report.table import Table


def wrapped(text: str, indent: str = "    ", most: int | None = None) -> str:
    """A text in lines that fit, those after the first behind `indent`; `most`: no wider than that anywhere."""
    width = min(columns() or most or len(text) + 1, most or len(text) + 1)
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def heading(text: str) -> Any:
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


def written(kind: str | None, tables: "Sequence[Table]", rows: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Tables in a format of `--format`; None draws them in a terminal and writes Markdown elsewhere. CSV holds `rows`,
    which are not rounded.
    """
    from llava_consensus.evaluation.report.table import rendered

    kind = kind or ("table" if sys.stdout.isatty() else "markdown")
    if kind == "table":
        yield from map(drawn, tables)
        return
    yield from (text if kind == "csv" else f"{text}\n" for text in rendered(tables, rows, kind))
