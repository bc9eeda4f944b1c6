"""A host of another package is found by its entry point, and one that is none is named."""

from types import ModuleType
from typing import Any

import pytest
import transformers
from hf_models import CASES

from llava_consensus import attach, entry_points, hosts
from llava_consensus.errors import OptionError
from llava_consensus.hosts import HOSTS, HostEntry, known_hosts

pytestmark = pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="models of transformers need version 5.19 or later"
)
ENTRY = HostEntry("outside_host:Outside", "hf", ("OutsideModel",), "a host of another package")


def register(monkeypatch: pytest.MonkeyPatch, place: str, **names: Any) -> None:
    """A package whose module has these names and registers one of them."""
    import sys

    module = ModuleType("outside_host")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, "outside_host", module)
    own = entry_points.registered
    monkeypatch.setattr(hosts, "registered", lambda group: {"outside": place} if group == hosts.GROUP else own(group))
    monkeypatch.setattr(entry_points, "registered", hosts.registered)


def test_a_host_of_another_package_adapts_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    from llava_consensus.hosts.hf.llava import Llava

    case = CASES["llava"]
    model = case.build()
    model.__class__ = type("OutsideModel", type(model).__bases__, dict(vars(type(model))))
    with attach(model, "random", tokens=2) as attached:
        assert not hasattr(attached, "model")
    register(monkeypatch, "outside_host:ENTRY", ENTRY=ENTRY, Outside=Llava)
    assert list(known_hosts()) == [*HOSTS, "outside"]
    with attach(model, "random", tokens=2) as attached:
        assert type(attached.model) is Llava


@pytest.mark.parametrize(
    ("place", "why"),
    [("outside_host:OTHER", "must be a HostEntry"), ("outside_host:MISSING", "cannot be imported")],
)
def test_what_is_no_host_is_named(monkeypatch: pytest.MonkeyPatch, place: str, why: str) -> None:
    register(monkeypatch, place, OTHER=object())
    with pytest.raises(OptionError, match=f"host 'outside' of {place}: {why}"):
        known_hosts()
