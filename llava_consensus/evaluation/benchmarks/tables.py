"""MMBench's tables: rows of tab-separated cells with the pictures inside, read as LLaVA's script reads them.

pandas decides what is an empty cell, so that an option like "None" ends the options here where it does there. The last
two tables read are kept; a file that changed is read again. Used by `mmbench.py`.
"""

import base64
import binascii
import io
import zipfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_consensus.errors import DataError, ImageError
from llava_consensus.evaluation.files import read_text

if TYPE_CHECKING:
    from pandas import DataFrame

FIELDS = ("index", "question", "hint", "A", "B", "C", "D", "image")
CELL = 32_767  # characters a cell of an xlsx sheet holds
FORMULA = ("=", "+", "-", "@")  # what a spreadsheet may take for a formula
SHORTEST = 64  # characters; a shorter picture is the index of the row that has it


def read(path: Path) -> "DataFrame":
    """The table, which has an index in every row; the caller must not change it."""
    return _table(*_stamp(path))


def rows(path: Path, columns: Sequence[str] = FIELDS) -> list[dict[str, Any]]:
    """The rows in file order; DataError unless the table has these columns."""
    absent = [name for name in columns if name not in read(path)]
    if absent:
        raise DataError(f"{path}: no column {', '.join(absent)}: not an MMBench table")
    return _rows(*_stamp(path))[0]


def predictions(path: Path) -> list[tuple[int, str]]:
    """Index and prediction of the rows of a sheet as `export` and VLMEvalKit write it; an empty cell reads `nan`, as
    there.
    """
    import pandas

    try:
        table = pandas.read_excel(path, dtype={"prediction": str})
        return [(int(index), str(text)) for index, text in zip(table["index"], table["prediction"], strict=True)]
    except (KeyError, ValueError, TypeError, OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not a sheet with columns index and prediction ({error})") from error


def names(path: Path) -> list[str]:
    """For each row the name of its picture: the index of the first row that has it."""
    return _rows(*_stamp(path))[1]


def picture(path: Path, name: str) -> bytes:
    """The picture of that name; ImageError if the table has none or it is no base64."""
    image = _rows(*_stamp(path))[2].get(name)
    if image is None:
        raise ImageError(f"{path}: no picture named {name!r}")
    try:
        return base64.b64decode(image)
    except binascii.Error as error:
        raise ImageError(f"{path}, index {name}: the picture is no base64 ({error})") from error


def empty(value: Any) -> bool:
    """Whether pandas found nothing in a cell."""
    return value is None or value != value  # NaN alone differs from itself


def to_xlsx(table: "DataFrame") -> bytes:
    """A table as an xlsx sheet in which every text stays text, a formula too.

    Raises:
        DataError: a text that no cell can hold; names the index of its row.
    """
    import pandas
    from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE  # heavy, like pandas: only now

    for column in table:
        for index, value in zip(table["index"], table[column], strict=True):
            if not isinstance(value, str):
                continue
            if len(value) > CELL:
                raise DataError(
                    f"index {index}, {column}: {len(value):,} characters, and a cell of an xlsx sheet holds {CELL:,}. "
                    "Answer it again with a smaller --max-new-tokens"
                )
            if found := ILLEGAL_CHARACTERS_RE.search(value):
                raise DataError(
                    f"index {index}, {column}: the control character {found[0]!r}, which no xlsx sheet can hold"
                )
    content = io.BytesIO()
    with pandas.ExcelWriter(content, engine="openpyxl") as writer:
        table.to_excel(writer, index=False)
        for cell in (cell for row in writer.book.active.iter_rows() for cell in row):
            if isinstance(cell.value, str) and cell.value.startswith(FORMULA):
                cell.data_type, cell.quotePrefix = "s", True
    return content.getvalue()


def _stamp(path: Path) -> tuple[Path, int, int]:
    """The path of a file with its time of change and its size, which are others once the file has changed."""
    status = path.stat()
    return path, status.st_mtime_ns, status.st_size


@lru_cache(maxsize=2)
def _table(path: Path, *_stamp: int) -> "DataFrame":
    import pandas

    read_text(path)  # says which byte is no UTF-8
    try:
        table = pandas.read_table(path)
    except (ValueError, pandas.errors.ParserError) as error:
        raise DataError(f"{path}: not a table of tabs ({error}): damaged or cut off, fetch it again") from error
    if "index" not in table:
        raise DataError(f"{path}: no column index: not an MMBench table")
    if not table["index"].map(lambda index: isinstance(index, int)).all():
        raise DataError(f"{path}: an index is no whole number: damaged or cut off, fetch it again")
    return table


@lru_cache(maxsize=2)
def _rows(path: Path, *stamp: int) -> tuple[list[dict[str, Any]], list[str], dict[str, str]]:
    """The rows, the name of each row's picture, and the pictures by name."""
    rows = _table(path, *stamp).to_dict("records")
    images = {str(row["index"]): str(row.get("image")) for row in rows}
    images |= {name: images[image] for name, image in images.items() if len(image) <= SHORTEST and image in images}
    first: dict[str, str] = {}
    for name, image in images.items():
        first.setdefault(image, name)
    names = [first[images[str(row["index"])]] for row in rows]
    return rows, names, {name: images[name] for name in names}
