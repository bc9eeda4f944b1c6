"""Files that people bring to `eval custom`, `score`, `judge` and `report import`: JSON lines, a JSON list, CSV or TSV.

UTF-8 or UTF-16, with or without a byte order mark, any line ends; blank lines are skipped. A user wrote these files, so
an error names the line and the remedy.
"""

import csv
import io
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import ANSWER_FIELDS, MEND, Record, read_bytes

NEWLINE = re.compile(r"\r\n|\n|\r")
PREDICTION = ("index", "prediction")  # columns of MMBench's predictions


class FileRow(NamedTuple):
    where: str
    values: Record


def read_user_text(path: Path) -> str:
    """The text of a file as UTF-16 if its byte order mark or its zero bytes say so, else as UTF-8."""
    data = read_bytes(path)
    encoding = "utf-8"
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        encoding = "utf-16"
    elif b"\0" in data[:2]:
        encoding = "utf-16-be" if data[0] == 0 else "utf-16-le"
    try:
        return data.decode(encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: no {encoding.upper()} text (byte {error.start}). Save it as UTF-8") from None


def read_rows(path: Path) -> list[FileRow]:
    """The objects of a file.

    Raises:
        DataError: it cannot be read, or is none of these forms; names the line.
    """
    text = read_user_text(path)
    start = text.lstrip()[:1]
    if not start:
        return []
    if start == "[":
        rows = [FileRow(f"{path}, entry {i}", value) for i, value in enumerate(_json(path, text), start=1)]
    elif start == "{":
        rows = list(_json_lines(path, text))
    else:
        rows = list(_table(path, text))
    for row in rows:
        if not isinstance(row.values, dict):
            raise DataError(f"{row.where}: expected an object, found {str(row.values)[:60]!r}. {MEND}")
    return rows


def _json(path: Path, text: str, line: int = 0) -> Any:
    try:
        return json.loads(text, object_pairs_hook=partial(_object, path, line))
    except json.JSONDecodeError as error:
        place, why = f"{path}, line {line or error.lineno}", f"{error.msg}, column {error.colno}"
        raise DataError(f"{place}: damaged, not JSON ({why}). {MEND}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {line or 1}: damaged, not JSON ({error}). {MEND}") from None


def _object(path: Path, line: int, pairs: list[tuple[str, Any]]) -> Record:
    """DataError for a key that occurs twice, of which JSON keeps the last."""
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path}{f', line {line}' if line else ''}: {twice!r} is there twice. Keep one of them")
    return dict(pairs)


def _json_lines(path: Path, text: str) -> Iterator[FileRow]:
    lines = [(i, line) for i, line in enumerate(NEWLINE.split(text), start=1) if line.strip()]
    if lines[0][1].strip() in ("{", "{}") or not lines[0][1].rstrip().endswith("}"):  # one object on several lines
        yield FileRow(f"{path}, entry 1", _json(path, text))
        return
    for i, line in lines:
        yield FileRow(f"{path}, line {i}", _json(path, line, i))


def _table(path: Path, text: str) -> Iterator[FileRow]:
    """Rows of a table whose first line names the columns. A cell may hold a JSON list."""
    text = text.lstrip("\r\n")
    first = NEWLINE.split(text, maxsplit=1)[0]
    separator = max("\t,;", key=first.count)
    if separator not in first:
        raise DataError(f"{path}: neither JSON nor a table with a line of column names: it begins with {text[:60]!r}")
    csv.field_size_limit(1 << 30)  # an image may be in a cell
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=separator)
    try:
        _object(path, 1, [(name.strip(), None) for name in reader.fieldnames or ()])
        for cells in reader:
            where = f"{path}, line {reader.line_num}"
            if None in cells:
                raise DataError(f"{where}: more cells than the {len(reader.fieldnames or ())} columns. Quote its text")
            values: Record = {name.strip(): cell for name, cell in cells.items() if cell is not None}
            if any(values.values()):
                lists = {name: cell for name, cell in values.items() if cell.startswith(('["', "[{"))}
                yield FileRow(
                    where, values | {name: _json(path, cell, reader.line_num) for name, cell in lists.items()}
                )
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: no table ({error}). Quote the text of its cells") from None


def read_answers(path: Path) -> list[Record]:
    """The answers in a file, from here, from LLaVA's own scripts, or a table of them.

    Raises:
        DataError: a row has no question_id or no text.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such answers file. An evaluation writes one: llava-consensus eval")
    records = []
    for where, row in read_rows(path):
        if set(PREDICTION) <= row.keys() and "text" not in row:
            row = {"question_id": row["index"], "text": row["prediction"]}
        absent = [key for key in ANSWER_FIELDS if key not in row]
        if absent:
            found = ", ".join(row)[:60]
            raise DataError(f"{where}: expected an object with {', '.join(absent)}, found {found}. {MEND}")
        records.append(row)
    return records
