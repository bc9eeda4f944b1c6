"""One picture answered once, with the clock running: phases, first token, further tokens, cache and memory.

The clock starts with the picture in memory, so that preprocessing and vision tower are in it, and stops for nothing:
a generation of a fixed length is timed forward by forward, and the end of a forward waits for the device. On a CPU and
on CUDA alike, the first token's time is that of everything up to the end of the first forward; each later token is one
further forward with the choice of a token before it.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from PIL.Image import Image

from llava_consensus.evaluation.bench.memory import peak_bytes, reset_peak
from llava_consensus.evaluation.files import Record
from llava_consensus.hosts.base import Clip, Host, Prompt
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.tokens import Stopwatch

Side = tuple[Method, Budget | Share]
Shown = Image | Clip | list[Image | Clip]  # several are the frames of one video


class Sample(NamedTuple):
    """One answer: milliseconds and bytes."""

    ttft_ms: float  # picture to first token
    tpot_ms: float | None  # mean of the further tokens; None where there is none
    generation_ms: float  # picture to the whole answer
    tower_ms: float  # preprocessing, vision tower and projector
    stages_ms: dict[str, float]  # of the reduction; empty for the full model
    kv_bytes: int | None  # cache after the prefill; None where the host does not tell
    peak_bytes: int | None  # see `memory.peak_bytes`

    def record(self) -> Record:
        """As JSON values."""
        return {**self._asdict(), "reduction_ms": self.reduction_ms, "prefill_ms": self.prefill_ms}

    @property
    def reduction_ms(self) -> float:
        """The method's own work, host bookkeeping included."""
        return sum(self.stages_ms.values())

    @property
    def prefill_ms(self) -> float:
        """What is left of the time to the first token: the language model's prefill, and assembling its input."""
        return self.ttft_ms - self.tower_ms - self.reduction_ms


def answer_once(host: Host, picture: Shown, prompt: Prompt, side: Side) -> Sample:
    """Answers with exactly `prompt.max_new_tokens` tokens, method attached; attaching is not timed."""
    shown = picture if isinstance(picture, list) else [picture]
    prompt = replace(prompt, min_new_tokens=prompt.max_new_tokens)
    with host.attach(*side) as attached:
        model = attached.model.module
        watch = Stopwatch(model.device)
        reset_peak()
        with _token_ends(attached) as ends:
            start = now(model.device)
            with watch.time("tower"):
                encoded = host.encode(shown)
            (answer,) = host.answer([encoded], [prompt])
            end = now(model.device)
        stages = attached.milliseconds()
    further = len(ends) - 1
    return Sample(
        ttft_ms=1e3 * (ends[0] - start),
        tpot_ms=1e3 * (ends[-1] - ends[0]) / further if further else None,
        generation_ms=1e3 * (end - start),
        tower_ms=watch.milliseconds()["tower"],
        stages_ms=stages,
        kv_bytes=sum(answer.prefill.kv_bytes) if answer.prefill and answer.prefill.kv_bytes else None,
        peak_bytes=peak_bytes(),
    )


def one_round(host: Host, pictures: Sequence[Shown], prompt: Prompt, sides: Sequence[Side]) -> list[list[Sample]]:
    """Every side on every picture in turn, so that a busy moment hits all of them: samples of each side."""
    samples: list[list[Sample]] = [[] for _ in sides]
    for picture in pictures:
        for place, side in enumerate(sides):
            samples[place].append(answer_once(host, picture, prompt, side))
    return samples


def first_token(host: Host, picture: Shown, prompt: Prompt, sides: Sequence[Side], repeats: int = 5) -> list[float]:
    """Median milliseconds from a picture to the first token, for each side, after one round that does not count."""
    prompt = replace(prompt, max_new_tokens=1)
    rounds = [one_round(host, [picture], prompt, sides) for _ in range(repeats + 1)][1:]
    return [statistics.median(one[place][0].ttft_ms for one in rounds) for place in range(len(sides))]


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@contextmanager
def _token_ends(attached: Any) -> Iterator[list[float]]:
    """When each forward of the model inside the body was done."""
    ends: list[float] = []
    model = attached.model.module
    handle = model.register_forward_hook(lambda *_: ends.append(now(model.device)))
    try:
        yield ends
    finally:
        handle.remove()
