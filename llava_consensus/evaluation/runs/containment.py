"""Whether a question file leads out of its data: a name may be absolute, climb with `..`, or lead through a link."""

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from llava_consensus.errors import DataError


def check_inside(folder: Path, files: Iterable[Path]) -> None:
    """Raises DataError for the first file that is not in the folder, wherever that itself lies."""
    real = cache(os.path.realpath)
    root = os.path.realpath(folder)
    for path in dict.fromkeys(files):
        try:
            place = real(path) if path.is_symlink() or path.name == ".." else os.path.join(real(path.parent), path.name)
        except (ValueError, OSError):  # a name that no file can have
            continue
        if place != root and not place.startswith(os.path.join(root, "")):
            raise DataError(
                f"{path}: leads out of {folder}, to {place}. Names of pictures and videos may be absolute, climb with "
                "'..' or go through a link only where that is meant: then give --allow-outside"
            )
