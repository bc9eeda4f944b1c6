"""The options of a method as its classes document them: `options(ConsensusDrop)` says what each is."""

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from llava_consensus.reduction.method import Method

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
