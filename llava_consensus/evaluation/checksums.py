"""Checksums of what a run depends on: question files, weights and images.

The checksum of a large file is cached in ~/.cache by its size and times, so that weights are read once.
"""

import contextlib
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from zlib import crc32

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import Record, digest, read_json, write_json
from llava_consensus.hosts.environment import cache_folder

LARGE = 1 << 26  # bytes; the checksum of a larger file is cached
LABELS = {".txt", ".json", ".jsonl", ".csv", ".tsv"}  # files of a folder that are labels, such as MME's


def checksum_of(paths: Iterable[Path]) -> str:
    """One checksum of the names and contents of files; of a folder among them, of its label files."""
    total = hashlib.sha256()
    for one in paths:
        files = sorted(file for file in one.rglob("*") if file.suffix in LABELS) if one.is_dir() else [one]
        for path in files:
            size = path.stat().st_size
            total.update(f"{path.name}\0{size}\0".encode())
            total.update(path.read_bytes() if size <= LARGE else cached_checksum(path).encode())
    return total.hexdigest()


def cached_checksum(path: Path) -> str:
    real, status = path.resolve(), path.stat()
    cache = cache_folder("digests") / f"{hashlib.sha256(str(real).encode()).hexdigest()[:24]}.json"
    stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    with contextlib.suppress(DataError, KeyError, TypeError):
        known = read_json(cache)
        if known["stamp"] == stamp:
            return str(known["sha256"])
    found = digest(path)
    with contextlib.suppress(DataError, OSError):  # without a cache it is computed again
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_json(cache, {"file": str(real), "stamp": stamp, "sha256": found})
    return found


def picture_checksums(paths: Sequence[Path]) -> Record:
    """The entry `pictures` of an answer's metadata: one checksum for each image; empty for a question without any."""
    found = [_content(path, *_times(path)) for path in paths]
    return {"pictures": "".join(found)} if found else {}


def changed_pictures(since: int, pictures: Mapping[int, Sequence[Path]], answers: Mapping[int, Record]) -> list[int]:
    """Indexes of questions whose images have changed since they were answered. Only images with a later time than
    the answers are read; those that are gone count as unchanged.

    Args:
        since: when answers were written last, in nanoseconds.
        images: files of each question's images, by its index.
        answers: records by the same indexes.
    """
    every = {path for paths in pictures.values() for path in paths}
    newer = {path for path in every if path.exists() and max(_times(path)) > since}
    found = []
    for index, paths in pictures.items() if newer else ():
        stored = answers[index]["metadata"].get("pictures")
        if stored is not None and not newer.isdisjoint(paths) and all(path.exists() for path in paths):
            found += [index] if picture_checksums(paths)["pictures"] != stored else []
    return found


def _times(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_ctime_ns


@lru_cache(maxsize=1024)  # most images have several questions
def _content(path: Path, *_times: int) -> str:
    return f"{crc32(path.read_bytes()):08x}"
