"""What identifies files and packages: contents, places and versions, in a run's configuration and in its answers.

fingerprint([Path("checkpoints/llava-mini/config.json")])
"""

import contextlib
import hashlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from zlib import crc32

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import Record, digest, read_json, write_json

LARGE = 1 << 26  # bytes; the hash of a larger file is remembered
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
    total = hashlib.sha256()
    for one in paths:
        files = sorted(file for file in one.rglob("*") if file.suffix in LABELS) if one.is_dir() else [one]
        for path in files:
            size = path.stat().st_size
            total.update(f"{path.name}\0{size}\0".encode())
            total.update(path.read_bytes() if size <= LARGE else remembered(path).encode())
    return total.hexdigest()


def remembered(path: Path) -> str:
    """The hash of a file's content, taken once and then remembered by its size and time of change."""
    real, status = path.resolve(), path.stat()
    home = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(home) if home else Path.home() / ".cache") / "llava-consensus" / "digests"
    memory = folder / f"{hashlib.sha256(str(real).encode()).hexdigest()[:24]}.json"
    stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    with contextlib.suppress(DataError, KeyError, TypeError):
        known = read_json(memory)
        if known["stamp"] == stamp:
            return str(known["sha256"])
    found = digest(path)
    with contextlib.suppress(DataError, OSError):  # without a cache it is taken again
        memory.parent.mkdir(parents=True, exist_ok=True)
        write_json(memory, {"file": str(real), "stamp": stamp, "sha256": found})
    return found


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
    files = sorted(path for folder in ANSWERING for path in (package / folder).rglob("*.py"))
    named = (f"{path.relative_to(package)}\0".encode() + path.read_bytes() for path in files)
    return hashlib.sha256(b"\0".join(named)).hexdigest()[:12]


def of_pictures(paths: Sequence[Path]) -> Record:
    """What an answer's record says of the contents of its question's pictures; nothing of a question without."""
    found = [_content(path, *_times(path)) for path in paths]
    return {"pictures": "".join(found)} if found else {}


def changed_pictures(since: int, pictures: Mapping[int, Sequence[Path]], answers: Mapping[int, Record]) -> list[int]:
    """Indexes of questions whose pictures are no longer those that were answered about. Only pictures that were written
    later than the answers are read; those that are gone count as the same.

    Args:
        since: when answers were written last, in nanoseconds.
        pictures: files of each question's pictures, by its index.
        answers: records by the same indexes.
    """
    every: Collection[Path] = {path for paths in pictures.values() for path in paths}
    newer = {path for path in every if path.exists() and max(_times(path)) > since}
    found = []
    for index, paths in pictures.items() if newer else ():
        stored = answers[index]["metadata"].get("pictures")
        if stored is not None and not newer.isdisjoint(paths) and all(path.exists() for path in paths):
            found += [index] if of_pictures(paths)["pictures"] != stored else []
    return found


def _times(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_ctime_ns


@lru_cache(maxsize=1024)  # most pictures have several questions
def _content(path: Path, *_times: int) -> str:
    return f"{crc32(path.read_bytes()):08x}"
