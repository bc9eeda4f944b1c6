"""A zip into a folder: every member is checked while it is read, appears whole or not at all, and stays in the folder.

What is there already in its full size is not written again, so a second call goes on.
"""

import os
import shutil
import zipfile
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from llava_consensus.errors import DataError

FRESH = ".unpacking"


def unpack(archive: Path, folder: Path, only: str = "", without: str = "") -> int:
    """Writes the members of a zip below a folder; returns how many there are.

    Args:
        archive: the zip.
        folder: made where it is not there.
        only: a pattern of names, as shells have them; empty takes all.
        without: a leading folder of the members that is left out.
    Raises:
        DataError: no zip, a damaged one, a member that leads out of the folder, or none that matches.
    """
    try:
        with zipfile.ZipFile(archive) as content:
            members = [one for one in content.infolist() if not one.is_dir() and _wanted(one.filename, only)]
            if not members:
                raise DataError(f"{archive}: nothing in it matches {only}: another version. Fetch it again")
            _check_room(archive, folder, sum(one.file_size for one in members))
            for member in members:
                _write(content, member, _place(archive, folder, member.filename.removeprefix(without)))
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise DataError(f"{archive}: {error}. It is damaged: remove it and give the same command") from error
    return len(members)


def _wanted(name: str, only: str) -> bool:
    return (not only or fnmatchcase(name, only)) and not name.startswith("__MACOSX/")


def _place(archive: Path, folder: Path, name: str) -> Path:
    """Where a member belongs; DataError for one that would be somewhere else."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if not parts or ".." in parts or PurePosixPath(name).is_absolute() or ":" in parts[0]:
        raise DataError(f"{archive}: its member {name!r} leads out of {folder}, so nothing of it is unpacked further")
    return folder.joinpath(*parts)


def _write(content: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path) -> None:
    if target.is_file() and target.stat().st_size == member.file_size:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(target.name + FRESH)
    with content.open(member) as source, open(fresh, "wb") as file:
        shutil.copyfileobj(source, file)
    os.replace(fresh, target)


def _check_room(archive: Path, folder: Path, needed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DataError(f"{archive}: needs {needed:,} bytes in {folder}, where {free:,} are free. Make room")
