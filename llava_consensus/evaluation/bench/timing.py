"""One image answered once, with the clock running: phases, first token, further tokens, cache and memory; and the
loop in which all measurements take turns.

The clock starts with the image in memory, so that preprocessing and vision tower count. A generation of a fixed
length is timed forward by forward, and the end of a forward waits for the device. The time to the first token ends with
the first forward; each later token is one further forward with the choice of a token before it.
"""

import re
import statistics
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from PIL.Image import Image

from llava_consensus.errors import OptionError
from llava_consensus.evaluation.files import Record
from llava_consensus.evaluation.media import Clip
from llava_consensus.evaluation.models.base import Prompt, Runner
from llava_consensus.hosts import attach_view, view_of
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget, Share, budget
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.options import at_least
from llava_consensus.reduction.tokens import Stopwatch

Setting = tuple[Method, Budget | Share]
Shown = Image | Clip | list[Image | Clip]  # several are the frames of one video
Item = TypeVar("Item")
Result = TypeVar("Result")
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
AVAILABLE = Path("/proc/meminfo"), "MemAvailable"
SLACK = 1.1  # activations and the allocator's own, beside weights and cache


class Timing(NamedTuple):
    ttft_ms: float  # image to first token
    tpot_ms: float | None  # mean of the further tokens; None if there is none
    generation_ms: float  # image to the whole answer
    tower_ms: float  # preprocessing, vision tower and projector
    stages_ms: dict[str, float]  # of the reduction; empty for the full model
    kv_bytes: int | None  # cache after the prefill; None if the runner does not know it
    peak_bytes: int | None  # see `peak_bytes`

    def record(self) -> Record:
        return {**self._asdict(), "reduction_ms": self.reduction_ms, "prefill_ms": self.prefill_ms}

    @property
    def reduction_ms(self) -> float:
        return sum(self.stages_ms.values())

    @property
    def prefill_ms(self) -> float:
        """Prefill time: TTFT less tower and reduction, with assembling of the input."""
        return self.ttft_ms - self.tower_ms - self.reduction_ms


def answer_once(runner: Runner, image: Shown, prompt: Prompt, setting: Setting) -> Timing:
    """Answers with exactly `prompt.max_new_tokens` tokens, method attached; attaching is not timed."""
    shown = image if isinstance(image, list) else [image]
    prompt = replace(prompt, min_new_tokens=prompt.max_new_tokens)
    with runner.attach(*setting) as attached:
        model = runner.model
        watch = Stopwatch(model.device)
        reset_peak()
        with _forward_ends(model, model.device) as ends:
            start = now(model.device)
            with watch.time("tower"):
                encoded = runner.encode(shown)
            (answer,) = runner.answer([encoded], [prompt])
            end = now(model.device)
        stages = attached.milliseconds()
    further = len(ends) - 1
    return Timing(
        ttft_ms=1e3 * (ends[0] - start),
        tpot_ms=1e3 * (ends[-1] - ends[0]) / further if further else None,
        generation_ms=1e3 * (end - start),
        tower_ms=watch.milliseconds()["tower"],
        stages_ms=stages,
        kv_bytes=sum(answer.prefill.kv_bytes) if answer.prefill and answer.prefill.kv_bytes else None,
        peak_bytes=peak_bytes(),
    )


def in_rounds(
    items: Sequence[Item], repeats: int, warmup: int, done: Container[tuple[int, int]], take: Callable[[Item], Result]
) -> Iterator[tuple[int, int, Result]]:
    """Measures every item in turn in every round, so that a busy moment of the machine hits all of them. Yields round,
    index and result; rounds of warm-up, and what is `done` by round and index, are left out.
    """
    todo = [(turn, index) for turn in range(repeats) for index in range(len(items)) if (turn, index) not in done]
    for _ in range(warmup if todo else 0):
        for item in items:
            take(item)
    for turn, index in todo:
        yield turn, index, take(items[index])


