"""The state of the page, without a browser and without a model: what its widgets hold becomes a `Request`.

Plain functions of plain values; `app.py` wires them to widgets, `desk.py` carries a request out. No torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from llava_consensus.errors import ConsensusError, OptionError

LONGEST = 400  # characters of a question
OURS = "consensusdrop"
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


@dataclass(frozen=True)
class Sample:
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
        """What the method is called on the page."""
        return TITLES.get(self.choice, self.choice)


@dataclass(frozen=True)
class Request:
    """A picture, and two sides that are asked about it."""

    picture: Path
    sides: tuple[Side, ...]
    tokens: int
    short: bool = True


@dataclass(frozen=True)
class Form:
    """What the widgets hold, in the order in which the page hands it over."""

    picture: str | None
    question: str | None
    second: str | None
    left: str
    right: str
    tokens: float
    alpha: float = ALPHA
    positions: str = POSITIONS[0]
    short: bool = True


def request(form: Form, samples: Sequence[Sample] = ()) -> Request:
    """What a form asks for.

    Raises:
        OptionError: for a form without picture or question, or a question that is too long.
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
    return Request(picture, tuple(sides), int(form.tokens), form.short)


def _question(text: str | None) -> str:
    """A question on one line; OptionError where it is too long."""
    words = " ".join((text or "").split())
    if len(words) > LONGEST:
        raise OptionError(f"a question of {len(words)} characters: take at most {LONGEST}")
    return words


def _method(choice: str, form: Form) -> tuple[str, dict[str, Any]]:
    """A method and its options: those of the form that it has."""
    from llava_consensus.methods import METHODS, method_class

    name, options = VARIANTS.get(choice, (choice, {}))
    known = {one.name for one in fields(METHODS.get(name) or method_class(name))}
    given = {"alpha": float(form.alpha), "positions": form.positions}
    return name, {key: value for key, value in given.items() if key in known} | options


def choices(names: Sequence[str]) -> list[tuple[str, str]]:
    """Methods as the page lists them: title and value, ours and its two sides first."""
    rest = [name for name in names if name != OURS]
    ordered = [OURS, *VARIANTS, *rest] if OURS in names else rest
    return [(TITLES.get(name, name), name) for name in ordered]


def picked(samples: Sequence[Sample], index: int) -> tuple[str, list[str], str]:
    """What picking an example puts on the page: its picture, the questions to choose from, and the first of them."""
    sample = samples[index]
    return str(sample.picture), list(sample.questions), next(iter(sample.questions), "")


def uploaded(path: str | None) -> str:
    """The path of an uploaded picture that can be opened.

    Raises:
        ConsensusError: for no file, or one that is no picture or too large.
    """
    from llava_consensus.errors import ImageError
    from llava_consensus.evaluation.runs.pictures import open_image

    if not path:
        raise OptionError("no picture yet: upload one, or pick one of the examples")
    try:
        open_image(path, upright=True)
    except ImageError as error:  # the visitor knows the name of the file, not where it lies here
        raise ConsensusError(str(error).replace(str(path), Path(path).name)) from error
    return path
