"""Times, caches and memory, and what the reduction itself costs: measured interleaved, in one process, as medians.

`make bench` prints all of it for every method. The clock runs from the picture in memory to the first token's text,
vision tower included, so nothing is hidden before the first forward. Compare numbers of one call with each other, never
across calls.
"""

import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from PIL.Image import Image

from llava_consensus.hosts.base import Answer, Host, Prompt
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method

Side = tuple[Method, Budget]
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


class FirstToken(NamedTuple):
    """Medians of one side, in milliseconds."""

    total: float  # picture to first token
    stages: dict[str, float]  # what the reduction spent, by stage; empty for the full model

    def share(self) -> float:
        """Share of the time to the first token that the reduction takes, host bookkeeping included."""
        return sum(self.stages.values()) / self.total


class Measured(NamedTuple):
    """Medians of one side: milliseconds and bytes."""

    first: FirstToken
    token_ms: float  # each output token after the first
    kv_bytes: int | None  # cache after the prefill; None where the host does not tell
    peak_bytes: int | None  # most memory while answering: allocated on CUDA, resident on Linux, else None

    @property
    def own_ms(self) -> float:
        """Time of the method's own work, host bookkeeping included."""
        return sum(self.first.stages.values())


def first_token(
    host: Host, pictures: Sequence[Image], prompt: Prompt, sides: Sequence[Side], repeats: int = 5
) -> list[FirstToken]:
    """Times every side on every picture in turn, after one round that does not count.

    Args:
        pictures: asked one by one, each put through the vision tower again.
        sides: method and budget of each.
        repeats: rounds.
    Returns:
        One FirstToken for each side, medians over rounds and pictures.
    """
    first = replace(prompt, max_new_tokens=1)
    totals: list[list[float]] = [[] for _ in sides]
    stages: list[list[dict[str, float]]] = [[] for _ in sides]
    for counts, picture, index in _turns(pictures, len(sides), repeats):
        with host.attach(*sides[index]) as attached:
            spent, _ = _timed(host, picture, first)
        if counts:
            totals[index].append(spent)
            stages[index].append(attached.milliseconds())
    return [FirstToken(statistics.median(t), _medians(s)) for t, s in zip(totals, stages, strict=True)]


def measure(
    host: Host, pictures: Sequence[Image], prompt: Prompt, sides: Sequence[Side], repeats: int = 5, length: int = 9
) -> list[Measured]:
    """Measures every side on every picture in turn, after one round that does not count.

    Args:
        pictures: asked one by one, each put through the vision tower again.
        sides: method and budget of each.
        repeats: rounds.
        length: tokens of the longer answer; its time less that of one token, over the tokens between, is the time of a
            token.
    Returns:
        One Measured for each side, medians over rounds and pictures, the largest memory.
    """
    rounds: list[list[Measured]] = [[] for _ in sides]
    for counts, picture, index in _turns(pictures, len(sides), repeats):
        one = _measure(host, picture, prompt, sides[index], length)
        if counts:
            rounds[index].append(one)
    return [_median(found) for found in rounds]


def _turns(pictures: Sequence[Image], sides: int, repeats: int) -> Iterator[tuple[bool, Image, int]]:
    """Every side on every picture in turn, round by round: whether the round counts (the first does not), the picture
    and the side.
    """
    for number, picture, side in product(range(repeats + 1), pictures, range(sides)):
        yield number > 0, picture, side


def _measure(host: Host, picture: Image, prompt: Prompt, side: Side, length: int) -> Measured:
    """One picture, once: an answer of one token, then a longer one."""
    with host.attach(*side) as attached:
        reset_peak()
        first, answer = _timed(host, picture, replace(prompt, max_new_tokens=1, min_new_tokens=0))
        stages = attached.milliseconds()
        longer, _ = _timed(host, picture, replace(prompt, max_new_tokens=length, min_new_tokens=length))
        peak = peak_bytes()
    cache = sum(answer.prefill.kv_bytes) if answer.prefill and answer.prefill.kv_bytes else None
    return Measured(FirstToken(first, stages), (longer - first) / (length - 1), cache, peak)


def _median(found: Sequence[Measured]) -> Measured:
    totals, stages = [one.first.total for one in found], [one.first.stages for one in found]
    first = FirstToken(statistics.median(totals), _medians(stages))
    caches = [one.kv_bytes for one in found if one.kv_bytes is not None]
    peaks = [one.peak_bytes for one in found if one.peak_bytes is not None]
    cache = round(statistics.median(caches)) if caches else None
    return Measured(first, statistics.median(one.token_ms for one in found), cache, max(peaks, default=None))


def _timed(host: Host, picture: Image, prompt: Prompt) -> tuple[float, Answer]:
    """Milliseconds from a picture in memory to the text of its answer, and the answer."""
    start = time.perf_counter()
    (answer,) = host.answer([host.encode([picture])], [prompt])
    return 1e3 * (time.perf_counter() - start), answer


def reset_peak() -> None:
    """Starts the measurement of peak memory anew, on CUDA where this process uses it."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    elif CLEAR.exists():
        CLEAR.write_text("5")  # proc(5): resets VmHWM


def peak_bytes() -> int | None:
    """Most memory since `reset_peak`: allocated by torch on CUDA, resident in all on Linux; None elsewhere."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text()) if STATUS.exists() else None
    return int(found[1]) << 10 if found else None


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Median of each stage."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}
