"""Files that survive a kill: appended to with one write, replaced in one step, locked while a process works with them.

Only the end of a file that is appended to can be cut, so `whole_lines` tells a cut last line from damage. Used by
`records.py` (a run) and `judge/store.py` (what a judge was asked).
"""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llava_consensus.errors import BusyError, DataError

Record = dict[str, Any]


def take_lock(path: Path, what: str) -> int:
    """Takes the lock file `path`, made if absent: a descriptor to close. The system lets go of it when a process dies.

    Raises:
        BusyError: another process has it; `what` says in words what that one works on.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(lock, 32).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise BusyError(
            f"{path.parent}: another process (pid {owner}) is working on {what}. Wait for it, or stop it first"
        ) from None
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    return lock


def append(path: Path, records: Sequence[Mapping[str, Any]], sync: bool = True) -> None:
    """Adds a line for each record, with one write; when this returns they are on the disk, or without `sync` on their
    way.

    Raises:
        DataError: the disk does not take them.
    """
    if not records:
        return
    data = to_lines(records)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        while data:  # one write; more only where the disk took less
            data = data[os.write(file, data) :]
        if sync:
            os.fsync(file)
    except OSError as error:
        raise DataError(
            f"{path}: cannot write ({error.strerror}). Make room; the same command goes on from here"
        ) from None
    finally:
        os.close(file)


def whole_lines(path: Path) -> tuple[list[bytes], int | None]:
    """The lines of a file that is appended to, without a cut last one, and where that begins if there is one. A file
    that is absent is made.
    """
    if not path.exists():
        path.touch()
        sync_folder(path.parent)
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    whole = data[:end].split(b"\n")[:-1]
    if whole and end == len(data) and not _is_json(whole[-1]):
        end -= len(whole.pop()) + 1
    return whole, end if end < len(data) else None


def parse(path: Path, number: int, line: bytes, keys: Sequence[str]) -> Record:
    """A line as a record that has the keys, or a DataError naming file, line and what is wrong."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(
            f"{path}, line {number}: damaged ({error}). Mend or remove the line; nothing was changed"
        ) from None
    missing = [key for key in keys if key not in record] if isinstance(record, dict) else list(keys)
    if missing:
        raise DataError(
            f"{path}, line {number}: no {', '.join(missing)} in it. Mend or remove the line; nothing was changed"
        )
    return record


def to_lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    """One line of JSON for each record."""
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def read_json(path: Path, remedy: str) -> Any:
    """The content of a JSON file, or a DataError that ends with the remedy."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: not JSON ({error}). {remedy}") from None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces a JSON file in one step: a reader sees the old file or the new one, never a part."""
    replace(path, (json.dumps(content, indent=1) + "\n").encode())


def replace(path: Path, data: bytes) -> None:
    """Puts a file in its place in one step."""
    fresh = path.with_name(f".{path.name}.new")
    with open(fresh, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Brings the names in a folder to the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
