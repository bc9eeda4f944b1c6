"""The reduction methods. METHODS is the only list: a new method is one file here and one line below
(docs/adding.md). A method's file is imported when the method is used; what lists and messages say is read from its
text, so that they need no torch.
"""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from llava_consensus.entry_points import load_registered, registered
from llava_consensus.errors import OptionError, unknown_name
from llava_consensus.methods.catalogue import Catalogue, checked

if TYPE_CHECKING:
    from llava_consensus.reduction.method import Method

GROUP = "llava_consensus.methods"  # entry points of other packages

METHODS = Catalogue(
    {
        "consensusdrop": "consensusdrop:ConsensusDrop",
        "consensusdrop+": "consensusdrop_plus:ConsensusDropPlus",
        "full": "full:Full",
        # at the picture, or inside the vision tower
        "downsample": "downsample:Downsample",
        "tome": "tome:ToMe",
        # behind the tower, before the language model
        "prumerge": "prumerge:PruMerge",
        "prumerge_plus": "prumerge_plus:PruMergePlus",
        "visionzip": "visionzip:VisionZip",
        "vispruner": "vispruner:VisPruner",
        "divprune": "divprune:DivPrune",
        "cdpruner": "cdpruner:CDPruner",
        "tome_post": "tome_post:ToMePost",
        "random": "random:Random",
        "uniform_grid": "uniform_grid:UniformGrid",
        "pool": "pool:Pool",
        # between decoder layers
        "fastv": "fastv:FastV",
        "sparsevlm": "sparsevlm:SparseVLM",
        "pyramiddrop": "pyramiddrop:PyramidDrop",
        "dart": "dart:Dart",
    }
)


def method_class(name: str) -> "type[Method]":
    """The class of a method: one of METHODS, or one that an installed package registers under the entry point
    `llava_consensus.methods` (docs/adding.md).

    Raises:
        OptionError: for a name that is neither, or a registered one that is no method or cannot be imported.
    """
    if name in METHODS:
        return METHODS[name]
    found, where = load_registered(GROUP, "method", name, METHODS)
    return checked(where, found)


def known_methods() -> dict[str, str]:
    """Every method by name with its one line: ours, then those of other packages."""
    lines = {name: METHODS.line(name) for name in METHODS}
    return lines | {name: f"of {place}" for name, place in registered(GROUP).items() if name not in METHODS}


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
    try:
        method: Method = method_type(**options)
    except TypeError as error:
        raise OptionError(f"options of method {name!r}: {error}") from error
    return method
