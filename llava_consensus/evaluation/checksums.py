"""Checksums of the inputs of a run: question files and weights.

The checksum of a large file is cached in ~/.cache by its size and times, so that weights are read once.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import digest, read_json, write_json

LARGE = 1 << 26  # bytes; the checksum of a larger file is cached
IDENTITY = "assembled"  # beside weights that were computed on this machine
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


def checksum_of_weights(folder: Path, files: Iterable[Path]) -> str:
    """The checksum of a checkpoint's files. Of one that was assembled from parts, whose last bits depend on the
    machine, the name in IDENTITY, if they are as they were assembled: it is the same on every machine.
    """
    found = checksum_of(files)
    known = read_json(folder / IDENTITY, kind=dict) if (folder / IDENTITY).exists() else {}
    return str(known["name"]) if known.get("checksum") == found else found


def cached_checksum(path: Path) -> str:
    real, status = path.resolve(), path.stat()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(home, "llava-consensus/digests", f"{hashlib.sha256(str(real).encode()).hexdigest()[:24]}.json")
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
