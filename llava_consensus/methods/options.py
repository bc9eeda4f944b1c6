"""The options of a method as its classes document them, and how texts become options that are true or false."""

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple

from llava_consensus.errors import OptionError

if TYPE_CHECKING:
    from llava_consensus.reduction.method import Method

WORDS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
ENTRY = re.compile(r"    (\w[\w, ]*): (.+)")


class Option(NamedTuple):
    """One option."""

    name: str
    default: str  # as it is written on the command line
    text: str  # what it means and what it may be; empty where no class says so


def options(method: "type[Method]") -> list[Option]:
    """Every field of a method with what the `Args` of its class, or of the nearest base that has it, say about it."""
    told: dict[str, str] = {}
    for one in reversed(method.__mro__):
        told |= dict(_arguments(vars(one).get("__doc__") or ""))
    return [Option(field.name, _written(field.default), told.get(field.name, "")) for field in fields(method)]


def truth(name: str, value: object) -> bool:
    """What a value that came as text says: true, yes, on, 1 or false, no, off, 0 in any case; a bool as it is. Without
    this `no` would count as true, as every text does that is not empty.

    Raises:
        OptionError: for anything else.
    """
    word = str(value).strip().lower()
    if word not in WORDS:
        raise OptionError(f"{name}={value!r} must be true or false")
    return WORDS[word]


def _arguments(docstring: str) -> Iterator[tuple[str, str]]:
    """Names and texts below `Args:`."""
    _, _, rest = inspect.cleandoc(docstring).partition("Args:\n")
    names: list[str] = []
    words: list[str] = []
    for line in rest.splitlines():
        if not line.startswith("    "):
            break
        entry = ENTRY.fullmatch(line)
        if entry:
            yield from ((name, " ".join(words)) for name in names)
            names, words = entry[1].split(", "), [entry[2]]
        else:
            words.append(line.strip())
    yield from ((name, " ".join(words)) for name in names)


def _written(value: object) -> str:
    """A default as `--option` takes it."""
    return value if isinstance(value, str) else json.dumps(value)
