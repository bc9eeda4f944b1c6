"""Requests carried out on one model: answers, times and patches of both sides, measured on the spot.

A model has one method attached at a time, so visitors are served one after the other. Sides are timed in turn, all of
them once in every round, until there are `ROUNDS` rounds or `seconds` are over; the round in which answers are read
warms up and does not count.
"""

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from PIL.Image import Image

from llava_consensus.demo.page import Request, Side
from llava_consensus.demo.seen import Seen, seen_by
from llava_consensus.errors import ConsensusError, OptionError
from llava_consensus.evaluation.bench.timing import answer_once
from llava_consensus.evaluation.benchmarks.base import SHORT
from llava_consensus.evaluation.runs.pictures import open_image
from llava_consensus.hosts import Answer, Host, Prompt
from llava_consensus.methods import METHODS, make
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method

ROUNDS = 5
SECONDS = 0.8  # of measuring
LONGEST = {True: 16, False: 96}  # tokens of an answer, by whether it is to be short


@dataclass(frozen=True)
class Told:
    """One side of a comparison, answered."""

    side: Side
    answer: str = ""
    full: str = ""  # the answer from all tokens
    milliseconds: float | None = None  # to the first token, median
    full_milliseconds: float | None = None
    rounds: int = 0
    seen: Seen | None = None
    error: str = ""  # why there is nothing else


def offered(host: Host) -> list[str]:
    """Methods that can be attached to a model."""
    found = []
    for name in METHODS:
        try:
            host.attach(make(name), Budget(1)).detach()
        except OptionError:
            continue
        found.append(name)
    return found


class Desk:
    """One model, asked by one visitor at a time.

    Args:
        host: of the model.
        seconds: of measuring for each request, after which no further round begins.
    """

    def __init__(self, host: Host, seconds: float = SECONDS) -> None:
        self.host, self.seconds = host, seconds
        self._busy = threading.Lock()

    def ask(self, request: Request) -> tuple[Told, ...]:
        """Both sides of a request, answered. What a side cannot do is said there.

        Raises:
            ConsensusError: for a picture that cannot be read, or a number of tokens below 1.
        """
        image = open_image(request.picture, upright=True)
        budget = Budget(request.tokens)
        with self._busy:
            full = {
                question: self._answer(image, make("full"), budget, question, request.short)[0].text
                for question in dict.fromkeys(side.question for side in request.sides)
            }
            told = [self._told(image, side, budget, request.short) for side in request.sides]
            told = [replace(one, full=full[one.side.question]) for one in told]
            return tuple(self._timed(image, told, budget, request.short))

    def _told(self, image: Image, side: Side, budget: Budget, short: bool) -> Told:
        """The answer of one side, not timed."""
        try:
            method = make(side.method, **side.options)
            answer, seen = self._answer(image, method, budget, side.question, short)
        except ConsensusError as error:
            return Told(side, error=str(error))
        return Told(side, answer.text, seen=seen)

    def _answer(
        self, image: Image, method: Method, budget: Budget, question: str, short: bool
    ) -> tuple[Answer, Seen | None]:
        prompt = Prompt(question + (SHORT if short else ""), max_new_tokens=LONGEST[short])
        with self.host.attach(method, budget):
            encoded = self.host.encode([image])
            (answer,) = self.host.answer([encoded], [prompt])
        try:
            (seen,) = seen_by(self.host, [image], encoded, answer)
        except OptionError:  # an answer without a drawing is an answer all the same
            return answer, None
        return answer, seen

    def _timed(self, image: Image, told: Sequence[Told], budget: Budget, short: bool) -> list[Told]:
        """The same with times: of each side, and of all tokens."""
        methods = [make("full"), *(make(one.side.method, **one.side.options) for one in told if not one.error)]
        questions = [told[0].side.question, *(one.side.question for one in told if not one.error)]
        samples: list[list[float]] = [[] for _ in methods]
        end = time.perf_counter() + self.seconds
        while len(samples[0]) < ROUNDS and (not samples[0] or time.perf_counter() < end):
            for place, (method, question) in enumerate(zip(methods, questions, strict=True)):
                prompt = Prompt(question + (SHORT if short else ""), max_new_tokens=1)
                samples[place].append(answer_once(self.host, image, prompt, (method, budget)).ttft_ms)
        full, *rest = (statistics.median(one) for one in samples)
        times = iter(rest)
        return [
            one if one.error else replace(one, milliseconds=next(times), full_milliseconds=full, rounds=len(samples[0]))
            for one in told
        ]
