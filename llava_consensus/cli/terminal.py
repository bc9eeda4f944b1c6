"""What the command line prints for people: tables that fit the terminal, and colours where there is one (rich).

Everything else that is printed has its control characters escaped (`printable`).
"""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from unicodedata import category

if TYPE_CHECKING:
    from rich.table import Table as Drawing

    from llava_consensus.evaluation.report.table import Table

FORMATS = ("markdown", "latex", "csv")  # of tables on standard output
WIDE = 200  # columns where there is no terminal to ask


def printable(text: str) -> str:
    """A text whose control characters, which could rewrite a terminal, are shown as escapes; lines and tabs stay."""
    return "".join(one if one in "\n\t" or category(one) != "Cc" else repr(one)[1:-1] for one in text)


def columns() -> int | None:
    """How wide lines may be: as the terminal is, or as COLUMNS says; None where nobody says."""
    if "COLUMNS" in os.environ or sys.stdout.isatty():
        return shutil.get_terminal_size((WIDE, 24)).columns
    return None


def wrapped(text: str, indent: str = "    ", most: int | None = None) -> str:
    """A text in lines that fit, those after the first behind `indent`; `most`: no wider than that anywhere."""
    width = min(columns() or most or len(text) + 1, most or len(text) + 1)
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def shown(line: Any) -> str:
    """A text as it can be printed; what rich draws, as wide as the terminal."""
    if isinstance(line, str):
        return printable(line)
    from rich.console import Console

    terminal = sys.stdout.isatty()
    width = columns() or WIDE
    styled = terminal and not os.environ.get("NO_COLOR")  # with NO_COLOR alone rich leaves bold and italic
    console = Console(width=width, force_terminal=styled, force_jupyter=False)
    with console.capture() as captured:
        console.print(line)
    return "\n".join(one.rstrip() for one in captured.get().splitlines())


def error(text: str) -> None:
    """An error in one line on standard error, its first word red where colours are wanted."""
    if not sys.stderr.isatty():  # nothing to colour, and importing rich takes longer than finding most errors
        print(f"error: {printable(text)}", file=sys.stderr)
        return
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text.assemble(("error:", "red"), f" {printable(text)}"), soft_wrap=True)


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
