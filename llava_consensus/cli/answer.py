"""One question about one picture: the answer, what the language model saw, and how long the first token took.

`llava-consensus ask photo.jpg "What is on the table?" --overlay kept.png`. Times are medians of interleaved repeats
after a warm-up of each side, so that neither profits from a warm cache or suffers from a busy moment alone.
"""

from typing import NamedTuple

from PIL.Image import Image

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Answer, Host, Prompt
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method
from llava_consensus.report.overlay import overlay
from llava_consensus.runs.timing import first_token


class Reply(NamedTuple):
    """The answer, and milliseconds from the picture in memory to the first token: reduced, and with every token."""

    answer: Answer
    reduced_ms: float
    full_ms: float


def ask(host: Host, image: Image, prompt: Prompt, method: Method, budget: Budget, repeats: int = 5) -> Reply:
    """Answers once, then times the first token of both sides, `repeats` times each."""
    with host.attach(method, budget):
        answer = host.answer([host.encode([image])], [prompt])[0]
    reduced, full = first_token(host, [image], prompt, [(method, budget), (make("full"), budget)], repeats)
    return Reply(answer, reduced.total, full.total)


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
