"""The reduction methods. METHODS is the only list: a new method is one file here and one line in it (docs/adding.md).

METHODS["fastv"]        the class; imports its file, and with it torch
METHODS.line("fastv")   what it does, in one line; read from the text of its file, which is not imported
"""

import ast
import inspect
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from inspect import isclass
from typing import TYPE_CHECKING, Any, NamedTuple

from llava_consensus.entry_points import Registry, Text, lineage, load_registered, registered
from llava_consensus.errors import OptionError, unknown_name

if TYPE_CHECKING:
    from llava_consensus.reduction.method import Method


WORDS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
BASES = "llava_consensus.reduction."  # what a method does not write itself, it has from there
PLACES = f"{BASES}method:Place"
ENTRY = re.compile(r"    (\w[\w, ]*): (.+)")


class Option(NamedTuple):
    """One option."""

    name: str
    default: str  # as it is written on the command line
    text: str  # what it means and what it may be; empty where no class says so


class About(NamedTuple):
    """What a method says of itself."""

    place: str  # where it acts
    paragraphs: list[str]  # of its class and of its file: idea, paper, what differs
    options: list[Option]
    costs: list[tuple[str, str, str]]  # functions that count: name, what is counted, and their lines


def about(name: str) -> About:
    """What a method says of itself, in the text of its file and of those of its bases.

    Raises:
        OptionError: as `method_class`, which imports the method only where it is another package's.
    """
    place = METHODS.data.get(name)
    if isinstance(place, str):
        texts = list(lineage(place))
    else:
        classes = method_class(name).__mro__
        texts = [text for one in classes for text in list(lineage(f"{one.__module__}:{one.__name__}"))[:1]]
    summary, page = (ast.get_docstring(node) or "" for node in (texts[0].node, texts[0].page))
    written = [summary.split("\n\n")[0], *page.split("\n\n")]
    return About(
        _place(texts), [" ".join(paragraph.split()) for paragraph in written], _options(texts), list(_costs(texts))
    )


def _options(texts: Sequence[Text]) -> list[Option]:
    """Every field with what the `Args` of the class, or of the nearest base that has it, say about it."""
    told: dict[str, str] = {}
    defaults: dict[str, str] = {}
    for text in reversed(texts):
        told |= dict(_arguments(ast.get_docstring(text.node) or ""))
        for one in text.node.body:
            if isinstance(one, ast.AnnAssign) and one.value and not ast.unparse(one.annotation).startswith("ClassVar"):
                defaults[ast.unparse(one.target)] = _written(ast.literal_eval(one.value))
    return [Option(name, default, told.get(name, "")) for name, default in defaults.items()]


def _place(texts: Sequence[Text]) -> str:
    """The words of the `Place` that the nearest class names."""
    for text in texts:
        for one in text.node.body:
            if isinstance(one, ast.AnnAssign) and ast.unparse(one.target) == "place" and one.value:
                (words,) = (
                    ast.literal_eval(place.value)
                    for place in next(lineage(PLACES)).node.body
                    if isinstance(place, ast.Assign)
                    and f"Place.{ast.unparse(place.targets[0])}" == ast.unparse(one.value)
                )
                return str(words)
    return ""


def _costs(texts: Sequence[Text]) -> Iterator[tuple[str, str, str]]:
    """The functions that count what a method costs, but those that it has from the bases; `flops` in any case."""
    for name in ("entering", "vision_tokens", "flops"):
        for text in texts:
            found = [one for one in text.node.body if isinstance(one, ast.FunctionDef) and one.name == name]
            if found and (name == "flops" or not text.module.startswith(BASES)):
                said = ast.get_docstring(found[0])
                words = " ".join((said or "").split("\n\n")[0].split())  # without its `Raises`
                yield name, words, "\n".join(ast.unparse(line) for line in found[0].body[bool(said) :])
            if found:
                break


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


GROUP = "llava_consensus.methods"  # entry points of other packages


