"""The page without its widgets: what they hold becomes a `Inquiry`, a request is answered on one model, and pictures to
try come from the mini benchmarks. `app.py` wires it to Gradio.

A model has one method attached at a time, so visitors are served one after the other. Sides are timed in turn, all of
them once in every round, until there are `ROUNDS` rounds or `seconds` are over; the round in which answers are read
warms up and does not count.
"""

import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from PIL.Image import Image

from llava_consensus.demo.seen import Seen, seen_by
from llava_consensus.errors import ConsensusError, ImageError, OptionError
from llava_consensus.evaluation.bench.timing import answer_once
from llava_consensus.evaluation.benchmarks import make as make_benchmark
from llava_consensus.evaluation.benchmarks.base import SHORT
from llava_consensus.evaluation.files import misread
from llava_consensus.evaluation.media import open_image
from llava_consensus.evaluation.models import Answer, Prompt, Runner
from llava_consensus.methods import METHODS, known_methods, make, method_class
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method

LONGEST_QUESTION = 400  # characters of a question
OURS = "consensusdrop"
TOKENS = 64  # that the page opens with
VARIANTS = {  # choices that are a method with options
    "vision-only": (OURS, {"alpha": 1.0}),
    "cross-only": (OURS, {"alpha": 0.0}),
}
TITLES = {OURS: "ConsensusDrop", "full": "all tokens"}
POSITIONS = ("renumber", "keep", "mean")
VIEWS = {  # of a picture: what the page calls it -> what is drawn
    "kept and merged": "selection",
    "kept only": "kept",
    "vision saliency": "vision",
    "question saliency (cross)": "cross",
    "fused saliency": "fused",
    "the picture itself": "picture",
}
ALPHA = 0.7
ROUNDS = 5
SECONDS = 0.8  # of measuring
LONGEST = {True: 16, False: 96}  # tokens of an answer, by whether it is to be short
SEARCH = 20.0  # seconds of looking for a question to open with
OTHER = "random"  # what ours is shown beside
EACH = 8  # questions of a picture
OF_ANY = "What is in the picture?"
DULL = ("yes", "no", "0")  # answers that show little
OF = {"gqa": 4, "textvqa": 2}  # pictures of each benchmark
TELLING = {  # picked questions of playground/mini and photo on which methods differ: a search for one takes its time
    "n700001.jpg": "What color is the lemon?",
    "n700167.jpg": "What is at the bottom left of the picture?",
}


@dataclass(frozen=True)
class DemoPicture:
    """A picture to try, with questions about it and the right answer to each, where it is known."""

    picture: Path
    questions: Mapping[str, str]


@dataclass(frozen=True)
class Side:
    """One half of a comparison."""

    choice: str  # as the page names the method
    method: str
    options: Mapping[str, Any]
    question: str
    truth: str = ""

    @property
    def title(self) -> str:
        """The method's name on the page."""
        return TITLES.get(self.choice, self.choice)


@dataclass(frozen=True)
class Inquiry:
    """A picture, and two sides that are asked about it."""

    picture: Path
    sides: tuple[Side, ...]
    tokens: int
    short: bool = True


@dataclass(frozen=True)
class Form:
    """Values of the widgets, in the order of the page."""

    picture: str | None
    question: str | None
    second: str | None
    left: str
    right: str
    tokens: float
    alpha: float = ALPHA
    positions: str = POSITIONS[0]
    short: bool = True


@misread("the form", "Reload the page")
def request(form: Form, samples: Sequence[DemoPicture] = ()) -> Inquiry:
    """Parses and checks a form.

    Raises:
        OptionError: for a form without picture or question, or a question that is too long.
        DataError: for a value of another type, which the page itself never sends.
    """
    if not form.picture:
        raise OptionError("no picture yet: upload one, or pick one of the examples")
    picture = Path(form.picture)
    first = _question(form.question)
    if not first:
        raise OptionError("no question yet: type one, or pick one from the list")
    second = _question(form.second) or first
    truths = next((sample.questions for sample in samples if sample.picture == picture), {})
    sides = [
        Side(choice, *_method(choice, form), question, truths.get(question, ""))
        for choice, question in ((form.left, first), (form.right, second))
    ]
    return Inquiry(picture, tuple(sides), int(form.tokens), bool(form.short))


