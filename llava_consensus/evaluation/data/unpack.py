"""A zip into a folder: every member is checked while it is read, appears whole or not at all, and stays in the folder.

What is there already with the same content is not written again, so a second call goes on.
"""

import contextlib
import os
import shutil
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from zlib import crc32

from llava_consensus.errors import DataError

FRESH = ".unpacking"
PART = 1 << 20  # bytes that are in memory at once


def unpack(archive: Path, folder: Path, only: str = "", without: str = "") -> int:
    """Writes the members of a zip below a folder; returns how many there are.

    Args:
        archive: the zip.
        folder: made where it is not there.
        only: a pattern of names, as shells have them; empty takes all.
        without: a leading folder of the members that is left out.
    Raises:
        DataError: no zip, a damaged or encrypted one, a member that leads out of the folder, that is a folder too or
            whose name no file can have, or none that matches.
    """
    try:
        content = zipfile.ZipFile(archive)
    except Exception as error:  # a damaged directory breaks it in many ways
        raise _damaged(archive, error) from error
    with content:
        members = [one for one in content.infolist() if not one.is_dir() and _wanted(one.filename, only)]
        if not members:
            raise DataError(f"{archive}: nothing in it matches {only}: another version. Fetch it again")
        _check_room(archive, folder, sum(one.file_size for one in members))
        for member in members:
            _write(archive, content, member, _place(archive, folder, member.filename.removeprefix(without)))
    return len(members)


def _damaged(archive: Path, error: Exception) -> DataError:
    said = str(error) or type(error).__name__
    return DataError(f"{archive}: {said}. It is damaged, or no zip: remove it and give the same command")


def _wanted(name: str, only: str) -> bool:
    return (not only or fnmatchcase(name, only)) and not name.startswith("__MACOSX/")


def _place(archive: Path, folder: Path, name: str) -> Path:
    """Where a member belongs; DataError for one that would be somewhere else."""
    path = PurePosixPath(name.replace("\\", "/"))
    if not path.parts or ".." in path.parts or path.is_absolute() or ":" in path.parts[0]:
        raise DataError(f"{archive}: its member {name!r} leads out of {folder}, so nothing of it is unpacked further")
    return folder / path


def _is_there(target: Path, member: zipfile.ZipInfo) -> bool:
    """Whether a file has the content of a member."""
    if not target.is_file() or target.stat().st_size != member.file_size:
        return False
    total = 0
    with open(target, "rb") as file:
        while part := file.read(PART):
            total = crc32(part, total)
    return total == member.CRC


def _write(archive: Path, content: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path) -> None:
    fresh = target.with_name(target.name + FRESH)
    try:
        if _is_there(target, member):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(fresh, "wb") as file:
            for part in _parts(archive, content, member):
                file.write(part)
        os.replace(fresh, target)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise DataError(f"{target}: cannot be written ({getattr(error, 'strerror', None) or error})") from error
    finally:
        with contextlib.suppress(OSError, ValueError):
            fresh.unlink(missing_ok=True)


def _parts(archive: Path, content: zipfile.ZipFile, member: zipfile.ZipInfo) -> Iterator[bytes]:
    """The content of a member, checked; damage in it breaks every kind of compression in its own way."""
    try:
        with content.open(member) as source:
            while part := source.read(PART):
                yield part
    except Exception as error:
        raise _damaged(archive, error) from error


def _check_room(archive: Path, folder: Path, needed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DataError(f"{archive}: needs {needed:,} bytes in {folder}, where {free:,} are free. Make room")
