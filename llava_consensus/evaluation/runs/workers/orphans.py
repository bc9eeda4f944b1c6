"""Ends what a killed driver leaves of the Ray cluster it had started: a process of its own that outlives the driver.

Ray's own daemons end with their parent, but agents of the raylet do not. `watch()` starts this file as a script, which
waits until its standard input is closed, as it is when the driver dies in whatever way, and then kills the processes
that have a file of the driver's Ray session open. A cluster that was joined has a session of another process, and is
left alone. Linux only; elsewhere nothing is done.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PAUSE = 0.5  # seconds between two looks at all processes: one that is ending may just have started another
LOOKS = 20


def watch() -> "subprocess.Popen[bytes]":
    """Starts the watcher of this process, before Ray; kill it when Ray was shut down in order."""
    command = [sys.executable, "-I", __file__, str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def end(driver: int) -> None:
    """Kills what is left of the session of the process `driver`, for as long as something is."""
    for _ in range(LOOKS):
        found = list(_processes(driver))
        for process in found:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                os.kill(process, signal.SIGKILL)
        if not found:
            return
        time.sleep(PAUSE)


def _processes(driver: int) -> Iterator[int]:
    """Those with an open file in a folder `session_<date>_<driver>`, as Ray names it."""
    session = re.compile(rf"/session_[^/]*_{driver}/")
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(session.search(os.readlink(file)) for file in (process / "fd").iterdir()):
                yield int(process.name)
        except OSError:  # ended meanwhile, or another user's
            continue


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end(int(sys.argv[1]))
