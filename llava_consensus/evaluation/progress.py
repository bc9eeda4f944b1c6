"""Progress: a bar on a terminal; in a file, where a bar would be one endless line, a line each minute."""

import sys
from typing import Any

from tqdm import tqdm

EVERY = 60.0  # seconds


class _Lines:
    """Standard error, to which each state of a bar is written as a line of its own."""

    def write(self, text: str) -> None:
        state = text.strip()  # of the carriage return before it, and the spaces over the state before
        if state:
            print(state, file=sys.stderr, flush=True)

    def flush(self) -> None:
        sys.stderr.flush()


def counted(*given: Any, shown: bool = True, **settings: Any) -> "tqdm[Any]":
    """A `tqdm` on standard error; none with `shown=False`."""
    settings["disable"] = not shown
    if not sys.stderr.isatty():
        settings |= {"file": _Lines(), "mininterval": EVERY, "maxinterval": EVERY}
    return tqdm(*given, **settings)
