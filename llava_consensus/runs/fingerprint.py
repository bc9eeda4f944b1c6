"""What identifies files and packages in a run's configuration: contents, places and versions.

fingerprint(weight_files(Path("checkpoints/llava-mini")))
"""

import hashlib
import os
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

LARGE = 1 << 26  # bytes; of larger files only size, beginning and end are read
END = 1 << 20  # bytes that are read of each end of a large file
PACKAGES = (
    "llava-consensus",
    "torch",
    "transformers",
    "llava-torch",
    "tokenizers",
    "pillow",
)  # their versions can change answers
WEIGHTS = {".json", ".safetensors", ".bin", ".model", ".txt"}


def place(name: str) -> str:
    """A folder as seen from here if it lies below, else its full path; the name of a hub's model as it is."""
    path = Path(name).expanduser()
    if not path.exists():
        return name
    path = path.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def weight_files(folder: Path) -> list[Path]:
    """What a checkpoint folder holds that can change answers, a vision tower in a folder of its own included."""
    found = (*folder.glob("[!.]*"), *folder.glob("[!.]*/[!.]*")) if folder.is_dir() else ()
    return sorted(path for path in found if path.suffix in WEIGHTS)


def fingerprint(paths: Iterable[Path]) -> str:
    """One hash of the names and contents of files; of large ones, of their sizes, beginnings and ends."""
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb") as file:
            if size <= LARGE:
                digest.update(file.read())
            else:
                digest.update(file.read(END))
                file.seek(-END, os.SEEK_END)
                digest.update(file.read())
    return digest.hexdigest()


def versions(*more: str) -> dict[str, str | None]:
    """Versions of the packages that can change answers, and of `more`; None for one that is not installed."""
    return {name: _version(name) for name in (*PACKAGES, *more)}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
