"""Tables as data, and their text: Markdown to read, LaTeX (booktabs) to input into a paper, CSV for scripts.

table = Table("Scores", ("method", "GQA"), groups([("64 tokens", ("random", "41.0"))]), "A note.")
markdown(table), latex(table), csv_text([{"method": "random", "gqa": 41.0}])
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import write_out

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"  # between which tables stand in a page
PACKAGES = r"% needs \usepackage{booktabs}"
ABSENT = "-"
SPECIAL = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "†": r"$^{\dagger}$",
    "‡": r"$^{\ddagger}$",
    "<": "$<$",
    ">": "$>$",
}

Cells = tuple[str, ...]


@dataclass(frozen=True)
class Group:
    heading: str
    lines: tuple[Cells, ...]


@dataclass(frozen=True)
class Table:
    """A table, before any markup; the first column holds names, the others numbers."""

    title: str
    head: Cells
    groups: tuple[Group, ...]
    note: str = ""


def groups(lines: Iterable[tuple[str, Cells]]) -> tuple[Group, ...]:
    found: dict[str, list[Cells]] = {}
    for heading, cells in lines:
        found.setdefault(heading, []).append(cells)
    return tuple(Group(heading, tuple(under)) for heading, under in found.items())


def pivoted(
    title: str, first: str, columns: Mapping[str, str], cells: Iterable[tuple[str, str, str, str]], note: str = ""
) -> Table:
    """A table of cells that come in any order.

    Args:
        first: heading of the column of names.
        columns: heading of each further column, by its key.
        cells: (heading of the group, name of the line, key of the column, text); groups and lines keep the order in
            which they appear.
    """
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for heading, name, column, text in cells:
        lines.setdefault((heading, name), {})[column] = text
    found = ((heading, (name, *(own.get(key, ABSENT) for key in columns))) for (heading, name), own in lines.items())
    return Table(title, (first, *columns.values()), groups(found), note)


def one_decimal(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.1f}"


def number(scale: float = 1.0) -> Callable[[float | None], str]:
    """Writes a value times `scale` with one decimal, and more for what is small."""

    def write(value: float | None) -> str:
        if value is None:
            return ABSENT
        scaled = value * scale
        return f"{scaled:.1f}" if scaled >= 1 or not scaled else f"{scaled:.3f}"

    return write


def p_value(p: float | None) -> str:
    return ABSENT if p is None else f"{p:.2g}" if p >= 1e-4 else f"{p:.0e}"


def markdown(table: Table) -> str:
    """A table under its title, its note below; the heading of a group is a line of its own."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    others = len(table.head) - 1
    lines = [line(table.head), line(["---", *["--:"] * others])]
    for group in table.groups:
        lines += [line([f"**{group.heading}**", *[""] * others]), *map(line, group.lines)]
    return "\n\n".join(part for part in (f"{table.title}:", "\n".join(lines), table.note) if part)


def escape(text: str) -> str:
    return "".join(SPECIAL.get(sign, sign) for sign in text)


def latex(table: Table) -> str:
    """A booktabs table: names to the left, numbers to the right, a rule and a heading for each group."""

    def line(cells: Iterable[str]) -> str:
        return " & ".join(map(escape, cells)) + r" \\"

    width, lines = len(table.head), [line(table.head)]
    for group in table.groups:
        lines += [r"\midrule", rf"\multicolumn{{{width}}}{{c}}{{\textit{{{escape(group.heading)}}}}} \\"]
        lines += map(line, group.lines)
    above = [
        r"\begin{table}[t]",
        r"\centering\small",
        rf"\caption{{{escape(f'{table.title}. {table.note}'.rstrip())}}}",
    ]
    above += [rf"\begin{{tabular}}{{l{'r' * (width - 1)}}}", r"\toprule"]
    return "\n".join([*above, *lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"])


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    import pandas as pd

    return pd.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\r\n")


def rendered(tables: Sequence[Table], rows: Sequence[Mapping[str, Any]], form: str) -> list[str]:
    """Printed form of tables: one text for each as `markdown` or `latex`, or its rows as `csv`."""
    if form == "csv":
        return [csv_text(rows)]
    return [{"markdown": markdown, "latex": latex}[form](table) for table in tables]


def write(folder: Path, name: str, tables: Sequence[Table], rows: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Write NAME.md and NAME.tex of `tables` and NAME.csv of `rows`."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        folder / f"{name}.md": "\n\n".join(map(markdown, tables)) + "\n",
        folder / f"{name}.tex": "\n\n".join([PACKAGES, *map(latex, tables)]) + "\n",
        folder / f"{name}.csv": csv_text(rows),
    }
    for path, text in texts.items():
        write_out(path, text.encode())
    return list(texts)


def replace_block(text: str, block: str, name: str) -> str:
    """`text` with `block` between the two markers, and not a character changed elsewhere.

    Raises:
        DataError: unless both markers are there once, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise DataError(f"{name}: needs the two lines {BEGIN} and {END}, once each; the tables go between them")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{block}\n{END}{rest.split(END)[1]}"
