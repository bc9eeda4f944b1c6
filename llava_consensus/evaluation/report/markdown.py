"""Tables as Markdown, and the block between two markers of a page. Pure functions of text."""

from llava_consensus.errors import DataError
from llava_consensus.evaluation.report.columns import Table

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def table(content: Table) -> str:
    """A table under its title, its note below; the heading of a group is a line of its own."""
    lines = [_line(*content.head), _line("---", *["--:"] * (len(content.head) - 1))]
    for group in content.groups:
        lines.append(_line(f"**{group.heading}**", *[""] * (len(content.head) - 1)))
        lines += [_line(*cells) for cells in group.lines]
    parts = [f"{content.title}:", "\n".join(lines), content.note]
    return "\n\n".join(part for part in parts if part)


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def replace_block(text: str, block: str, name: str) -> str:
    """`text` with `block` between the two markers, and not a character changed elsewhere.

    Raises:
        DataError: unless both markers are there once, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise DataError(f"{name}: needs the two lines {BEGIN} and {END}, once each; the tables go between them")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{block}\n{END}{rest.split(END)[1]}"