def _question(text: str | None) -> str:
    """A question on one line; OptionError where it is too long."""
    words = " ".join((text or "").split())
    if len(words) > LONGEST_QUESTION:
        raise OptionError(f"a question of {len(words)} characters: take at most {LONGEST_QUESTION}")
    return words


def _method(choice: str, form: Form) -> tuple[str, dict[str, Any]]:
    """A method and its options: those of the form that it has."""
    name, options = VARIANTS.get(choice, (choice, {}))
    known = {one.name for one in fields(METHODS.get(name) or method_class(name))}
    given = {"alpha": float(form.alpha), "positions": form.positions}
    return name, {key: value for key, value in given.items() if key in known} | options


def choices(names: Sequence[str]) -> list[tuple[str, str]]:
    """Methods as the page lists them: title and value, ours and its two sides first."""
    rest = [name for name in names if name != OURS]
    ordered = [OURS, *VARIANTS, *rest] if OURS in names else rest
    return [(TITLES.get(name, name), name) for name in ordered]


def picked(samples: Sequence[DemoPicture], index: int) -> tuple[str, list[str], str]:
    """Page content after an example is picked: its picture, the questions to choose from, and the first of them."""
    sample = samples[index]
    return str(sample.picture), list(sample.questions), next(iter(sample.questions), "")


def uploaded(path: str | None) -> str:
    """The path of an uploaded picture that can be opened.

    Raises:
        ConsensusError: for no file, or one that is no picture or too large.
    """
    if not path:
        raise OptionError("no picture yet: upload one, or pick one of the examples")
    try:
        open_image(path, upright=True)
    except ImageError as error:  # the visitor knows the name of the file, not where it lies here
        raise ConsensusError(str(error).replace(str(path), Path(path).name)) from error
    return path


def samples(data: Path) -> list[DemoPicture]:
    """Some pictures of the benchmarks in a folder; none of those that are not there."""
    return [sample for name, count in OF.items() for sample in _of(name, count, data)]


def _of(name: str, count: int, data: Path) -> list[DemoPicture]:
    benchmark = make_benchmark(name)
    try:
        questions, truths = benchmark.load(data), benchmark.references(data)
    except ConsensusError:
        return []
    found: dict[str, dict[str, str]] = {}
    for question in questions:
        if len(question.images) == 1:
            text = " ".join(question.text.removesuffix(SHORT).split("\n")[0].split())
            found.setdefault(question.images[0], {}).setdefault(text, truths.get(question.index, ""))
    folder = benchmark.place(data) / benchmark.images
    best = sorted(found.items(), key=lambda one: (TELLING.get(one[0]) not in one[1], -len(one[1])))[:count]
    return [DemoPicture(folder / picture, _mixed(asked, TELLING.get(picture))) for picture, asked in best]


def _mixed(asked: dict[str, str], first: str | None) -> dict[str, str]:
    """A few questions of a picture whose answers differ, `first` and those that name something in front."""
    ranked = sorted(asked, key=lambda text: (text != first, asked[text] in DULL, len(text)))
    chosen: list[str] = []
    for text in ranked:
        if sum(asked[one] == asked[text] for one in chosen) < 2:
            chosen.append(text)
    return {text: asked[text] for text in chosen[:EACH]}


def telling_first(
    runner: Runner, pictures: Sequence[DemoPicture], other: str, tokens: int
) -> tuple[list[DemoPicture], bool]:
    """The pictures, first the one with a question which the full model and ours answer rightly, ours from `tokens`
    tokens, and the other method does not; and whether there is one. In their order where none is found in `SEARCH`
    seconds.
    """
    end = time.perf_counter() + SEARCH
    budget = Budget(tokens)

    def says(method: str, image: Image, question: str) -> str:
        with runner.attach(make(method), budget):
            _, answer = runner.ask([image], Prompt(question + SHORT, max_new_tokens=LONGEST[True]))
        return answer.text.strip().lower().rstrip(".")

    for number, one in enumerate(pictures):
        image = open_image(one.picture, upright=True)
        for question, truth in one.questions.items():
            if time.perf_counter() > end:
                return list(pictures), False
            if (
                says(OURS, image, question)
                == truth.lower()
                == says("full", image, question)
                != says(other, image, question)
            ):
                front = DemoPicture(one.picture, {question: truth} | dict(one.questions))
                return [front, *pictures[:number], *pictures[number + 1 :]], True
    return list(pictures), False


