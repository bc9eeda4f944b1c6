"""Files of results: read in one way, appended to with one write, replaced in one step.

Everything that is written survives a kill: only the end of a file that is appended to can be cut, and `whole_lines`
distinguishes a cut last line from damage. At the end: one process at a time in a folder (`take_lock`), and values of
another type than expected (`misread`).
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import sys
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
            while data:  # one write; more only if the disk took less
                data = data[os.write(file, data) :]
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise DataError(f"{path}: cannot write ({error.strerror}). {ROOM}") from None


def whole_lines(path: Path) -> tuple[list[bytes], int | None]:
    """Lines of an appended file (made if absent) without a cut last one, and where that begins, if any."""
    if not path.exists():
        path.touch()
        sync_folder(path.parent)
    data = read_bytes(path)
    end = data.rfind(b"\n") + 1
    whole = data[:end].split(b"\n")[:-1]
    if whole and end == len(data) and not _is_json(whole[-1]):
        end -= len(whole.pop()) + 1
    return whole, end if end < len(data) else None


def parse_lines(path: Path, lines: Iterable[bytes], keys: Sequence[str], remedy: str = MEND) -> Iterator[Record]:
    """Each line of a file as an object that has the keys. DataError names file, line, fault and remedy."""
    for number, line in enumerate(lines, start=1):
        start = repr(line[:60].decode(errors="replace"))
        try:
            record = _loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: damaged, not JSON ({error}): {start}. {remedy}") from None
        missing = [key for key in keys if not isinstance(record, dict) or key not in record]
        if missing or not isinstance(record, dict):
            wanted = f"an object with {', '.join(missing)}"
            raise DataError(f"{path}, line {number}: expected {wanted}, found {start}. {remedy}")
        yield record


def read_lines(path: Path, keys: Sequence[str], remedy: str = FETCH) -> list[Record]:
    """All lines of a file of JSON lines, each an object that has the keys."""
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


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"missing file: {path}") from error
    except (OSError, ValueError) as error:  # ValueError: no file can have that name
        raise DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}): damaged, or not this file") from error


def read_json(path: Path, remedy: str = FETCH, kind: type | None = None) -> Any:
    """The content of a JSON file.

    Args:
        remedy: advice for a file that is not valid JSON; ends the message.
        kind: dict or list, if the content must be one.
    Raises:
        DataError: the file cannot be read, is not JSON, or holds another kind of value.
    """
    try:
        value = _loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error}). {remedy}") from None
    if kind is not None and not isinstance(value, kind):
        raise DataError(f"{path}: expected a JSON {kind.__name__}, found {type(value).__name__}. {remedy}")
    return value


def digest(path: Path, kind: str = "sha256") -> str:
    """The hash of a file's content, which is never in memory as a whole."""
    total = hashlib.new(kind, usedforsecurity=False)
    try:
        with path.open("rb") as file:
            while part := file.read(1 << 20):
                total.update(part)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
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
    """Removes temporary files of processes killed in a `replace`; no other process may write to the folder."""
    for path in folder.glob(f".*{FRESH}"):
        path.unlink(missing_ok=True)


def write_out(path: Path, data: bytes) -> None:
    """Writes to a path given by the user: a file is replaced in one step, a link's target too; `-` is standard output,
    and a device or a pipe is written to.
    """
    try:
        if str(path) == "-":
            sys.stdout.buffer.write(data)
        elif path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            replace(path.resolve(), data)
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
        raise DataError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})") from None


def sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _loads(data: bytes) -> Any:
    """JSON as UTF-8, with or without a byte order mark."""
    return json.loads(data.decode("utf-8-sig"))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def take_lock(path: Path, what: str) -> int:
    """Takes the lock file `path`, made if absent: a descriptor to close. The system releases it when a process dies.

    Raises:
        BusyError: another process has it; `what` describes its work in the message.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(lock, 32).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise BusyError(f"{path.parent}: another process (pid {owner}) is working on {what}. Wait for it") from None
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
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
        raise DataError(f"{what}: a value is missing or of another type ({said}). {remedy}") from error
