"""Does reduction pay on this machine? From the number of visual tokens on at which a reduced request, which shows an
image once, twice, four times and so on, gives its first token as soon as the full one.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import pandas
from PIL.Image import Image

from llava_consensus.evaluation.bench.efficiency import prompt_shape
from llava_consensus.evaluation.bench.timing import Setting, answer_once, medians
from llava_consensus.evaluation.models.base import Prompt, Runner
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Point(NamedTuple):
    """Median milliseconds of one request, with all visual tokens and reduced."""

    images: int
    tokens: int  # visual tokens of the request
    tower_ms: float
    prefill_ms: float  # of all tokens
    reduction_ms: float
    reduced_prefill_ms: float
    full_ms: float  # first token from all tokens, from preprocessing on
    reduced_ms: float  # first token from reduced ones

    @property
    def gain_ms(self) -> float:
        return self.full_ms - self.reduced_ms


def measure(
    runner: Runner, image: Image, prompt: Prompt, reduced: Setting, counts: Sequence[int], rounds: int
) -> list[Point]:
    """A point for each number of images in a request, all measured in turns after one round of warm-up."""
    prompt, full = replace(prompt, max_new_tokens=1), (make("full"), Budget(1))
    tokens = prompt_shape(runner, prompt, image).available  # of one image

    def take(case: tuple[int, Setting]) -> tuple[float, ...]:
        timing = answer_once(runner, [image] * case[0], prompt, case[1])
        return timing.tower_ms, timing.prefill_ms, timing.reduction_ms, timing.ttft_ms

    found = medians([(count, setting) for count in counts for setting in (full, reduced)], rounds, take)
    return [
        Point(count, count * tokens, tower, prefill, reduction, reduced_prefill, full_ms, reduced_ms)
        for count, (tower, prefill, _, full_ms), (_, reduced_prefill, reduction, reduced_ms) in zip(
            counts, found[::2], found[1::2], strict=True
        )
    ]


def break_even(points: Sequence[Point]) -> int | None:
    """Visual tokens of a request from which reduction pays, linear between points; 0 if always, None if never."""
    if points[-1].gain_ms <= 0:
        return None
    last = max((number for number, point in enumerate(points) if point.gain_ms <= 0), default=-1)
    if last < 0:
        return 0
    low, high = points[last], points[last + 1]
    return round(low.tokens + (high.tokens - low.tokens) * -low.gain_ms / (high.gain_ms - low.gain_ms))


def sentence(points: Sequence[Point]) -> str:
    """The answer in one sentence. Your request is the first point."""
    own, at = points[0], break_even(points)
    has = f"your request has {own.tokens}"
    if at is None:
        return f"On this machine reduction does not pay up to {points[-1].tokens} visual tokens; {has}: expect no gain"
    if at > own.tokens:
        return f"On this machine reduction pays from about {at} visual tokens; {has}: expect no gain"
    start = f"from about {at} visual tokens" if at else f"at {own.tokens} visual tokens already"
    saved = f"expect the first token {own.full_ms / own.reduced_ms:.2f} times as fast"
    return f"On this machine reduction pays {start}; {has}: {saved}"


def plot(points: Sequence[Point], title: str) -> "Figure":
    """First-token time over visual tokens, with the parts of the reduced request."""
    from matplotlib.figure import Figure

    frame = pandas.DataFrame(points).set_index("tokens")
    parts = {"tower_ms": "vision tower", "reduction_ms": "reduction", "reduced_prefill_ms": "prefill, reduced"}
    lines = {"reduced_ms": "first token, reduced", "full_ms": "first token, all tokens"}
    figure = Figure(figsize=(6, 3.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    frame[list(parts)].rename(columns=parts).plot.area(ax=axes, alpha=0.35, linewidth=0)
    frame[list(lines)].rename(columns=lines).plot(ax=axes, marker="o", color=["tab:red", "black"])
    top = 1.05 * frame[list(lines)].to_numpy().max()
    axes.set(xlabel="visual tokens of the request", ylabel="milliseconds", title=title, ylim=(0, top))
    axes.legend(frameon=False, fontsize=8)
    return figure