@dataclass(frozen=True)
class SideAnswer:
    """One side of a comparison, answered."""

    side: Side
    answer: str = ""
    full: str = ""  # the answer from all tokens
    milliseconds: float | None = None  # to the first token, median
    full_milliseconds: float | None = None
    rounds: int = 0
    seen: Seen | None = None
    error: str = ""  # why there is nothing else


def offered(runner: Runner) -> list[str]:
    """Methods that can be attached to a model."""
    found = []
    for name in known_methods():
        try:
            runner.attach(make(name), Budget(1)).detach()
        except OptionError:
            continue
        found.append(name)
    return found


class Desk:
    """One model, asked by one visitor at a time.

    Args:
        runner: of the model.
        seconds: of measuring for each request, after which no further round begins.
    """

    def __init__(self, runner: Runner, seconds: float = SECONDS) -> None:
        self.runner, self.seconds = runner, seconds
        self._busy = threading.Lock()
        self._last: tuple[Inquiry, tuple[SideAnswer, ...]] | None = None

    def ask(self, request: Inquiry) -> tuple[SideAnswer, ...]:
        """Both sides of a request, answered. What a side cannot do is said there. The last request is not answered
        again: a page asks whenever one of its menus is left.

        Raises:
            ConsensusError: for a picture that cannot be read, or a number of tokens below 1.
        """
        image = open_image(request.picture, upright=True)
        budget = Budget(request.tokens)
        with self._busy:
            if self._last and self._last[0] == request:
                return self._last[1]
            full = {
                question: self._answer(image, make("full"), budget, question, request.short)[0].text
                for question in dict.fromkeys(side.question for side in request.sides)
            }
            answers = [self._answer_side(image, side, budget, request.short) for side in request.sides]
            answers = [replace(one, full=full[one.side.question]) for one in answers]
            self._last = request, tuple(self._timed(image, answers, budget, request.short))
            return self._last[1]

    def _answer_side(self, image: Image, side: Side, budget: Budget, short: bool) -> SideAnswer:
        """The answer of one side, not timed."""
        try:
            method = make(side.method, **side.options)
            answer, seen = self._answer(image, method, budget, side.question, short)
        except ConsensusError as error:
            return SideAnswer(side, error=str(error))
        return SideAnswer(side, answer.text, seen=seen)

    def _answer(
        self, image: Image, method: Method, budget: Budget, question: str, short: bool
    ) -> tuple[Answer, Seen | None]:
        prompt = Prompt(question + (SHORT if short else ""), max_new_tokens=LONGEST[short])
        with self.runner.attach(method, budget):
            encoded, answer = self.runner.ask([image], prompt)
        try:
            (seen,) = seen_by(self.runner, [image], encoded, answer)
        except OptionError:  # an answer without a drawing is an answer all the same
            return answer, None
        return answer, seen

    def _timed(self, image: Image, answers: Sequence[SideAnswer], budget: Budget, short: bool) -> list[SideAnswer]:
        """The results with times: of each side, and of all tokens."""
        methods = [make("full"), *(make(one.side.method, **one.side.options) for one in answers if not one.error)]
        questions = [answers[0].side.question, *(one.side.question for one in answers if not one.error)]
        samples: list[list[float]] = [[] for _ in methods]
        end = time.perf_counter() + self.seconds
        while len(samples[0]) < ROUNDS and (not samples[0] or time.perf_counter() < end):
            for place, (method, question) in enumerate(zip(methods, questions, strict=True)):
                prompt = Prompt(question + (SHORT if short else ""), max_new_tokens=1)
                samples[place].append(answer_once(self.runner, image, prompt, (method, budget)).ttft_ms)
        full, *rest = (statistics.median(one) for one in samples)
        times = iter(rest)
        return [
            one if one.error else replace(one, milliseconds=next(times), full_milliseconds=full, rounds=len(samples[0]))
            for one in answers
        ]
