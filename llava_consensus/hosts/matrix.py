"""Which method works on which host: every method is attached to a model that is not there. What its vision side
offers is what the host's view says of the usual checkpoint (`offer`); it is the code that attaches which refuses, and
says why.

    refusals("qwen2.5-vl")["visionzip"]   # why not; "" where it works on pictures
"""

from functools import cache
from types import SimpleNamespace
from typing import Any

from torch import nn

from llava_consensus.entry_points import load_place
from llava_consensus.errors import ConsensusError
from llava_consensus.hosts import LAYERS, ONE_AXIS, TOWER, HostEntry, known_hosts
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.hosts.towers import ClipBlocks, needs_of
from llava_consensus.methods import known_methods, make
from llava_consensus.reduction.budget import Share
from llava_consensus.reduction.tokens import Need

HALF = Share(0.5)  # a budget every method that works at all can have
UNTRIED = "by published copies of the code that the checkpoint carries; `model check` tries it on the checkpoint"


class _Checked(Attachment):
    """An attachment that is checked and then left: nothing of the model is touched."""

    def _install(self) -> None:
        pass


def cells() -> dict[str, dict[str, str]]:
    """Why a host refuses a method, by the names of both; nothing where it works on pictures."""
    return {name: refusals(name) for name in known_hosts()}


def keeping() -> list[str]:
    """Hosts whose positions have axes, so that they are kept whatever a method's default is."""
    return [name for name, entry in known_hosts().items() if getattr(stand_in(entry), "keeps_positions", False)]


def otherwise() -> dict[str, list[str]]:
    """Hosts on which a method does not read what it reads of LLaVA, and does what the method's file says for such
    models, by method; those that refuse it left out.
    """
    towers = {name: stand_in(entry).tower for name, entry in known_hosts().items()}
    refused, found = cells(), dict[str, list[str]]()
    for name in known_methods():
        hosts = [host for host in towers if refused[host][name] in ("", UNTRIED)]
        if not hosts:
            continue
        method = make(name)
        for host in hosts:
            tower = towers[host]
            other = needs_of(tower, method) != method.needs or method.needs & {Need.QUESTION} - tower.offers
            # a CLIP tower whose patches are the tokens, as LLaVA's
            alike = tower.inside == ClipBlocks.inside and Need.CLASS_FEATURE in tower.offers
            if other or (method.acts_inside and not alike):
                found.setdefault(name, []).append(host)
    return found


@cache
def refusals(host: str) -> dict[str, str]:
    """Why the host of that name refuses each method, method and model called so; nothing where it works, and `UNTRIED`
    where that is known of copies of the model's code alone.
    """
    entry = known_hosts()[host]
    view, refused = stand_in(entry), {}
    for name in known_methods():
        method = None
        try:
            method = make(name)  # that of another package may be broken
            _Checked(view, method, HALF).detach()
            refused[name] = UNTRIED if entry.remote else ""
        except ConsensusError as error:
            reason = str(error).replace(type(method).__name__, "the method")
            refused[name] = reason.replace(entry.classes[0], "the model")
    return refused


def stand_in(entry: HostEntry) -> Any:
    """A host's view of a model that is not there, with a vision side as the view says."""
    cls = load_place(entry.view)
    offer = cls.offer
    tower = SimpleNamespace(
        inside=offer.inside,
        offers=offer.needs,
        classes=1,
        members=None,
        tokens=576,
        kernel="sdpa",
        blocks=range(offer.blocks),
        feature_block=offer.feature_block,
    )
    parts: dict[str, Any] = {"tower": tower, "most_tiles": 1}
    if getattr(cls, "records", False):
        parts |= _derived_parts(entry, tower)
    if Need.QUESTION in offer.needs:
        parts["clip_text"] = lambda view: None
    module = type(entry.classes[0], (nn.Module,), {"get_vision_tower": lambda model: None})()
    module.config = SimpleNamespace(vision_config=None)
    return type(cls.__name__, (cls,), parts)(module, entry.defaults)


def _derived_parts(entry: HostEntry, tower: Any) -> dict[str, Any]:
    """Stand-ins for the derived parts in the view of a family without a file."""
    from llava_consensus.hosts.derived.record import Record

    if TOWER in entry.lacks:
        tower.offers = frozenset()
    uncut = "rows cannot leave between its layers" if LAYERS in entry.lacks else ""
    read = "" if TOWER in entry.lacks else "a block"
    record = Record(
        fields=(), listed=True, embedded=True, axes=3 if ONE_AXIS in entry.lacks else 1, first="a layer", layer=0,
        layers="", block=read, blocks="", number=0, full=(0,), classes=0, uncut=uncut,
    )  # fmt: skip
    return {"record": record, "inner": None}
