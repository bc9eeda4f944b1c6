"""One question about one picture: the answer, what the language model saw, and how long the first token took.

`llava-consensus ask photo.jpg "What is on the table?" --overlay kept.png`. Times are medians of interleaved repeats
after a warm-up of each side, so that neither profits from a warm cache or suffers from a busy moment alone.
"""

import statistics
import time
from dataclasses import replace
from typing import NamedTuple

from PIL.Image import Image

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Answer, Host, Prompt
from llava_consensus.methods import make
from llava_consensus.report.overlay import overlay
from llava_consensus.tokens import Budget, Method


class Reply(NamedTuple):
    """The answer, and milliseconds from the picture in memory to the first token: reduced, and with every token."""

    answer: Answer
    reduced_ms: float
    full_ms: float


def ask(host: Host, image: Image, prompt: Prompt, method: Method, budget: Budget, repeats: int = 5) -> Reply:
    """Answers once, then times the first token of both sides.

    Args:
        repeats: timings of each side, after one that does not count.
    """
    with host.attach(method, budget):
        answer = host.answer(host.encode([image]), [prompt])[0]
    first = replace(prompt, max_new_tokens=1)
    sides = [(method, budget), (make("full"), budget)]
    times = [[_seconds(host, image, first, *side) for side in sides] for _ in range(repeats + 1)][1:]
    reduced, full = (1000 * statistics.median(column) for column in zip(*times, strict=True))
    return Reply(answer, reduced, full)


def _seconds(host: Host, image: Image, prompt: Prompt, method: Method, budget: Budget) -> float:
    """From the picture to the first token: vision tower, reduction, prefill. Text comes back, so the device is done."""
    with host.attach(method, budget):
        start = time.perf_counter()
        host.answer(host.encode([image]), [prompt])
        return time.perf_counter() - start


def picture(host: Host, image: Image, answer: Answer) -> Image:
    """What was kept, merged and dropped, over the picture.

    Raises:
        OptionError: for a model that cuts the picture into tiles.
    """
    reductions = [reduction for outcome in answer.outcomes for _, reduction in outcome.reductions]
    everything = range(host.visual_tokens)
    if len(reductions) > 1 or answer.before != host.visual_tokens:
        raise OptionError("overlay: this model cuts the picture into tiles, which have no picture of their own yet")
    grid = round(host.visual_tokens**0.5)
    if not reductions:
        return overlay(image, everything, (), everything, grid)
    kept, anchors, owner = (getattr(reductions[0], name)[0].tolist() for name in ("kept", "anchors", "owner"))
    return overlay(image, kept, anchors, owner, grid)
