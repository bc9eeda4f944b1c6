"""Options of a method: their annotations define the allowed values, and one function checks them.

order: Literal["top_then_merged", "raster"]     one of these
alpha: Ratio                                    a number in [0, 1]
layer: int | None                               a whole number, or left out

The functions at the end check one value each. Needs no torch.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from llava_consensus.errors import OptionError


class Bounds(NamedTuple):
    """The interval of a number: [low, high], or (low, high] with `open_low`."""

    low: float
    high: float = math.inf
    open_low: bool = False

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'above' if self.open_low else 'of at least'} {self.low:g}"
        return f"in {'(' if self.open_low else '['}{self.low:g}, {self.high:g}]"


Ratio = Annotated[float, Bounds(0.0, 1.0)]
Positive = Annotated[float, Bounds(0.0, open_low=True)]
NotNegative = Annotated[float, Bounds(0.0)]


def annotations(kind: type) -> dict[str, Any]:
    """Annotation of each option of a method's class."""
    found = {field.name: field.type for field in fields(kind)}
    if any(isinstance(one, str) for one in found.values()):  # of a file with postponed annotations
        hints = get_type_hints(kind, include_extras=True)
        found = {name: hints[name] for name in found}
    return found


class _Kind(NamedTuple):
    kind: Any  # the annotation without None
    optional: bool  # whether None is allowed
    choices: tuple[Any, ...] | None  # the values of a literal
    bounds: Bounds | None
    whole: bool  # whether the bounds are those of a whole number


def _read(annotation: Any) -> _Kind:
    kind, optional = annotation, False
    if get_origin(annotation) in (Union, UnionType):
        parts = [one for one in get_args(annotation) if one is not type(None)]
        kind, optional = parts[0] if len(parts) == 1 else None, len(parts) < len(get_args(annotation))
    bounds = next((one for one in getattr(kind, "__metadata__", ()) if isinstance(one, Bounds)), None)
    choices = get_args(kind) if get_origin(kind) is Literal else None
    return _Kind(kind, optional, choices, bounds, bounds is not None and get_args(kind)[0] is int)


@cache  # a class keeps its annotations, and methods are made at every attach
def _kinds(method: type) -> dict[str, _Kind]:
    return {name: _read(annotation) for name, annotation in annotations(method).items()}


def check_options(method: Any) -> None:
    """Checks every option of a method against its annotation; one that says nothing of these kinds is not checked.

    Raises:
        OptionError: for a value that the annotation does not allow.
    """
    for name, (kind, optional, choices, bounds, is_whole) in _kinds(method.__class__).items():
        value = getattr(method, name)
        if optional and value is None:
            continue
        if choices is not None:
            choose(name, value, choices)
        elif kind is bool:
            boolean(name, value)
        elif bounds is not None and is_whole:
            at_least(name, value, int(bounds.low))
        elif bounds is not None:
            within(name, value, bounds)
        elif kind is int:
            whole(name, value, optional)


def allowed(annotation: Any) -> str:
    """The values of an option, in words for lists; empty for a text."""
    kind, optional, choices, bounds, is_whole = _read(annotation)
    if choices is not None:
        words = " | ".join(choices)
    elif kind is bool:
        words = "true | false"
    elif bounds is not None:
        words = f"{'a whole number' if is_whole else 'a number'} {bounds}"
    else:
        words = {int: "a whole number", float: "a number"}.get(kind, "")
    return f"{words}, or null" if words and optional else words


def options(pairs: Iterable[str]) -> dict[str, Any]:
    """`key=value` texts as options; a value is read as JSON if it is JSON (0.5, true, null), else as text.

    Raises:
        OptionError: for a text without a key or `=`, and for a key that is given twice.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise OptionError(f"option {pair!r} must be KEY=VALUE, for example alpha=0.5")
        if key in found:
            raise OptionError(f"option {key} is given twice, the second time as {value}: give it once")
        try:
            found[key] = json.loads(value, parse_constant=str)  # NaN and Infinity are no JSON: text
        except (ValueError, RecursionError):
            found[key] = value
    return found


def choose(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise OptionError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise OptionError(f"{name}={value!r} must be one of {', '.join(allowed)}")


def within(name: str, value: object, bounds: Bounds) -> None:
    """Raise OptionError unless `value` is a number in these bounds."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    low, high, open_low = bounds
    if not number or not (low < value if open_low else low <= value) or not value <= high:  # type: ignore[operator]
        raise OptionError(f"{name}={value!r} must be a number {bounds}")


def boolean(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r} must be true or false")


def whole(name: str, value: object, optional: bool = False) -> None:
    """Raise OptionError unless `value` is a whole number, or None with `optional`."""
    if not (value is None and optional) and (not isinstance(value, int) or isinstance(value, bool)):
        raise OptionError(f"{name}={value!r} must be a whole number{', or left out' if optional else ''}")


def at_least(name: str, value: object, low: int) -> None:
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
