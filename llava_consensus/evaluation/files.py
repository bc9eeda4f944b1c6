"""Files of results: read in one way, appended to with one write, replaced in one step.

Everything that is written survives a kill: only the end of a file that is appended to can be cut, and `whole_lines`
tells a cut last line from damage. At the end: one process at a time in a folder (`take_lock`), and values of another
type than expected (`misread`).
"""

import contextlib
import fcntl
import gc
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llava_consensus.errors import BusyError, ConsensusError, DataError

Record = dict[str, Any]  # a JSON object: one line of a file of lines, or a whole file

CONFIG, ANSWERS, SCORES, METRICS = "config.json", "answers.jsonl", "scores.jsonl", "metrics.json"  # of a run
ANSWER_FIELDS = ("question_id", "text")  # that every answer file has, those of LLaVA's scripts too
FETCH = "It is damaged or cut off: fetch it again"
ROOM = "Make room, or see to the folder; the same command resumes"
FRESH = ".new"  # end of the name of a file that is not in its place yet
MEND = "Mend or remove the line; nothing was changed"

_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
HALF = re.compile("[\ud800-\udfff]")  # of a character that UTF-16 writes in two halves
PART = 1 << 20  # bytes of a file that are hashed at once
TOGETHER = 1000  # lines that are parsed at once, so that the names of their entries are in memory once


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """For a block, or around a function as a decorator, Python does not look for cyclic garbage. While 100,000 records
    are made it would walk all of them over and over, half of the time, and find nothing: no record is in a cycle.
    """
    was_on = gc.isenabled()  # if the user has stopped it, it stays stopped
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def canonical(content: Mapping[str, Any]) -> str:
    """The one JSON text of an object: equal for equal objects, different for different ones."""
    return _CANONICAL.encode(content)


