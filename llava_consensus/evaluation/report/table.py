"""Tables as data, and their text: Markdown to read, LaTeX (booktabs) to input into a paper, CSV for scripts.

table = Table("Scores", ("method", "GQA"), {"64 tokens": [("random", "41.0")]}, "A note.")
markdown(table), latex(table), csv_text([{"method": "random", "gqa": 41.0}])
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_consensus.evaluation.files import write_out

PACKAGES = r"% needs \usepackage{booktabs}"
ABSENT = "-"

Cells = Sequence[str]


@dataclass(frozen=True)
class Table:
    """A table, before any markup; the first column holds names, the others numbers."""

    title: str
    head: Cells
    groups: Mapping[str, Sequence[Cells]]  # lines by heading
    note: str = ""


def grouped(lines: Iterable[tuple[str, Cells]]) -> dict[str, list[Cells]]:
    found: dict[str, list[Cells]] = {}
    for heading, cells in lines:
        found.setdefault(heading, []).append(cells)
    return found


def pivoted(
    title: str, first: str, columns: Mapping[str, str], cells: Iterable[tuple[str, str, str, str]], note: str = ""
) -> Table:
    """A table of cells (heading of the group, name of the line, key of the column, text) that come in any order; groups
    and lines keep the order in which they appear.
    """
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for heading, name, column, text in cells:
        lines.setdefault((heading, name), {})[column] = text
    found = ((heading, (name, *(own.get(key, ABSENT) for key in columns))) for (heading, name), own in lines.items())
    return Table(title, (first, *columns.values()), grouped(found), note)


def number(value: float | None, scale: float = 1.0) -> str:
    """A value times `scale` with one decimal, and more if it is small."""
    if value is None:
        return ABSENT
    scaled = value * scale
    return f"{scaled:.1f}" if scaled >= 1 or not scaled else f"{scaled:.3f}"


def decimal(value: float | None, places: int = 1) -> str:
    return ABSENT if value is None else f"{value:.{places}f}"


def p_value(p: float | None) -> str:
    return ABSENT if p is None else f"{p:.2g}" if p >= 1e-4 else f"{p:.0e}"


def markdown(table: Table) -> str:
    """A table under its title, its note below; the heading of a group is a line of its own."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    others = len(table.head) - 1
    lines = [line(table.head), line(["---", *["--:"] * others])]
    for heading, group in table.groups.items():
        lines += [line([f"**{heading}**", *[""] * others])] if heading else []
        lines += map(line, group)
    return "\n\n".join(part for part in (f"{table.title}:", "\n".join(lines), table.note) if part)


def latex(table: Table) -> str:
    """A booktabs table: names to the left, numbers to the right, a rule and a heading for each group."""

    def escape(text: str) -> str:
        return re.sub(r"[&%$#_{}]", r"\\\g<0>", text).replace("<", "$<$").replace(">", "$>$")

    def line(cells: Iterable[str]) -> str:
        return " & ".join(map(escape, cells)) + r" \\"

    width, lines = len(table.head), [line(table.head)]
    for heading, group in table.groups.items():
        lines += [r"\midrule", rf"\multicolumn{{{width}}}{{c}}{{\textit{{{escape(heading)}}}}} \\", *map(line, group)]
    above = [r"\begin{table}[t]", r"\centering\small", rf"\caption{{{escape(f'{table.title}. {table.note}')}}}"]
    above += [rf"\begin{{tabular}}{{l{'r' * (width - 1)}}}", r"\toprule"]
    return "\n".join([*above, *lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"])


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    import pandas as pd

    return pd.DataFrame(rows, dtype=object).to_csv(index=False, lineterminator="\r\n")


def written(kind: str | None, tables: Sequence[Table], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Tables in a format of `--format`; None is Markdown. CSV holds `rows`, which are not rounded."""
    if kind == "csv":
        yield csv_text(rows)
    else:
        yield from (f"{(latex if kind == 'latex' else markdown)(table)}\n" for table in tables)


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
