"""Compositions: methods that act in different places, one after the other. Each acts on the output of the one before
it: `resize:tokens=256+consensusdrop` shrinks an image to 256 tokens in the tower, of which the language model gets T;
`consensusdrop:tokens=128+fastv` hands it 128, of which T are left behind FastV's layer. Torch only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from llava_consensus.errors import OptionError
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.method import Method, Place, Shape

TOWER = (Place.IMAGE, Place.CELLS, Place.TOWER)  # which count as one place


class Member(NamedTuple):
    method: Method
    tokens: int | None = None  # that it leaves of an image; None: T, or a number that follows from the image


@dataclass(frozen=True, kw_only=True)
class Composition(Method):
    """Methods that act in different places, one after the other.

    Args:
        stages: the methods with their options, `+` between them; `tokens` says how many each leaves, the last one T.
    """

    stages: str = ""
    parts: ClassVar[tuple[Member, ...]] = ()  # set by `composed`

    @property
    def answer_version(self) -> int:  # type: ignore[override]
        return sum(part.method.answer_version for part in self.parts)

    @property
    def place(self) -> Place:  # type: ignore[override]
        """Between decoder layers, where one of them acts there; else the first one's."""
        places = [part.method.place for part in self.parts]
        return Place.DECODER if Place.DECODER in places else places[0]

    @property
    def positions(self) -> str:
        return next(part.method for part in self.parts[::-1] if part.method.place is not Place.DECODER).positions

    @property
    def acts_inside(self) -> bool:
        return self.parts[0].method.acts_inside

    @property
    def adaptive(self) -> bool:
        return any(part.method.adaptive for part in self.parts)

    @property
    def reads_prompt(self) -> bool:
        return any(part.method.reads_prompt for part in self.parts)

    def budgets(self, budget: Budget | Share) -> list[Budget]:
        """Budget of each method.

        Raises:
            OptionError: for a share, or a method that leaves fewer tokens than the next.
        """
        if not isinstance(budget, Budget):
            raise OptionError(f"{self.stages}: a composition counts tokens. Give tokens as a whole number")
        found = [budget if part.tokens is None else Budget(part.tokens) for part in self.parts]
        for part, one, following in zip(self.parts, found, found[1:], strict=False):
            if part.tokens is not None and one.tokens < following.tokens:
                raise OptionError(
                    f"{self.stages}: tokens={one.tokens} of {type(part.method).__name__} are fewer than the "
                    f"{following.tokens} of the method after it. Give it more, or fewer to the last"
                )
        return found

    def _left(self, budget: Budget, available: int, layers: int) -> Iterator[tuple[Method, Budget, int]]:
        if budget.tokens >= available:
            return
        for part, own in zip(self.parts, self.budgets(budget), strict=True):
            yield part.method, own, available
            if own.tokens < available:
                available = part.method.entering(own, available, layers)[-1]

    def entering(self, budget: Budget, available: int, layers: int) -> list[int]:
        """Visual tokens that enter each decoder layer: those that the last method is given and leaves."""
        counts = [available] * layers
        for method, own, given in self._left(budget, available, layers):
            counts = method.entering(own, given, layers) if own.tokens < given else [given] * layers
        return counts

    def vision_tokens(self, budget: Budget, shape: Shape) -> list[int]:
        first = self.budgets(budget)[0]
        whole = first.tokens >= shape.available
        return [shape.patches] * shape.blocks if whole else self.parts[0].method.vision_tokens(first, shape)

    def flops(self, shape: Shape, budget: Budget) -> float | None:
        """The work of each on its input; None if that of one is not known."""
        spent = 0.0
        for method, own, given in self._left(budget, shape.available, shape.layers):
            if own.tokens < given:
                one = method.flops(shape._replace(patches=-(-given // shape.tiles)), own)
                if one is None:
                    return None
                spent += one
        return spent


def composed(stages: str, parts: list[Member]) -> Composition:
    """The composition of these methods.

    Raises:
        OptionError: if two act in one place, or not in the order of a model, or a number of tokens is missing.
    """
    found = Composition(stages=stages)
    object.__setattr__(found, "parts", tuple(parts))
    object.__setattr__(found, "asked", frozenset({"stages"}))
    order = [0 if one.method.place in TOWER else 1 if one.method.place is Place.TOKENS else 2 for one in parts]
    for (first, tokens), second, earlier, later in zip(parts, parts[1:], order, order[1:], strict=False):
        names = type(first).__name__, type(second.method).__name__
        if not (first.reduces and second.method.reduces):
            raise OptionError(f"{stages}: a method that reduces nothing composes with none. Leave it out")
        if earlier == later:
            raise OptionError(
                f"{stages}: {names[0]} and {names[1]} act in one place ({second.method.place.value}). Take one of them"
            )
        if earlier > later:
            raise OptionError(f"{stages}: {names[1]} acts before {names[0]}. Write {names[1]} in front")
        if tokens is None and first.place is not Place.CELLS:
            raise OptionError(f"{stages}: say how many tokens {names[0]} leaves, as in {names[0].lower()}:tokens=128")
    if parts[-1].tokens is not None:
        raise OptionError(f"{stages}: the last method leaves the tokens of the whole. Leave its tokens= out")
    before = [one.method.positions for one, place in zip(parts, order, strict=True) if place < 2]
    if before[0] == "renumber" and before[-1] != "renumber":
        raise OptionError(
            f"{stages}: positions={before[-1]} behind a method that renumbers. Give both the same (positions=keep)"
        )
    return found
