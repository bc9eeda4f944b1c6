"""Classes by their place, `module:Class`: of this package, or registered by another one as an entry point, which makes
its methods and benchmarks known wherever both are installed (docs/adding.md). What lists say of a class is read from
the text of its file, as importing torch takes seconds.
"""

import ast
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from llava_consensus.errors import OptionError, unknown_name


def load_place(place: str) -> Any:
    """What stands at `module:Class`."""
    return EntryPoint("", place, "").load()


class Text(NamedTuple):
    """A class as its file has it."""

    module: str
    page: ast.Module
    node: ast.ClassDef


def lineage(place: str) -> Iterator[Text]:
    """The class that stands at a place, then its bases: each as far as its file imports it from where it is written."""
    module, _, name = place.partition(":")
    page = _page(module)
    node = next((one for one in page.body if isinstance(one, ast.ClassDef) and one.name == name), None)
    if node is None:
        return
    yield Text(module, page, node)
    imports = [one for one in page.body if isinstance(one, ast.ImportFrom)]
    origin = {alias.name: one.module for one in imports for alias in one.names}
    for base in node.bases:
        if isinstance(base, ast.Name):
            yield from lineage(f"{origin.get(base.id) or module}:{base.id}")


@cache
def _page(module: str) -> ast.Module:
    """The text of a module; empty where Python holds it in another form, as its own `abc`."""
    spec = find_spec(module)
    origin = (spec.origin if spec else None) or ""
    return ast.parse(Path(origin).read_text("utf-8") if origin.endswith(".py") else "")


class Registry(UserDict[str, Any]):
    """Classes of this package by name, each imported when it is used.

    Args:
        package: that has them.
        places: `file:Class` of each, in the order of lists.
    """

    def __init__(self, package: str, places: Mapping[str, str]) -> None:
        super().__init__({name: f"{package}.{place}" for name, place in places.items()})

    def __getitem__(self, name: str) -> Any:
        found = self.data[name]  # a place, or a class that somebody has put in
        return load_place(found) if isinstance(found, str) else found


def registered(group: str) -> dict[str, str]:
    """The places that installed packages register in a group of entry points, by name."""
    return {entry.name: entry.value for entry in entry_points(group=group)}


def load_registered(group: str, kind: str, name: str, known: Iterable[str]) -> tuple[Any, str]:
    """What is registered under a name, and where it stands in words, for messages about it.

    Args:
        group: of entry points.
        kind: what is looked for, in a word.
        known: names of this package, for the message about a name that is neither.
    Raises:
        OptionError: nothing is registered under the name, or it cannot be imported.
    """
    places = registered(group)
    if name not in places:
        raise unknown_name(kind, name, [*known, *places])
    where = f"{kind} {name!r} of {places[name]}"
    try:
        return load_place(places[name]), where
    except (ImportError, AttributeError) as error:
        raise OptionError(f"{where}: cannot be imported ({error})") from error
