"""Python's collector of cyclic garbage rests while much is read at once.

It looks through everything that was made each time there is a quarter more. That is a third of the time in which
100,000 answers are read and scored, and it finds nothing: no record refers to what refers to it.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_resting = 0  # how many callers it rests for
_was_on = True  # before the first of them


@contextmanager
def collector_rests() -> Iterator[None]:
    """For a block, or around a function as a decorator; from several threads at once, until the last one is through.
    One that the user has stopped stays stopped.
    """
    global _resting, _was_on
    with _lock:
        if not _resting:
            _was_on = gc.isenabled()
            gc.disable()
        _resting += 1
    try:
        yield
    finally:
        with _lock:
            _resting -= 1
            if not _resting and _was_on:
                gc.enable()
