"""The reduction methods. METHODS is the only list: a new method is one file here and one line below
(docs/adding.md).
"""

from dataclasses import fields, is_dataclass
from importlib.metadata import entry_points
from inspect import isclass
from typing import Any

from llava_consensus.errors import OptionError, unknown_name
from llava_consensus.methods.cdpruner import CDPruner
from llava_consensus.methods.consensusdrop import ConsensusDrop
from llava_consensus.methods.consensusdrop_plus import ConsensusDropPlus
from llava_consensus.methods.dart import Dart
from llava_consensus.methods.divprune import DivPrune
from llava_consensus.methods.downsample import Downsample
from llava_consensus.methods.fastv import FastV
from llava_consensus.methods.full import Full
from llava_consensus.methods.pool import Pool
from llava_consensus.methods.prumerge import PruMerge
from llava_consensus.methods.prumerge_plus import PruMergePlus
from llava_consensus.methods.pyramiddrop import PyramidDrop
from llava_consensus.methods.random import Random
from llava_consensus.methods.sparsevlm import SparseVLM
from llava_consensus.methods.tome import ToMe
from llava_consensus.methods.tome_post import ToMePost
from llava_consensus.methods.uniform_grid import UniformGrid
from llava_consensus.methods.visionzip import VisionZip
from llava_consensus.methods.vispruner import VisPruner
from llava_consensus.reduction.decoder import InDecoder
from llava_consensus.reduction.method import AfterTower, AtPicture, InTower, Method

GROUP = "llava_consensus.methods"  # entry points of other packages
BASES = (AtPicture, InTower, AfterTower, InDecoder)  # a method of another package derives from one of them

METHODS: dict[str, type[Method]] = {
    "consensusdrop": ConsensusDrop,
    "consensusdrop+": ConsensusDropPlus,
    "full": Full,
    # at the picture, or inside the vision tower
    "downsample": Downsample,
    "tome": ToMe,
    # behind the tower, before the language model
    "prumerge": PruMerge,
    "prumerge_plus": PruMergePlus,
    "visionzip": VisionZip,
    "vispruner": VisPruner,
    "divprune": DivPrune,
    "cdpruner": CDPruner,
    "tome_post": ToMePost,
    "random": Random,
    "uniform_grid": UniformGrid,
    "pool": Pool,
    # between decoder layers
    "fastv": FastV,
    "sparsevlm": SparseVLM,
    "pyramiddrop": PyramidDrop,
    "dart": Dart,
}


def method_class(name: str) -> type[Method]:
    """The class of a method: one of METHODS, or one that an installed package registers under the entry point
    `llava_consensus.methods` (docs/adding.md).

    Raises:
        OptionError: for a name that is neither, or a registered one that is no method or cannot be imported.
    """
    if name in METHODS:
        return METHODS[name]
    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in entries:
        raise unknown_name("method", name, [*METHODS, *entries])
    try:
        registered = entries[name].load()
    except (ImportError, AttributeError) as error:
        raise OptionError(f"method {name!r} of {entries[name].value}: cannot be imported ({error})") from error
    _check_acts(f"method {name!r} of {entries[name].value}", registered)
    return registered


def _check_acts(where: str, candidate: Any) -> None:
    """Raises OptionError unless `found` is a dataclass that derives from one of the bases and writes what that asks."""
    if not isclass(candidate) or not issubclass(candidate, BASES) or not is_dataclass(candidate):
        names = ", ".join(base.__name__ for base in BASES)
        raise OptionError(f"{where}: must be a dataclass that derives from one of {names} (docs/adding.md)")
    missing = sorted(candidate.__abstractmethods__)
    if missing:
        raise OptionError(f"{where}: does nothing yet, write its `{'` and `'.join(missing)}` (docs/adding.md)")


def known_methods() -> dict[str, str]:
    """Every method by name with its one line: ours, then those of other packages."""
    lines = {
        name: (method.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ") for name, method in METHODS.items()
    }
    entry_lines = {entry.name: f"of {entry.value}" for entry in entry_points(group=GROUP) if entry.name not in METHODS}
    return {name: " ".join(line.split()) for name, line in (lines | entry_lines).items()}


def make(name: str, **options: Any) -> Method:
    """The method called `name` with these options, checked before anything is loaded.

    Raises:
        OptionError: for an unknown name, an unknown option or a value outside its bound.
    """
    method_type = method_class(name)
    option_names = [field.name for field in fields(method_type)]
    for option in options:
        if option not in option_names:
            raise unknown_name(f"option of method {name!r}", option, option_names)
    try:
        method: Method = method_type(**options)
    except TypeError as error:
        raise OptionError(f"options of method {name!r}: {error}") from error
    return method
