"""Lock files: one process at a time works in a folder. Used by runs and by the judge.

`lock = take_lock(folder / "lock", "this run")`, then `check_lock(lock, folder / "lock")` before each write: a lock file
that was deleted protects nobody, which libraries of locks look at only when they take one.
"""

import fcntl
import os
from pathlib import Path

from llava_consensus.errors import BusyError


def take_lock(path: Path, what: str) -> int:
    """Takes the lock file `path`, made if absent: a descriptor to close. The system lets go of it when a process dies.

    Raises:
        BusyError: another process has it; `what` says in words what that one works on.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(lock, 32).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise BusyError(
            f"{path.parent}: another process (pid {owner}) is working on {what}. Wait for it, or stop it first"
        ) from None
    try:
        check_lock(lock, path)  # deleted between the two calls
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
    except BaseException:
        os.close(lock)
        raise
    return lock


def check_lock(lock: int, path: Path) -> None:
    """Raises BusyError where the lock file that was taken is no longer the one at `path`: it was deleted or replaced,
    and another process may have taken the new one.
    """
    try:
        there, mine = os.stat(path), os.fstat(lock)
        same = (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)
    except OSError:
        same = False
    if not same:
        raise BusyError(
            f"{path}: was deleted while this process worked, so another one may be at work too. Stopped before writing "
            "anything more; what was written is kept, and the same command goes on"
        )
