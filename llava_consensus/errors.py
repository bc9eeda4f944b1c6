"""Errors that a user can mend, each with the remedy in its message.

The command line prints `error: <message>` and exits with the class's `exit_code`; a traceback is always our own bug.
Needs no torch.
"""

import difflib
from collections.abc import Iterable, Sequence

NAMED = 8  # names in a message


class ConsensusError(Exception):
    """Base of every error a user can mend."""

    exit_code = 2


class OptionError(ConsensusError, ValueError):
    """A bad argument: names the argument, the value, the bound and the remedy."""


class DataError(ConsensusError):
    """A missing or damaged file: names the path, the line and where the file comes from."""

    exit_code = 3


class ImageError(DataError):
    """One image that cannot be read."""


class QuestionError(OptionError):
    """One question that cannot be asked."""


class BusyError(ConsensusError):
    exit_code = 4


class MissingDependency(ConsensusError, ImportError):
    """An optional package is absent: names the pip line to type."""


class Interrupted(ConsensusError):
    """Ctrl-C or a signal that asks to stop: everything is stored, and the same command resumes."""

    exit_code = 130


def unknown_name(kind: str, name: str, known: Iterable[str]) -> OptionError:
    """An error for a name that is in no registry, with near misses and all that exists."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name).lower(), names, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    return OptionError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(names)}")


def plural(count: int, noun: str) -> str:
    """A number with its noun: `1 question`, `2 questions`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED:,} more" if len(names) > NAMED else "")


def any_case(name: str, known: Iterable[str]) -> str:
    """The known name that differs from `name` only in capitals; `name` itself if there is none."""
    names = list(known)
    return name if name in names else next((one for one in names if one.lower() == str(name).lower()), name)


def missing_extra(what: str, extra: str) -> MissingDependency:
    """Error for a missing optional package, required by `what` and installed with the extra `extra`."""
    return MissingDependency(
        f"{what}: not installed. Type: pip install 'llava-consensus[{extra}]', in a clone: pip install -e '.[{extra}]'"
    )


class NonFiniteError(ConsensusError, FloatingPointError):
    """A stage of the reduction produced NaN or infinity; a ranking of such numbers would mean nothing."""
