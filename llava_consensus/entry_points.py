"""Classes by their place, `module:Class`: of this package, or registered by another one as an entry point, which makes
its methods and benchmarks known wherever both are installed (docs/adding.md).
"""

from collections import UserDict
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from llava_consensus.errors import OptionError, unknown_name


def load_place(place: str) -> Any:
    return EntryPoint("", place, "").load()


class Registry(UserDict[str, Any]):
    """Classes of this package by name, each imported when it is used.

    Args:
        package: that has them.
        places: `file:Class` of each, in the order of lists.
    """

    def __init__(self, package: str, places: Mapping[str, str]) -> None:
        super().__init__({name: f"{package}.{place}" for name, place in places.items()})

    def __getitem__(self, name: str) -> Any:
        found = self.data[name]  # `module:name`, or a class that was assigned
        return load_place(found) if isinstance(found, str) else found


def registered(group: str) -> dict[str, str]:
    """The places that installed packages register in a group of entry points, by name."""
    return {entry.name: entry.value for entry in entry_points(group=group)}


def load_registered(group: str, kind: str, name: str, known: Iterable[str]) -> tuple[Any, str]:
    """Object that is registered under a name, and its place as text for messages.

    Args:
        group: of entry points.
        kind: word for these entries, such as "method".
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
