"""A view of a model whose code is not here, to ask what its host refuses whatever that code is."""

from types import SimpleNamespace
from typing import Any

from torch import nn

from llava_consensus.errors import OptionError

UNKNOWN = "nobody knows without the code that the checkpoint carries"


def unseen(view_class: Any, tower_class: Any, check: Any) -> Any:
    """A view to which no method can be attached: for the reasons of the class where it has some, else because nobody
    knows.

    Args:
        view_class: the view of the host.
        tower_class: of its tower, which says what it offers.
        check: function of the view class that refuses methods and asks the model nothing.
    """

    def entrances(view: Any, attachment: Any) -> Any:
        raise OptionError(UNKNOWN)

    known = {"offers": tower_class.offers, "classes": tower_class.classes, "members": None}
    tower = SimpleNamespace(**known, tokens=1, blocks=range(3), feature_block=0, taps=lambda *given: [])
    parts = {"tower": tower, "most_tiles": 1, "check": check, "entrances": entrances}
    view: Any = object.__new__(type(view_class.__name__, (view_class,), parts))
    view.module = nn.Module()
    return view
