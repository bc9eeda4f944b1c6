"""Errors that a user can mend, each with the remedy in its message.

The command line prints `error: <message>` and exits with the class's `exit_code`; a traceback is always our own bug.
The functions at the end check values of options. Needs no torch.
"""

import difflib
import math
from collections.abc import Iterable


class ConsensusError(Exception):
    """Base of every error a user can mend."""

    exit_code = 2


class OptionError(ConsensusError, ValueError):
    """A bad argument: names the argument, the value, the bound and the remedy."""


class DataError(ConsensusError):
    """A missing or damaged file: names the path, the line and where the file comes from."""

    exit_code = 3


class ImageError(DataError):
    """One picture that cannot be read."""


class QuestionError(OptionError):
    """One question that cannot be asked."""


class BusyError(ConsensusError):
    """Another process is working on the same run."""

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


def missing_extra(what: str, extra: str) -> MissingDependency:
    """An error for an absent optional package: `what` needs the extra named `extra`."""
    return MissingDependency(f"{what}: not installed. Type: pip install 'llava-consensus[{extra}]'")


class NonFiniteError(ConsensusError, FloatingPointError):
    """A stage of the reduction produced NaN or infinity; a ranking of such numbers would mean nothing."""


def choose(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise OptionError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise OptionError(f"{name}={value!r} must be one of {', '.join(allowed)}")


def within(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    """Raise OptionError unless `value` is a number in [low, high], or (low, high] with `open_low`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (low < value if open_low else low <= value) or not value <= high:  # type: ignore[operator]
        bound = f"above {low:g}" if high == float("inf") else f"in {'(' if open_low else '['}{low:g}, {high:g}]"
        raise OptionError(f"{name}={value!r} must be a number {bound}")


def boolean(name: str, value: object) -> None:
    """Raise OptionError unless `value` is true or false."""
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r} must be true or false")


def whole(name: str, value: object, optional: bool = False) -> None:
    """Raise OptionError unless `value` is a whole number, or None with `optional`."""
    if not (value is None and optional) and (not isinstance(value, int) or isinstance(value, bool)):
        raise OptionError(f"{name}={value!r} must be a whole number{', or left out' if optional else ''}")


def at_least(name: str, value: object, low: int) -> None:
    """Raise OptionError unless `value` is a whole number of at least `low`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise OptionError(f"{name}={value!r} must be a whole number of at least {low}")


def numbers(name: str, text: object, whole: bool = False) -> list[float]:
    """The numbers of a text such as `8 16 24`, or of one number. OptionError for anything else."""
    try:
        found = [float(word) for word in str(text).split()]
    except ValueError:
        found = [float("nan")]
    if not all(math.isfinite(number) and (not whole or number.is_integer()) for number in found):
        kind = "whole numbers" if whole else "numbers"
        raise OptionError(f"{name}={text!r} must be {kind} with spaces between them, such as '8 16 24'")
    return found