def medians(items: Sequence[Item], rounds: int, take: Callable[[Item], Sequence[float]]) -> list[list[float]]:
    """Medians of the numbers that are taken of each item, in turns, after one round that does not count."""
    found: list[list[Sequence[float]]] = [[] for _ in items]
    for _, index, numbers in in_rounds(items, rounds, 1, (), take):
        found[index].append(numbers)
    return [[statistics.median(column) for column in zip(*samples, strict=True)] for samples in found]


def first_token(
    runner: Runner, image: Shown, prompt: Prompt, settings: Sequence[Setting], repeats: int = 5
) -> list[float]:
    """Median milliseconds from an image to the first token, for each setting."""
    prompt = replace(prompt, max_new_tokens=1)
    found = medians(settings, repeats, lambda setting: [answer_once(runner, image, prompt, setting).ttft_ms])
    return [one for (one,) in found]


@contextmanager
def _forward_ends(model: Any, device: torch.device, most: float = inf) -> Iterator[list[float]]:
    """The ends of the model's forwards in the block, at most so many: to see one, the device is waited for."""
    ends: list[float] = []
    handle = model.register_forward_hook(lambda *_: ends.append(now(device)) if len(ends) < most else None)
    try:
        yield ends
    finally:
        handle.remove()


def reset_peak() -> None:
    """Starts the measurement of peak memory again, on CUDA where this process uses it."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    elif CLEAR.exists():
        CLEAR.write_text("5")  # proc(5): resets VmHWM


def peak_bytes() -> int | None:
    """Most memory since `reset_peak`, weights included: allocated by torch on CUDA, else resident; None if unknown."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    return _bytes_in(STATUS, "VmHWM")


def peak_meaning() -> str:
    if torch.cuda.is_initialized():
        return "allocated by torch on the device, at most while answering"
    return "resident set of the process, at most while answering" if STATUS.exists() else "not measured here"


def _bytes_in(file: Path, name: str) -> int | None:
    """A number of a file of Linux, which has it in kilobytes; None elsewhere."""
    found = re.search(rf"{name}:\s+(\d+) kB", file.read_text()) if file.exists() else None
    return int(found[1]) << 10 if found else None


def refuse_too_large(name: str, weights: int, cache: int, device: str) -> None:
    """Raises OptionError if `weights` and `cache`, in bytes, do not fit into the free memory of a device."""
    cuda = device.startswith("cuda")
    free, needed = torch.cuda.mem_get_info(device)[0] if cuda else _bytes_in(*AVAILABLE), SLACK * (weights + cache)
    if free is not None and needed > free:
        sizes = [f"{count / 2**30:.1f} GiB" for count in (needed, weights, cache, free)]
        raise OptionError(
            f"shape={name!r} on {device}: needs about {sizes[0]} (weights {sizes[1]}, cache {sizes[2]}), {sizes[3]} "
            "are free. Take --dtype bfloat16 or float16, a smaller --shape, or another machine"
        )


def now(device: torch.device) -> float:
    """Seconds, after the device is synchronized."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


# Any call of a loaded model


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
        OptionError: as `attach` does, for `rounds` below 1, or for a call that shows the model no image.
    """
    at_least("rounds", rounds, 1)
    view, chosen, amount = view_of(model), make(method, **options), budget(tokens)
    outcomes: list[Any] = []

    def take(reduced: bool) -> tuple[float, float]:
        if not reduced:
            return _once(view.module, call)
        with attach_view(view, chosen, amount) as attached:
            times = _once(view.module, call)
            outcomes[:] = attached.outcomes
        if not sum(one.before for one in outcomes):
            raise OptionError("call: showed the model no image, so that there is nothing to reduce")
        return times

    (full_first, full), (first, whole) = medians((False, True), rounds, take)
    before, after = (sum(getattr(one, side) for one in outcomes) for side in ("before", "after"))
    return Timed(before, after, full_first, first, full, whole, rounds)


def _once(module: Any, call: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds from the begin of a call to the end of the model's first forward, and to its own end."""
    device = next(module.parameters()).device
    with _forward_ends(module, device, 1) as ends:
        start = now(device)
        call()
        end = now(device)
    if not ends:
        raise OptionError("call: did not run the model. Give for example lambda: model.generate(**inputs)")
    return 1e3 * (ends[0] - start), 1e3 * (end - start)
