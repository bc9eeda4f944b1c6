"""What identifies files and packages in a run's configuration: contents, places and versions.

fingerprint([Path("checkpoints/llava-mini/config.json")])
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import IO

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import read_json, write_json

LARGE = 1 << 26  # bytes; the hash of a larger file is remembered
END = 1 << 20  # bytes that are read at once of a large file
LABELS = {".txt", ".json", ".jsonl", ".csv", ".tsv"}  # of a folder of labels, such as MME's; pictures are none
OWN = "llava-consensus"
# folders whose code can change an answer
ANSWERING = ("hosts", "methods", "reduction", *(f"evaluation/{name}" for name in ("benchmarks", "models", "runs")))
PACKAGES = (
    OWN,
    "torch",
    "transformers",
    "llava-torch",
    "tokenizers",
    "pillow",
)  # their versions can change answers


def place(name: str) -> str:
    """A folder as seen from here if it lies below, else its full path; the name of a hub's model as it is."""
    path = Path(name).expanduser()
    if not path.exists():
        return name
    path = path.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def fingerprint(paths: Iterable[Path]) -> str:
    """One hash of the names and contents of files; of a folder among them, of the label files in it."""
    digest = hashlib.sha256()
    for path in (file for one in paths for file in _files(one)):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        digest.update(path.read_bytes() if size <= LARGE else remembered(path).encode())
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    return sorted(one for one in path.rglob("*") if one.suffix in LABELS) if path.is_dir() else [path]


def remembered(path: Path) -> str:
    """The hash of a file's content, taken once and then remembered by its size and time of change."""
    real, status = path.resolve(), path.stat()
    memory = _cache() / f"{hashlib.sha256(str(real).encode()).hexdigest()[:24]}.json"
    stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    with contextlib.suppress(DataError, KeyError, TypeError):
        known = read_json(memory)
        if known["stamp"] == stamp:
            return str(known["sha256"])
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _digest(file)
    with contextlib.suppress(DataError, OSError):  # without a cache it is taken again
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_json(memory, {"file": str(real), "stamp": stamp, "sha256": found})
    return found


def _digest(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while part := file.read(END):
        digest.update(part)
    return digest.hexdigest()


def _cache() -> Path:
    """Where hashes of large files are remembered: $XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "llava-consensus" / "digests"


def versions(*more: str) -> dict[str, str | None]:
    """Versions of the packages that can change answers, and of `more`; None for one that is not installed."""
    return {name: _version(name) for name in (*PACKAGES, *more)}


def _version(package: str) -> str | None:
    try:
        known = metadata.version(package)
    except metadata.PackageNotFoundError:
        known = None
    if package == OWN and "site-packages" not in Path(__file__).parts:  # a development install: its number says little
        return f"{known or 'unknown'}+source.{_source(Path(__file__).parents[2])}"
    return known


@cache
def _source(package: Path) -> str:
    """The hash of the source that can change an answer."""
    files = sorted(path for room in ANSWERING for path in (package / room).rglob("*.py"))
    named = (f"{path.relative_to(package)}\0".encode() + path.read_bytes() for path in files)
    return hashlib.sha256(b"\0".join(named)).hexdigest()[:12]
