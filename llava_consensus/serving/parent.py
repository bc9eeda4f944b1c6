"""Processes that end with the one that started them, even if it is killed: vLLM's engine would wait for ever."""

import ctypes
import os
import signal
import sys

PARENT = "LLAVA_CONSENSUS_PARENT"  # variable that says whose children end with it
PDEATHSIG = 1  # of prctl(2): the signal that a process gets when the thread that started it ends


def end_with_parent() -> None:
    """Makes this process end with its parent, if it was started so. `register` calls it in spawned ones."""
    if os.environ.get(PARENT) == str(os.getppid()):
        bind()


def bind() -> None:
    """Makes this process, and the program it becomes, end when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
