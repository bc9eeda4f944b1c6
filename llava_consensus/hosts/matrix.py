"""Which method works on which host: every method is attached to a model that is not loaded. The vision side
of the usual checkpoint is described by the host's view (`offer`); the refusal comes from the attaching code, which
says why.

    refusals("qwen2.5-vl")["visionzip"]   # why not; "" where it works on images
"""

from functools import cache

from llava_consensus.entry_points import load_place
from llava_consensus.errors import ConsensusError, OptionError
from llava_consensus.hosts import ONE_AXIS, TOWER, HostEntry, known_hosts
from llava_consensus.hosts.before_tower import refusal
from llava_consensus.hosts.images import TABLE
from llava_consensus.hosts.inputs import ALWAYS, needs_among
from llava_consensus.methods import known_methods, make
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.tokens import Need

# types whose tower has a class token
CLASSES = {"llava", "llava_next", "llava_next_video", "video_llava", "internvl"}
UNTRIED = "by published copies of the code that the checkpoint carries; `model check` tries it on the checkpoint"


def cells() -> dict[str, dict[str, str]]:
    """Why a host refuses a method, by the names of both; nothing if it works on images."""
    return {name: refusals(name) for name in known_hosts()}


def keeping() -> list[str]:
    """Hosts whose positions have axes, so that they are kept whatever a method's default is."""
    return [name for name, entry in known_hosts().items() if ONE_AXIS in entry.lacks]


def offers_of(entry: HostEntry) -> frozenset[Need]:
    """Needs of methods that the vision side of a host's usual checkpoint meets, known without loading it."""
    found = ALWAYS - {Need.QUESTION}
    if entry.kind != "hf":
        return found | load_place(entry.view).offers | {Need.EARLIER}
    if TOWER in entry.lacks:
        return found
    kinds = set() if entry.towers else set(entry.types)
    if any(TABLE[kind].projects for kind in kinds & TABLE.keys()):
        found |= {Need.PROJECTOR}
    found |= {Need.CLASS_FEATURE} if kinds & CLASSES else set()
    return found | {Need.ATTENTION, Need.EARLIER, Need.FEATURES}


@cache
def refusals(host: str) -> dict[str, str]:
    """Why the host of that name refuses each method, method and model called so; nothing where it works, and `UNTRIED`
    if that is known only of copies of the model's code.
    """
    entry = known_hosts()[host]
    refused: dict[str, str] = {}
    for name in known_methods():
        method = None
        try:
            method = make(name)  # that of another package may be broken
            check = getattr(load_place(entry.view), "check", None)
            if check is not None:
                check(method, entry.classes[0])
            else:
                _check(entry, method)
            refused[name] = UNTRIED if entry.remote else ""
        except ConsensusError as error:
            reason = str(error).replace(type(method).__name__, "the method")
            refused[name] = reason.replace(entry.classes[0], "the model")
    return refused


def _check(entry: HostEntry, method: Method) -> None:
    model = entry.classes[0]
    if method.acts_inside:
        if why := refusal(next(iter((*entry.towers, *entry.types)), ""), "clip_vision_model", method.place):
            raise OptionError(f"{type(method).__name__} {why}")
        return
    needs_among(offers_of(entry) | {Need.QUESTION}, method, model)
