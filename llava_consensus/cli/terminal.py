"""What the command line prints for people: tables that fit the terminal, and colours where there is one.

Everything else that is printed has its control characters escaped (`printable`); what is made here may have some.
"""

import io
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TextIO
from unicodedata import category

if TYPE_CHECKING:
    from llava_consensus.evaluation.report.table import Table

RED, BOLD = "31", "1"
WIDE = 200  # columns where there is no terminal to ask


def printable(text: str) -> str:
    """A text whose control characters, which could rewrite a terminal, are shown as escapes; lines and tabs stay."""
    return "".join(one if one in "\n\t" or category(one) != "Cc" else repr(one)[1:-1] for one in text)


class Rendered(str):
    """A text that is meant to hold escapes of the terminal."""


def colours(stream: TextIO) -> bool:
    """Whether colours are wanted: in a terminal, unless NO_COLOR is set (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def coloured(text: str, code: str, stream: TextIO) -> str:
    """The text in a colour, or as it is where colours are not wanted."""
    return f"\033[{code}m{text}\033[0m" if colours(stream) else text


def tables(contents: "Sequence[Table]") -> Iterator[Rendered]:
    """Tables as a person reads them, each under its title with its note below."""
    for content in contents:
        yield Rendered(_drawn(content))


def _drawn(content: "Table") -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table as Drawing
    from rich.text import Text

    def text_(words: str) -> Text:
        return Text(printable(words))

    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    drawing = Drawing(box=box.SIMPLE_HEAD if unicode else box.ASCII, title=text_(content.title), title_justify="left")
    for number, title in enumerate(content.head):
        drawing.add_column(text_(title), justify="right" if number else "left", overflow="fold")
    for group in content.groups:
        if group.heading:
            drawing.add_row(Text(printable(group.heading), style="bold"))
        for line in group.lines:
            drawing.add_row(*map(text_, line))
        drawing.add_section()
    if content.note:
        drawing.caption, drawing.caption_justify = text_(content.note), "left"
    out, terminal = io.StringIO(), sys.stdout.isatty()
    width = shutil.get_terminal_size((WIDE, 24)).columns if terminal else WIDE
    system: Literal["standard"] | None = "standard" if colours(sys.stdout) else None
    Console(file=out, width=width, force_terminal=system is not None, color_system=system).print(drawing)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
