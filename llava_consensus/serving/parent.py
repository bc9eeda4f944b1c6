"""Processes that end with the one that started them, even where that one is killed: vLLM's engine would wait for its
next request for ever, with all its memory.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

PARENT = "LLAVA_CONSENSUS_PARENT"  # variable that says whose children end with it
PDEATHSIG = 1  # of prctl(2): the signal that a process gets when the thread that started it ends


@contextmanager
def children_end_too() -> Iterator[None]:
    """Processes that this one starts while the body runs end when it does (on Linux)."""
    _watch_forks()
    os.environ[PARENT] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[PARENT]


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=end_with_parent)


def end_with_parent() -> None:
    """Makes this process end with its parent, if it was started so. `register` calls it in spawned ones."""
    if os.environ.get(PARENT) == str(os.getppid()):
        bind()


def bind() -> None:
    """Makes this process, and the program it becomes, end when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
