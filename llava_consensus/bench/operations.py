"""How many operations a method dispatches between the encoded picture and the first token, and how often it waits.

On a GPU a small operation costs its launch, whatever its size, and a wait empties the queue of launches; so both are
counted, on any device, where torch dispatches them.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from PIL.Image import Image
from torch.utils._python_dispatch import TorchDispatchMode

from llava_consensus.bench.timing import Side
from llava_consensus.hosts.base import Host, Prompt
from llava_consensus.reduction import captured

WAITS = frozenset({"_local_scalar_dense", "item", "is_nonzero", "nonzero"})  # their result has to reach the CPU


class Operations(NamedTuple):
    """What was dispatched for one prompt."""

    total: int
    waits: int  # operations that wait for the device
    launches: int  # with each loop that CUDA can capture as one graph (`reduction/captured.py`) counted once
    counts: Mapping[str, int]  # by the operation's name


class _Counting(TorchDispatchMode):
    """Counts every operation by its name and runs it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.masks = 0  # a mask as an index asks for `nonzero` inside the operation
        self.loops: list[object] = []  # the loop of each operation that is part of one

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation.overloadpacket.__name__
        self.counts[name] += 1
        self.loops += filter(None, [captured.running()])
        self.masks += name == "index" and any(part is not None and part.dtype == torch.bool for part in args[1])
        return operation(*args, **(kwargs or {}))

    def operations(self) -> Operations:
        """What was counted."""
        waits = self.masks + sum(self.counts[name] for name in WAITS)
        launches = self.counts.total() - len(self.loops) + len(set(self.loops))
        return Operations(self.counts.total(), waits, launches, dict(self.counts))


def count(host: Host, picture: Image, prompt: Prompt, side: Side) -> Operations:
    """Operations from an encoded picture to the text of one token, method attached, where a prompt of this structure
    was asked before.
    """
    asked = [replace(prompt, max_new_tokens=1)]
    with host.attach(*side):
        encoded = host.encode([picture])
        host.answer([encoded], asked)
        with _Counting() as counting:
            host.answer([encoded], asked)
    return counting.operations()
