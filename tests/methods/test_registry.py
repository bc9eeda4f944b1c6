"""Methods of other packages, registered by entry point."""

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from units import unit

from llava_consensus import cli, methods
from llava_consensus.errors import OptionError
from llava_consensus.hosts import matrix
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.costs import SHAPES, account, match
from llava_consensus.reduction.method import AfterTower, Method
from llava_consensus.reduction.selection import assemble

NOT_A_METHOD = 3


@dataclass(frozen=True, kw_only=True)
class Front(AfterTower):
    """T tokens from the first on, but for some that are skipped."""

    skip: int = 0

    def reduce(self, tokens: Any, budget: Any) -> Any:
        first = tokens.patch[:, self.skip : self.skip + budget.tokens]
        return assemble(tokens.projected, first, self.order)


@dataclass(frozen=True, kw_only=True)
class Idle(AfterTower):
    """Says that it acts after the tower, and does not."""


@dataclass(frozen=True, kw_only=True)
class Nowhere(Method):
    """Does not say where it acts."""


class Stranger:
    """Has a `reduce` and nothing else of a method."""

    def reduce(self, tokens: Any, budget: Any) -> None:
        """Nothing."""


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file as a package that registers methods."""
    own = {"front": "Front", "idle": "Idle", "nowhere": "Nowhere", "stranger": "Stranger", "number": "NOT_A_METHOD"}
    places = {name: f"{__name__}:{place}" for name, place in (own | {"random": "Front"}).items()}
    found = [EntryPoint(*one, methods.GROUP) for one in (places | {"gone": "no_such_package:Gone"}).items()]
    known = {methods.GROUP: found}
    monkeypatch.setattr("llava_consensus.entry_points.entry_points", lambda group: known.get(group, []))


def test_a_registered_method_is_made_like_ours(plugin: None) -> None:
    method = methods.make("front", skip=2)
    assert type(method).__name__ == "Front" and method.entering(Budget(5), 9, 2) == [5, 5]
    tokens = unit(size=24)
    result = method.reduce(tokens, Budget(5))
    assert result.kept.tolist() == [[2, 3, 4, 5, 6]] * 2
    assert torch.equal(result.tokens, tokens.projected[:, 2:7])
    with pytest.raises(OptionError, match=r"unknown option of method 'front' 'skp'. Did you mean 'skip'"):
        methods.make("front", skp=2)


def test_what_a_registered_method_costs_is_not_taken_for_nothing(plugin: None) -> None:
    """It has no formula: its own work and the total are unknown, what model and tower do is known all the same."""
    found = account(methods.make("front"), Budget(64), SHAPES["llava-1.5-7b"])
    assert found.flops.method is None and found.flops.total is None and found.flops.llm > 0
    assert found.record()["flops"]["method"] is None
    assert found.record()["note"] == "Front does not say what its own work costs"
    with pytest.raises(OptionError, match="match=flops: Front does not say what its own work costs"):
        match(methods.make("front"), Budget(64), SHAPES["llava-1.5-7b"], "flops")


def test_our_own_names_win_and_all_are_listed(plugin: None) -> None:
    assert type(methods.make("random")).__module__ == "llava_consensus.methods.random"
    listed = methods.known_methods()
    assert listed["front"] == f"of {__name__}:Front" and listed["random"].startswith("T of N tokens")


def test_lists_show_what_other_packages_register(plugin: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "methods"]) == 0 and f"front          of {__name__}:Front" in capsys.readouterr().out
    assert cli.main(["list", "front"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("front, acts here: after the vision tower\n\nT tokens from the first on")
    assert "skip=0" in told
    matrix.refusals.cache_clear()
    refused = matrix.refusals("llava")
    matrix.refusals.cache_clear()
    assert refused["front"] == "" and "cannot be imported" in refused["gone"] and "write its" in refused["idle"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("number", "must be a dataclass that derives from one of AtImage, AtCells, InTower, AfterTower, InDecoder"),
        ("stranger", "must be a dataclass that derives from one of"),
        ("nowhere", "must be a dataclass that derives from one of"),
        ("idle", "does nothing yet, write its `reduce`"),
        ("gone", "cannot be imported"),
        ("frnt", "Did you mean 'front'"),
    ],
)
def test_what_is_registered_wrongly_says_why(plugin: None, name: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        methods.make(name)
