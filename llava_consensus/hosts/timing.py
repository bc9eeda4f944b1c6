"""Speed-up of a method on this machine: one call of a loaded model, with all visual tokens and reduced, in turns.

The clock starts where the call starts, so that the vision tower is in it, and reads the end of the model's first
forward, with which the first token is there, and the end of the call. On a device both wait until it is done.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from llava_consensus.errors import OptionError
from llava_consensus.hosts import attach_view, view_of
from llava_consensus.methods import make
from llava_consensus.reduction.budget import budget
from llava_consensus.reduction.options import at_least


class Timed(NamedTuple):
    """Milliseconds of a call, medians, with all visual tokens and with fewer."""

    before: int  # visual tokens of all images of the call
    after: int
    full_first_ms: float  # from the call's begin to its first token
    first_ms: float
    full_ms: float  # to its end
    ms: float
    rounds: int

    def __str__(self) -> str:
        first, whole = self.full_first_ms / self.first_ms, self.full_ms / self.ms
        return (
            f"visual tokens {self.before} -> {self.after}\n"
            f"first token   {self.full_first_ms:.1f} -> {self.first_ms:.1f} ms ({first:.2f} times as fast)\n"
            f"whole call    {self.full_ms:.1f} -> {self.ms:.1f} ms ({whole:.2f} times as fast)\n"
            f"medians of {self.rounds} rounds in turns, after one that does not count\n"
            f"for this call reduction {'pays' if self.ms < self.full_ms else 'does not pay'} on this machine"
        )


def timed(
    model: Any,
    call: Callable[[], object],
    method: str = "consensusdrop",
    tokens: int | float = 64,
    rounds: int = 5,
    **options: Any,
) -> Timed:
    """Times `call`, which runs the model, without and with a method; the model is then as it was.

    Args:
        model: a loaded model of a class some host adapts, without a method attached.
        call: for example `lambda: model.generate(**inputs, max_new_tokens=20)`.
        method, tokens, options: as `attach` takes them.
        rounds: how often each side is timed, in turns, so that a busy moment hits both.
    Raises:
        OptionError: as `attach` does, for `rounds` below 1, or for a call that shows the model no picture.
    """
    at_least("rounds", rounds, 1)
    view, chosen, amount = view_of(model), make(method, **options), budget(tokens)
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    counts = 0, 0
    for _ in range(rounds + 1):
        found[False].append(_once(view.module, call))
        with attach_view(view, chosen, amount) as attached:
            found[True].append(_once(view.module, call))
            before, after = (sum(getattr(one, side) for one in attached.outcomes) for side in ("before", "after"))
            counts = before, after
        if not before:
            raise OptionError("call: showed the model no image, so that there is nothing to reduce")
    (full_first, full), (first, whole) = (
        (1e3 * statistics.median(times) for times in zip(*found[side][1:], strict=True)) for side in (False, True)
    )
    return Timed(*counts, full_first, first, full, whole, rounds)


def _once(module: Any, call: Callable[[], object]) -> tuple[float, float]:
    """Seconds from the begin of a call to the end of the model's first forward, and to its own end."""
    ends: list[float] = []
    device = next(module.parameters()).device
    handle = module.register_forward_hook(lambda *_: ends.append(now(device)) if not ends else None)
    try:
        start = now(device)
        call()
        end = now(device)
    finally:
        handle.remove()
    if not ends:
        raise OptionError("call: did not run the model. Give for example lambda: model.generate(**inputs)")
    return ends[0] - start, end - start


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()
