"""Which method works on which host: every method is attached to a model of every host that has no weights, by the code
that refuses. No table says it a second time.

    cells()["qwen2.5-vl"]["visionzip"]   # why not; "" where it works
"""

from functools import cache
from importlib import import_module
from typing import Any

from llava_consensus.errors import ConsensusError
from llava_consensus.hosts import HOSTS
from llava_consensus.hosts.attachment import Attachment
from llava_consensus.methods import METHODS, make
from llava_consensus.reduction.budget import Share
from llava_consensus.reduction.method import Method

HALF = Share(0.5)  # a budget every method that works at all can have


def cells() -> dict[str, dict[str, str]]:
    """Why a host refuses a method, by the names of both; nothing where it works on pictures."""
    return {name: refusals(name) for name in HOSTS}


@cache
def refusals(host: str) -> dict[str, str]:
    """Why the host of that name refuses each method, method and model called so; nothing where it works."""
    entry = HOSTS[host]
    try:
        view = import_module(f"{entry.package}.blank").view(entry.classes[0], entry.view, entry.defaults)
    except ConsensusError as error:
        return dict.fromkeys(METHODS, str(error))
    return {name: refusal(view, make(name)) for name in METHODS}


def refusal(view: Any, method: Method) -> str:
    """Why a method cannot be attached to a model; nothing where it can."""
    try:
        view.check(method)
        Attachment(view, method, HALF).detach()
    except ConsensusError as error:
        return str(error).replace(type(method).__name__, "the method").replace(type(view.module).__name__, "the model")
    return ""
