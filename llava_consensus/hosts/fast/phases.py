"""What is captured before the language model: the vision tower, and the selection with everything around it."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from llava_consensus.hosts.base import PictureOutcome, Tiles
from llava_consensus.hosts.call import Call
from llava_consensus.hosts.fast.capture import Capturing, Function
from llava_consensus.hosts.fast.request import Request
from llava_consensus.hosts.sequence.splice import Sequence as Rows


class Plan(NamedTuple):
    """What follows from the structure of prompts, known before anything is captured."""

    key: Hashable  # equal for equal structures
    rows: Callable[[Call, Tensor, Tensor, list[Tiles]], Rows]  # ids and words [R, L], tiles -> reduced sequences
    limit: int | None = None  # rows the model cuts a sequence to


class FixedHost(Protocol):
    """What a host supplies so that its model can answer in fixed shapes."""

    def request(self, arguments: dict[str, Any], call: Call) -> Request:
        """What a call of `generate` asks for. DeclinedError for what is not captured."""
        ...

    def plan(self, request: Request, ids: Tensor, real: Tensor, call: Call) -> Plan:
        """The structure of prompts [R, L] on the CPU, whose rows to spare count as words."""
        ...

    def encode(self, pixels: Tensor, tiles: list[int]) -> list[Tiles]:
        """Tiles [T, ...] of pictures of so many tiles each through the tower; captured."""
        ...

    def result(self, request: Request, answers: Tensor) -> Tensor:
        """What `generate` returns, given the tokens of the answers [R, n]."""
        ...


class Leaves:
    """The tensors of a nested value, and the way back."""

    def __init__(self, value: Any) -> None:
        self._leaves, self._tree = tree_flatten(value)
        self._places = [place for place, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, in order."""
        return [self._leaves[place] for place in self._places]

    def shapes(self) -> Hashable:
        """Equal for values whose tensors can be swapped."""
        return str(self._tree), tuple((tensor.shape, tensor.dtype) for tensor in self.tensors)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        """The same value with other tensors."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self._tree)


class TowerPhase:
    """Pictures of one number of tiles through tower and projector."""

    def __init__(self, host: FixedHost, pixels: Tensor, tiles: list[int], capturing: Capturing) -> None:
        self._found: Leaves | None = None

        def run(pixels: Tensor) -> list[Tensor]:
            self._found = Leaves(host.encode(pixels, tiles))
            return self._found.tensors

        self._function = Function(run, [pixels], capturing)

    def __call__(self, pixels: Tensor) -> list[Tiles]:
        """Of each picture what the tower gives, in buffers that the next call overwrites."""
        assert self._found is not None
        found: list[Tiles] = self._found.with_tensors(self._function(pixels))
        return found


class Selected(NamedTuple):
    """Reduced prompts."""

    embeds: Tensor  # [R, S', D], words on the left and rows to spare behind them
    lengths: Tensor  # [R] rows up to the last word
    outcomes: list[PictureOutcome]
    notes: tuple[str, ...]


class SelectionPhase:
    """Prompts of one structure, assembled and reduced."""

    def __init__(
        self, attachment: Any, plan: Plan, prompt: tuple[Tensor, Tensor, Tensor], tiles: Leaves, capturing: Capturing
    ) -> None:
        self._outcomes: list[PictureOutcome] = []
        self._notes: tuple[str, ...] = ()
        self._reductions = Leaves([])

        def run(ids: Tensor, words: Tensor, spare: Tensor, *parts: Tensor) -> list[Tensor]:
            call = Call(attachment, spare=spare)
            rows = plan.rows(call, ids, words, tiles.with_tensors(parts))
            self._outcomes, self._notes = call.outcomes, call.notes
            self._reductions = Leaves([_bare(outcome) for outcome in call.outcomes])
            return [rows.embeds, rows.real.sum(1) - spare, *self._reductions.tensors]

        self._function = Function(run, [*prompt, *tiles.tensors], capturing)

    def __call__(self, prompt: tuple[Tensor, Tensor, Tensor], tiles: Leaves) -> Selected:
        """The reduced prompts, in buffers that the next call overwrites.

        Args:
            prompt: ids, words [R, L] and rows to spare [R].
            tiles: of the pictures.
        """
        embeds, lengths, *_ = self._function(*prompt, *tiles.tensors)
        return Selected(embeds, lengths, [], self._notes)

    def outcomes(self) -> list[PictureOutcome]:
        """What became of the pictures of the last call, in tensors of their own."""
        copies = [tensor.clone() for tensor in self._function.outputs[2:]]
        reductions = self._reductions.with_tensors(copies)
        return [outcome._replace(reductions=found) for outcome, found in zip(self._outcomes, reductions, strict=True)]


def _bare(outcome: PictureOutcome) -> tuple[Any, ...]:
    """The reductions of a picture without their times, which belong to the run that was captured."""
    return tuple(
        (part, reduction._replace(watch=None, measures=dict(reduction.measures)))
        for part, reduction in outcome.reductions
    )
