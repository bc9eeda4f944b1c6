"""Tables as commands print them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llava_consensus.evaluation.report.table import Table


def drawn(content: "Table") -> str:
    return "\n".join(written("markdown", [content], []))


def written(kind: str | None, tables: "Sequence[Table]", rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Tables in a format of `--format`; None is Markdown. CSV holds `rows`, which are not rounded."""
    from llava_consensus.evaluation.report.table import csv_text, latex, markdown

    if kind == "csv":
        yield csv_text(rows)
    else:
        yield from (f"{(latex if kind == 'latex' else markdown)(table)}\n" for table in tables)