def append(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Adds a line for each record, with one write; when this returns they are on the disk."""
    if not records:
        return
    data = to_lines(records)
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            _write_all(file, data)  # one write; more only if the disk took less
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise DataError(f"{path}: cannot write ({error.strerror}). {ROOM}") from None


def whole_lines(path: Path) -> tuple[list[bytes], int | None]:
    """The lines of a file that is appended to, without a cut last one, and where that begins if there is one. A file
    that is absent is made.
    """
    if not path.exists():
        path.touch()
        sync_folder(path.parent)
    data = read_bytes(path)
    end = data.rfind(b"\n") + 1
    whole = data[:end].split(b"\n")[:-1]
    if whole and end == len(data) and not _is_json(whole[-1]):
        end -= len(whole.pop()) + 1
    return whole, end if end < len(data) else None


def parse(path: Path, number: int, line: bytes, keys: Sequence[str], remedy: str = MEND) -> Record:
    """A line of a file as an object that has the keys. DataError names file, line, what is wrong and the remedy."""
    try:
        record = _loads(line)
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text (byte {error.start})"
    except (ValueError, RecursionError) as error:
        what = f"not JSON ({error})"
    else:
        missing = [key for key in keys if key not in record] if isinstance(record, dict) else list(keys)
        if isinstance(record, dict) and not missing:
            return record
        what = ""
    start = repr(line[:60].decode(errors="replace"))
    if what:
        raise DataError(f"{path}, line {number}: damaged, {what}: {start}. {remedy}")
    raise DataError(f"{path}, line {number}: expected an object with {', '.join(missing)}, found {start}. {remedy}")


def parse_lines(path: Path, lines: list[bytes], keys: Sequence[str], remedy: str = MEND) -> Iterator[Record]:
    """All lines in order as `parse` reads each of them, many at once. The list is emptied on the way, so that a large
    file is not in memory twice.
    """
    number, wanted = 0, set(keys)
    while lines:
        chunk = lines[:TOGETHER]
        del lines[:TOGETHER]
        records = None
        with contextlib.suppress(ValueError, RecursionError):
            records = json.loads(b"[" + b",".join(chunk) + b"]")
        if (
            records is not None
            and len(records) == len(chunk)
            and all(isinstance(one, dict) and wanted <= one.keys() for one in records)
        ):
            yield from records
        else:
            yield from (parse(path, number + i, line, keys, remedy) for i, line in enumerate(chunk, start=1))
        number += len(chunk)


def read_lines(path: Path, keys: Sequence[str], remedy: str = FETCH) -> list[Record]:
    """All lines of a file of JSON lines, each an object that has the keys; see `parse`."""
    return list(parse_lines(path, read_bytes(path).splitlines(), keys, remedy))


def to_lines(records: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(to_json(record) + "\n" for record in records).encode()


def to_json(content: Mapping[str, Any], indent: int | None = None) -> str:
    """JSON as every reader knows it: NaN and infinity, which it has no word for, become null."""
    try:
        return json.dumps(content, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_without_nan(content), indent=indent, allow_nan=False)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(one) for key, one in value.items()}
    return [_without_nan(one) for one in value] if isinstance(value, list | tuple) else value


def read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}): damaged, or not this file") from error


def read_json(path: Path, remedy: str = FETCH, kind: type | None = None) -> Any:
    """The content of a JSON file.

    Args:
        remedy: what a user can do about a file that is none; ends the message.
        kind: dict or list, if the content must be one.
    Raises:
        DataError: the file cannot be read, is not JSON, or holds another kind of value.
    """
    try:
        value = _loads(read_bytes(path))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}). {remedy}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error}). {remedy}") from None
    if kind is not None and not isinstance(value, kind):
        raise DataError(f"{path}: expected a JSON {kind.__name__}, found {type(value).__name__}. {remedy}")
    return value


def digest(path: Path, kind: str = "sha256") -> str:
    """The hash of a file's content, which is never in memory as a whole."""
    total = hashlib.new(kind, usedforsecurity=False)
    with _reading(path), path.open("rb") as file:
        while part := file.read(PART):
            total.update(part)
    return total.hexdigest()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces a JSON file in one step: a reader sees the old file or the new one, never a part."""
    replace(path, (to_json(content, 1) + "\n").encode())


def write_metrics(folder: Path, metrics: Mapping[str, Any], scores: Sequence[Mapping[str, Any]]) -> None:
    """Writes the results of a run: each answer as it was scored, a line each, then metrics.json.

    metrics.json is written last, so that a run which has one has the scores that belong to it.
    """
    (folder / METRICS).unlink(missing_ok=True)
    replace(folder / SCORES, to_lines(scores))
    write_json(folder / METRICS, metrics)


def replace(path: Path, data: bytes) -> None:
    """Puts a file in its place in one step. It is first written under a fresh name, through no link; a killed process
    may leave that, see `remove_leftovers`.
    """
    fresh = path.with_name(f".{path.name[:50]}.{secrets.token_hex(6)}{FRESH}")
    try:
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        with os.fdopen(file, "wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(file)
        os.replace(fresh, path)
        sync_folder(path.parent)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}). {ROOM}") from None
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Removes temporary files that processes killed in a `replace` have left in a folder; no other process may write
    there.
    """
    for path in folder.glob(f".*{FRESH}"):
        path.unlink(missing_ok=True)


def write_out(path: Path, data: bytes) -> None:
    """Writes to a path given by the user: a file is replaced atomically, a link's target too; `-` is standard output,
    and a device or a pipe stays what it is.
    """
    try:
        if str(path) == "-":
            _write_all(1, data)
        elif path.is_dir():
            raise DataError(f"{path}: is a folder. Give the name of a file")
        elif path.exists() and not path.is_file():
            file = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # a pipe without a reader is refused, and does not block
            try:
                os.set_blocking(file, True)
                _write_all(file, data)
            finally:
                os.close(file)
        else:
            replace(path.resolve() if path.is_symlink() else path, data)
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
        raise DataError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})") from None


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_bytes(path: Path) -> bytes:
    """A file's content. DataError if it cannot be read, or is a pipe."""
    with _reading(path):
        return path.read_bytes()


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raises DataError for what keeps the block from reading a file."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # its end may never come
            raise DataError(f"{path}: is a pipe or a device, not a file. Write its content to a file first")
        yield
    except FileNotFoundError as error:
        raise DataError(f"missing file: {path}") from error
    except ValueError as error:
        raise DataError(f"{path}: no file can have that name ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _loads(data: bytes) -> Any:
    """JSON as UTF-8, with or without a byte order mark."""
    text = data.decode().removeprefix("\ufeff")
    del data  # or a large file is in memory twice
    return json.loads(text)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def take_lock(path: Path, what: str) -> int:
    """Takes the lock file `path`, made if absent: a descriptor to close. The system releases it when a process dies.

    Raises:
        BusyError: another process has it; `what` says in words what that one works on.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(lock, 32).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise BusyError(
            f"{path.parent}: another process (pid {owner}) is working on {what}. Wait for it, or stop it first"
        ) from None
    try:
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
    except BaseException:
        os.close(lock)
        raise
    return lock


WRONG = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)  # that odd values lead to


@contextlib.contextmanager
def misread(what: str, remedy: str = "Fetch it again") -> Iterator[None]:
    """Turns errors of values of an unexpected type in the block into a DataError; `what` names the file or place."""
    try:
        yield
    except ConsensusError:
        raise
    except WRONG as error:
        said = f"{type(error).__name__}: {error}"[:200]
        raise DataError(f"{what}: a value is missing, or is not what it must be ({said}). {remedy}") from error
