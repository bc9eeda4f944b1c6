"""Files that people bring to `eval custom`, `score`, `judge` and `report import`: JSON lines or a JSON list.

Blank lines are skipped. A user wrote these files, so an error names the line and says what to change.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import ANSWER_FIELDS, MEND, Record, read_text


class FileRow(NamedTuple):
    where: str
    values: Record


def read_rows(path: Path) -> list[FileRow]:
    """The objects of a file.

    Raises:
        DataError: it cannot be read, or is none of these forms; names the line.
    """
    text = read_text(path)
    start = text.lstrip()[:1]
    if not start:
        return []
    if start == "[":
        rows = [FileRow(f"{path}, entry {i}", value) for i, value in enumerate(_json(str(path), text), start=1)]
    else:
        lines = enumerate(text.split("\n"), start=1)
        rows = [FileRow(f"{path}, line {i}", _json(f"{path}, line {i}", line)) for i, line in lines if line.strip()]
    for row in rows:
        if not isinstance(row.values, dict):
            raise DataError(f"{row.where}: expected an object, found {str(row.values)[:60]!r}. {MEND}")
    return rows


def _json(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: damaged, not JSON ({error}). {MEND}") from None


def read_answers(path: Path) -> list[Record]:
    """The answers in a file, from here or from LLaVA's own scripts.

    Raises:
        DataError: a row has no question_id or no text.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such answers file. An evaluation writes one: llava-consensus eval")
    records = []
    for where, row in read_rows(path):
        absent = [key for key in ANSWER_FIELDS if key not in row]
        if absent:
            found = ", ".join(row)[:60]
            raise DataError(f"{where}: expected an object with {', '.join(absent)}, found {found}. {MEND}")
        records.append(row)
    return records
