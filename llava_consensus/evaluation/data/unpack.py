"""A zip into a folder. Members that are there already in their size are not written again, so a second call resumes."""

import shutil
import zipfile
from fnmatch import fnmatchcase
from pathlib import Path

from llava_consensus.errors import DataError


def unpack(archive: Path, folder: Path, only: str = "", without: str = "") -> int:
    """Writes the members of a zip below a folder; returns how many there are. `zipfile` keeps them inside the folder.

    Args:
        archive: the zip.
        folder: made if absent.
        only: a pattern of names, as shells have them; empty takes all.
        without: a leading folder of the members that is left out.
    Raises:
        DataError: no zip, a damaged or encrypted one, too little room, or no member that matches.
    """
    fresh = folder / ".unpacking"  # a member appears in its place whole and checked, or not at all
    try:
        with zipfile.ZipFile(archive) as content:
            members = [one for one in content.infolist() if not one.is_dir() and fnmatchcase(one.filename, only or "*")]
            if not members:
                raise DataError(f"{archive}: nothing in it matches {only}: another version. Fetch it again")
            folder.mkdir(parents=True, exist_ok=True)
            needed, free = sum(one.file_size for one in members), shutil.disk_usage(folder).free
            if free < needed:
                raise DataError(f"{archive}: needs {needed:,} bytes in {folder}, where {free:,} are free. Make room")
            for member in members:
                member.filename = member.filename.removeprefix(without)
                target = folder / member.filename
                if not (target.is_file() and target.stat().st_size == member.file_size):
                    written = Path(content.extract(member, fresh))
                    target = folder / written.relative_to(fresh)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    written.replace(target)
    except DataError:
        raise
    except Exception as error:  # damage breaks zipfile and each kind of compression in its own way
        said = str(error) or type(error).__name__
        raise DataError(f"{archive}: {said}. Damaged, or no zip: remove it and give the same command") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return len(members)
