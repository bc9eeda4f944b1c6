"""Methods of other packages, registered by entry point."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from llava_consensus import methods
from llava_consensus.errors import OptionError
from llava_consensus.reduction.budget import Budget

PLUGIN = '''
from dataclasses import dataclass

from llava_consensus.output import assemble
from llava_consensus.reduction.method import Placement

NOT_A_METHOD = 3


@dataclass(frozen=True, kw_only=True)
class Front(Placement):
    """The first T tokens."""

    skip: int = 0

    def reduce(self, tokens, budget):
        first = tokens.columns[:, : budget.tokens] * 0 + self.skip
        return assemble(tokens.projected, first.cumsum(1) * 0 + first, self.order)
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "front_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    found = [
        EntryPoint("front", "front_plugin:Front", methods.GROUP),
        EntryPoint("number", "front_plugin:NOT_A_METHOD", methods.GROUP),
        EntryPoint("gone", "no_such_package:Gone", methods.GROUP),
        EntryPoint("random", "front_plugin:Front", methods.GROUP),
    ]
    monkeypatch.setattr(methods, "entry_points", lambda group: found if group == methods.GROUP else [])


def test_a_registered_method_is_made_like_ours(plugin: None) -> None:
    method = methods.make("front", skip=2)
    assert type(method).__name__ == "Front" and method.entering(Budget(5), 9, 2) == [5, 5]
    with pytest.raises(OptionError, match=r"unknown option of method 'front' 'skp'. Did you mean 'skip'"):
        methods.make("front", skp=2)


def test_our_own_names_win_and_all_are_listed(plugin: None) -> None:
    assert type(methods.make("random")).__module__ == "llava_consensus.methods.random"
    listed = methods.known_methods()
    assert listed["front"] == "of front_plugin:Front" and listed["random"].startswith("T of N tokens")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("number", "must be a dataclass with a `reduce`"),
        ("gone", "cannot be imported"),
        ("frnt", "Did you mean 'front'"),
    ],
)
def test_what_is_registered_wrongly_says_why(plugin: None, name: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        methods.make(name)
