"""The reduction methods. METHODS is the only list: a new method is one file here and one line in it (docs/adding.md).

METHODS["fastv"]        the class; imports its file, and with it torch
METHODS.line("fastv")   its description in one line, from the index
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from inspect import isclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llava_consensus.entry_points import Registry, load_registered, registered
from llava_consensus.errors import OptionError, any_case, unknown_name

if TYPE_CHECKING:
    from llava_consensus.reduction.method import Method


PLUS = re.compile(r"\+(?=[A-Za-z])")  # between the methods of a composition; `consensusdrop+` is a name
WORDS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
INDEX = Path(__file__).with_name("index.json")  # `about` of our methods, made by `make pages`


class Option(NamedTuple):
    name: str
    default: str  # as it is written on the command line
    text: str  # its meaning; empty if undocumented
    values: str  # allowed values; empty for a text


class About(NamedTuple):
    at: str  # module:Class
    title: str  # in tables; empty: its name
    place: str  # where it acts
    paragraphs: list[str]  # docstrings of its class (the first paragraph) and of its file: idea, paper, differences
    options: list[Option]
    counted: dict[str, str]  # functions that count its cost, and the meaning of each
    cost: str  # on the model of the paper


def about(name: str) -> About:
    """Description of a method: of ours from the index, which needs no torch, of another from its class.

    Raises:
        OptionError: as `method_class`.
    """
    kept = _index().get(name)
    if kept is not None and METHODS.data.get(name) == kept.at:
        return kept
    from llava_consensus.methods.index import describe

    return _about(describe(make(name)))


@cache
def _index() -> Mapping[str, About]:
    return {name: _about(row) for name, row in json.loads(INDEX.read_text("utf-8")).items()}


def _about(row: list[Any]) -> About:
    found = About(*row)
    return found._replace(options=[Option(*option) for option in found.options])


def written() -> str:
    """The text of index.json, a line for each method of ours."""
    from llava_consensus.methods.index import describe

    lines = [f'"{name}": {json.dumps(describe(make(name)), ensure_ascii=False)}' for name in METHODS]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def truth(name: str, value: object) -> bool:
    """Parse a flag given as text: true, yes, on, 1 or false, no, off, 0 in any case; a bool as it is. Without
    this `no` would count as true, as every text does that is not empty.

    Raises:
        OptionError: for anything else.
    """
    word = str(value).strip().lower()
    if word not in WORDS:
        raise OptionError(f"{name}={value!r} must be true or false")
    return WORDS[word]


GROUP = "llava_consensus.methods"  # entry points of other packages
RENAMED = {"downsample": "resize"}  # names of before, in commands and in the configurations of kept runs


class Methods(Registry):
    """Methods by name, with their lines in lists."""

    def line(self, name: str) -> str:
        """The first paragraph of a method's docstring, in one line."""
        return about(name).paragraphs[0]

    def title(self, name: str) -> str:
        return about(name).title or name


METHODS = Methods(
    __name__,
    {
        "consensusdrop": "consensusdrop:ConsensusDrop",
        "consensusdrop+": "consensusdrop_plus:ConsensusDropPlus",
        "full": "full:Full",
        # at the image, or inside the vision tower
        "resize": "resize:Resize",
        "pixelprune": "pixelprune:PixelPrune",
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
        "mfpruner": "mfpruner:MFPruner",
        "restore": "restore:Restore",
        "otprune": "otprune:OTPrune",
        "hiprune": "hiprune:HiPrune",
        "hydart": "hydart:HyDART",
        "scorer": "scorer:Scorer",
        "anchorprune": "anchorprune:AnchorPrune",
        "mmtok": "mmtok:MMTok",
        "eadp": "eadp:EADP",
        "vscan": "vscan:VScan",
        "random": "random:Random",
        "uniform_grid": "uniform_grid:UniformGrid",
        "pool": "pool:Pool",
        # the same, over the frames of a video
        "vidcom2": "vidcom2:VidCom2",
        "evs": "evs:EVS",
        "flashvid": "flashvid:FlashVID",
        # between decoder layers
        "fastv": "fastv:FastV",
        "sparsevlm": "sparsevlm:SparseVLM",
        "pyramiddrop": "pyramiddrop:PyramidDrop",
        "dart": "dart:Dart",
        "ivcprune": "ivcprune:IVCPrune",
        "restore_calibrated": "restore:RestoreCalibrated",  # before the first of them
    },
)


def method_class(name: str) -> "type[Method]":
    """The class of a method: one of METHODS, or one that an installed package registers under the entry point
    `llava_consensus.methods` (docs/adding.md).

    Raises:
        OptionError: for a name that is neither, or a registered one that is no method or cannot be imported.
    """
    if name not in METHODS:
        name = any_case(name, (*METHODS, *RENAMED, *registered(GROUP)))
        name = RENAMED.get(name, name)
    if name in METHODS:
        return METHODS[name]
    found, where = load_registered(GROUP, "method", name, METHODS)
    return checked(where, found)


def checked(where: str, candidate: Any) -> "type[Method]":
    """A class that another package registers, once it is known to be a method.

    Args:
        where: its name and place, for the message.
    Raises:
        OptionError: unless it is a dataclass that derives from one of the bases and implements its abstract methods.
    """
    from llava_consensus.reduction.decoder import InDecoder
    from llava_consensus.reduction.method import AfterTower, AtCells, AtImage, InTower

    bases = (AtImage, AtCells, InTower, AfterTower, InDecoder)
    if not isclass(candidate) or not issubclass(candidate, bases) or not is_dataclass(candidate):
        names = ", ".join(base.__name__ for base in bases)
        raise OptionError(f"{where}: must be a dataclass that derives from one of {names} (docs/adding.md)")
    missing = sorted(candidate.__abstractmethods__)
    if missing:
        raise OptionError(f"{where}: does nothing yet, write its `{'` and `'.join(missing)}` (docs/adding.md)")
    return candidate


def known_methods() -> dict[str, str]:
    """Every method by name with its one line: ours, then those of other packages."""
    lines = {name: METHODS.line(name) for name in METHODS}
    return lines | {name: f"of {place}" for name, place in registered(GROUP).items() if name not in METHODS}


def method_name(method: "Method") -> str:
    """The name a method's class is registered under; the name of the class if it is not registered."""
    if names := getattr(method, "stages", ""):
        return "+".join(part.partition(":")[0] for part in PLUS.split(names))
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
    if PLUS.search(name):
        return _composition(name, options)
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


def _composition(name: str, options: dict[str, Any]) -> "Method":
    """Methods one after the other, `NAME:tokens=N,key=value+NAME:key=value` (`reduction/composition.py`).

    Raises:
        OptionError: as `make`, for options given beside it, or methods that do not compose.
    """
    from llava_consensus.reduction.budget import Budget
    from llava_consensus.reduction.composition import Member, composed
    from llava_consensus.reduction.options import options as options_of

    stages = str(options.pop("stages", name))
    if options:
        raise OptionError(
            f"{', '.join(options)}: options of a composition stand in it: NAME:tokens=128,KEY=VALUE+NAME:KEY=VALUE"
        )
    parts = []
    for part in PLUS.split(stages):
        own, _, rest = part.partition(":")
        given = options_of(filter(None, rest.split(",")))
        tokens = given.pop("tokens", None)
        parts.append(Member(make(own, **given), None if tokens is None else Budget(tokens).tokens))
    return composed(stages, parts)