class Methods(Registry):
    """Methods by name; what lists say of them is read from the text of their files, which are not imported."""

    def line(self, name: str) -> str:
        """The first paragraph of a method's docstring, in one line."""
        text = ast.get_docstring(next(lineage(self.data[name])).node) or ""
        return " ".join(text.split("\n\n")[0].split())

    def title(self, name: str) -> str:
        """What tables call a method."""
        for node in next(lineage(self.data[name])).node.body:
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "title" and node.value:
                return ast.literal_eval(node.value) or name
        return name


METHODS = Methods(
    __name__,
    {
        "consensusdrop": "consensusdrop:ConsensusDrop",
        "consensusdrop+": "consensusdrop_plus:ConsensusDropPlus",
        "full": "full:Full",
        # at the picture, or inside the vision tower
        "downsample": "downsample:Downsample",
        "tome": "tome:ToMe",
        # after the tower, before the language model
        "prumerge": "prumerge:PruMerge",
        "prumerge_plus": "prumerge_plus:PruMergePlus",
        "visionzip": "visionzip:VisionZip",
        "vispruner": "vispruner:VisPruner",
        "divprune": "divprune:DivPrune",
        "cdpruner": "cdpruner:CDPruner",
        "scope": "scope:Scope",
        "holov": "holov:HoloV",
        "idpruner": "idpruner:IDPruner",
        "idselection": "idselection:IDSelection",
        "mfpruner": "mfpruner:MFPruner",
        "restore": "restore:Restore",
        "otprune": "otprune:OTPrune",
        "hiprune": "hiprune:HiPrune",
        "vscan": "vscan:VScan",
        "tome_post": "tome_post:ToMePost",
        "random": "random:Random",
        "uniform_grid": "uniform_grid:UniformGrid",
        "pool": "pool:Pool",
        # the same, over the frames of a video
        "vidcom2": "vidcom2:VidCom2",
        "evs": "evs:EVS",
        # between decoder layers
        "fastv": "fastv:FastV",
        "sparsevlm": "sparsevlm:SparseVLM",
        "pyramiddrop": "pyramiddrop:PyramidDrop",
        "dart": "dart:Dart",
    },
)


def method_class(name: str) -> "type[Method]":
    """The class of a method: one of METHODS, or one that an installed package registers under the entry point
    `llava_consensus.methods` (docs/adding.md).

    Raises:
        OptionError: for a name that is neither, or a registered one that is no method or cannot be imported.
    """
    if name in METHODS:
        ours: type[Method] = METHODS[name]
        return ours
    found, where = load_registered(GROUP, "method", name, METHODS)
    return checked(where, found)


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


def known_methods() -> dict[str, str]:
    """Every method by name with its one line: ours, then those of other packages."""
    lines = {name: METHODS.line(name) for name in METHODS}
    return lines | {name: f"of {place}" for name, place in registered(GROUP).items() if name not in METHODS}


def method_name(method: "Method") -> str:
    """The name a method's class is registered under; the name of the class where it is not registered."""
    kind = type(method)
    for name, known in METHODS.data.items():
        if known in (kind, f"{kind.__module__}:{kind.__name__}"):
            return name
    for name in registered(GROUP):
        with suppress(OptionError):  # a broken method of another package is not this one
            if method_class(name) is kind:
                return name
    return kind.__name__


def make(name: str, **options: Any) -> "Method":
    """The method called `name` with these options, checked before anything is loaded.

    Raises:
        OptionError: for an unknown name, an unknown option or a value outside its bound.
    """
    method_type = method_class(name)
    option_names = [field.name for field in fields(method_type)]
    for option in options:
        if option not in option_names:
            error = unknown_name(f"option of method {name!r}", option, option_names)
            raise OptionError(f"{error}. Defaults and bounds: llava-consensus list {name}")
    flags = [field.name for field in fields(method_type) if isinstance(field.default, bool) and field.name in options]
    options |= {name: truth(name, options[name]) for name in flags}
    try:
        method: Method = method_type(**options)
    except TypeError as error:
        raise OptionError(f"options of method {name!r}: {error}") from error
    object.__setattr__(method, "asked", frozenset(options))
    return method
