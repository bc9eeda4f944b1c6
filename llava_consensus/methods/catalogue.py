"""The list of methods as a mapping from names to classes that are imported when they are asked for.

METHODS["fastv"]        the class; imports its file, and with it torch
METHODS.line("fastv")   what it does, in one line; read from its file, which is not imported
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from importlib import import_module
from importlib.util import find_spec
from inspect import isclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_consensus.errors import OptionError

if TYPE_CHECKING:
    from llava_consensus.reduction.method import Method

PACKAGE = __name__.rpartition(".")[0]


class Catalogue(Mapping[str, "type[Method]"]):
    """Methods by name.

    Args:
        places: `file:Class` of each, the file being one of this package.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self.places = {name: tuple(place.split(":")) for name, place in places.items()}

    def __getitem__(self, name: str) -> "type[Method]":
        module, class_name = self.places[name]
        found: type[Method] = getattr(import_module(f"{PACKAGE}.{module}"), class_name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def line(self, name: str) -> str:
        """The first paragraph of a method's docstring, in one line."""
        text = ast.get_docstring(self._class(name)) or ""
        return " ".join(text.split("\n\n")[0].split())

    def title(self, name: str) -> str:
        """What tables call a method."""
        for node in self._class(name).body:
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "title" and node.value:
                return ast.literal_eval(node.value) or name
        return name

    def _class(self, name: str) -> ast.ClassDef:
        """The class of a method as its file has it."""
        module, class_name = self.places[name]
        spec = find_spec(f"{PACKAGE}.{module}")
        assert spec is not None and spec.origin is not None
        nodes = ast.parse(Path(spec.origin).read_text("utf-8")).body
        return next(node for node in nodes if isinstance(node, ast.ClassDef) and node.name == class_name)


def checked(where: str, candidate: Any) -> "type[Method]":
    """A class that another package registers, once it is known to be a method.

    Args:
        where: its name and place, for the message.
    Raises:
        OptionError: unless it is a dataclass that derives from one of the four bases and writes what that one asks for.
    """
    from llava_consensus.reduction.decoder import InDecoder
    from llava_consensus.reduction.method import AfterTower, AtPicture, InTower

    bases = (AtPicture, InTower, AfterTower, InDecoder)
    if not isclass(candidate) or not issubclass(candidate, bases) or not is_dataclass(candidate):
        names = ", ".join(base.__name__ for base in bases)
        raise OptionError(f"{where}: must be a dataclass that derives from one of {names} (docs/adding.md)")
    missing = sorted(candidate.__abstractmethods__)
    if missing:
        raise OptionError(f"{where}: does nothing yet, write its `{'` and `'.join(missing)}` (docs/adding.md)")
    found: type[Method] = candidate
    return found
