"""A set of tables as files: Markdown to read, LaTeX to input into a paper, CSV for scripts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llava_consensus.evaluation.files import write_out
from llava_consensus.evaluation.report import latex, markdown, tidy
from llava_consensus.evaluation.report.columns import Table

PACKAGES = r"% needs \usepackage{booktabs}"


def write(
    folder: Path, name: str, tables: Sequence[Table], rows: Sequence[Mapping[str, Any]], remarks: Sequence[str] = ()
) -> list[Path]:
    """Writes NAME.md, NAME.tex and NAME.csv.

    Args:
        folder: made where it is missing.
        name: of the files, without their endings.
        tables: as Markdown and LaTeX.
        rows: with the same keys, as CSV.
        remarks: below the tables of the Markdown.
    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "md": "\n\n".join([*map(markdown.table, tables), *remarks]) + "\n",
        "tex": "\n\n".join([PACKAGES, *map(latex.table, tables)]) + "\n",
        "csv": tidy.lines(rows),
    }
    files = {folder / f"{name}.{ending}": text for ending, text in texts.items()}
    for path, text in files.items():
        write_out(path, text.encode())
    return list(files)
