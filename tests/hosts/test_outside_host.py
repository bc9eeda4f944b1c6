"""A model of another package is found by its entry point, and what is no entry is named."""

from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from llava_consensus import attach, entry_points, hosts
from llava_consensus.errors import OptionError
from llava_consensus.hosts import FACTS, HOSTS, HostEntry, images, known_hosts, matrix
from llava_consensus.hosts.images import Call, Family, runs
from llava_consensus.hosts.remote.entrances import RemoteModel
from llava_consensus.methods import METHODS

CURRENT = int(transformers.__version__.split(".")[0]) >= 5
REFUSED = ("tome", "resize", "pixelprune")  # it is not known how the tower takes fewer patches


def register(monkeypatch: pytest.MonkeyPatch, place: str, **names: Any) -> None:
    """A package whose module has these names and registers one of them."""
    import sys

    module = ModuleType("outside_host")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, "outside_host", module)
    monkeypatch.setattr(images, "TABLE", dict(images.TABLE))  # to which the entry adds its types
    own = entry_points.registered
    monkeypatch.setattr(hosts, "registered", lambda group: {"outside": place} if group == hosts.GROUP else own(group))
    monkeypatch.setattr(entry_points, "registered", hosts.registered)


def halves(call: Call) -> list[Any]:
    """The tiles of every image: two runs of placeholders with a word between them."""
    lengths = [length for _, _, length in runs(call)]
    return [lengths[start : start + 2] for start in range(0, len(lengths), 2)]


@pytest.mark.skipif(not CURRENT, reason="models of transformers need version 5.19 or later")
@torch.no_grad()
def test_every_method_runs_on_a_model_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry says how its processor writes images. Without it each half of an image has a budget of its own."""
    from hf_models import IMAGE, noise, prompts, vip_llava

    model, image = vip_llava(), [*[IMAGE] * 16, 61, *[IMAGE] * 16]
    rows = [[5, 6, *image, 7, 8, 9], [5, 11, *image, 13, *image, 14], [21, *image, 22, 23]]
    pixels = noise(8, 3, 56, 56, seed=0)
    inputs = prompts(*rows) | {"pixel_values": pixels}
    singles = [
        prompts(row) | {"pixel_values": own}
        for row, own in zip(rows, (pixels[:2], pixels[2:6], pixels[6:]), strict=True)
    ]
    dense = model(**inputs).logits

    def answer(given: dict[str, Any]) -> torch.Tensor:
        return model.generate(**given, max_new_tokens=4, do_sample=False)[:, -4:]

    with attach(model, "random", 6) as attached:
        model(**inputs)
        assert [one.before for one in attached.outcomes] == [16] * 8
    types = {"types": ("vipllava",), "family": "outside_host:FAMILY"}
    entry = HostEntry(FACTS, "hf", ("VipLlavaForConditionalGeneration",), "a model of another package", **types)
    register(monkeypatch, "outside_host:ENTRY", ENTRY=entry, FAMILY=Family(halves, mapped=True))
    assert list(known_hosts()) == [*HOSTS, "outside"]
    for name in METHODS:
        if name in REFUSED:
            with pytest.raises(OptionError, match="not known how the tower"):
                attach(model, name, 6)
            continue
        with attach(model, name, 6) as attached:
            said, outcomes = answer(inputs), attached.outcomes
            assert torch.equal(said, torch.cat([answer(one) for one in singles])), f"{name}: a batch answers like these"
        assert [(one.row, one.before) for one in outcomes] == [(0, 32), (1, 32), (1, 32), (2, 32)], name
        assert {one.after for one in outcomes} == {32 if name == "full" else 6}, name
        with attach(model, name, 32):
            assert torch.equal(model(**inputs).logits, dense), name


def test_a_model_with_code_of_its_own_has_a_view_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from remote_doubles import cogvlm

    from llava_consensus.hosts.remote.cogvlm import CogVLM

    class Outside(CogVLM):
        """The same under another name."""

    model = cogvlm()
    model.__class__ = type("OutsideModel", type(model).__bases__, dict(vars(type(model))))
    with pytest.raises(OptionError, match="has no host"):
        attach(model, "random", 16)
    entry = HostEntry("outside_host:Outside", "remote", ("OutsideModel",), "a host of another package")
    register(monkeypatch, "outside_host:ENTRY", ENTRY=entry, Outside=Outside)
    assert issubclass(Outside, RemoteModel) and matrix.refusals("outside")["random"] == ""
    with attach(model, "random", 16) as attached:
        assert attached.entrance.view is Outside


@pytest.mark.parametrize(
    ("place", "why"), [("outside_host:OTHER", "must be a HostEntry"), ("outside_host:MISSING", "cannot be imported")]
)
def test_what_is_no_host_is_named(monkeypatch: pytest.MonkeyPatch, place: str, why: str) -> None:
    register(monkeypatch, place, OTHER=object())
    with pytest.raises(OptionError, match=f"host 'outside' of {place}: {why}"):
        known_hosts()
