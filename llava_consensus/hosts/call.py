"""What one call of an attached model collects and reports. Hooks are installed once, when a method is attached; they
look here and do nothing where no call is under way, so that calls in several threads never meet.

A call lives in a context variable: every thread, and every asynchronous task, sees its own.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from llava_consensus.hosts.base import PictureOutcome
from llava_consensus.reduction.tokens import Stopwatch

if TYPE_CHECKING:
    from llava_consensus.hosts.cache import CachedLayer
    from llava_consensus.hosts.forwards import Armed, CutForward, Step


@dataclass(eq=False)
class Call:
    """One call. The first fields are given, the others are filled while it runs."""

    owner: Any  # the attachment
    encoded: list[Any] | None = None  # of each picture that went through the tower before, what its host reads
    questions: list[str] | None = None  # text asked in each row of the batch, for methods that read it
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the host, where this call differs from its model
    spare: Tensor | None = None  # [R] rows behind the last word of each sequence that are none, where there may be some
    begin_alike: bool = False  # whether all prompts have the same words, and no padding, in front of their pictures
    scoped: bool = False  # whether somebody ends this call; else the next one does
    active: bool = True
    outcomes: list[PictureOutcome] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    watch: Stopwatch | None = None  # times of the last reduction
    parts: dict[str, Tensor] | None = None  # taken from the tower while it runs
    inside: Any = None  # of a method inside the tower: its state while the tower runs
    cache: "list[CachedLayer]" = field(default_factory=list)  # sizes of the cache that the prefill left
    prepared: Any = None  # of the host's entrance, for functions of the model further in
    armed: "Armed | None" = None  # a sequence that is about to be read and cut
    forward: "CutForward | Step | None" = None  # of the decoder, under way
    layer_parts: dict[str, Tensor] = field(default_factory=dict)  # queries and keys of the layer before a cut
    mask: Tensor | None = None  # [R, columns] of the decoder's forward under way
    outer: Mapping[str, Any] = field(default_factory=dict)  # positions among the arguments of that forward


_NONE: Mapping[int, Call] = {}
_CALLS: ContextVar[Mapping[int, Call]] = ContextVar("llava_consensus_calls", default=_NONE)  # by attachment
_CALLED: ContextVar[nn.Module | None] = ContextVar("llava_consensus_called", default=None)  # model whose forward runs


def latest(owner: Any) -> Call | None:
    """The call of an attachment that began last in this context."""
    call = _CALLS.get().get(id(owner))
    return call if call is not None and call.owner is owner else None


def current(owner: Any) -> Call | None:
    """The call of an attachment that is under way in this context."""
    call = latest(owner)
    return call if call is not None and call.active else None


def begin(call: Call) -> Call:
    """Makes a call the current one of its attachment in this context."""
    other_calls = {key: other_call for key, other_call in _CALLS.get().items() if other_call.owner.active}
    _CALLS.set({**other_calls, id(call.owner): call})
    return call


@contextmanager
def scope(call: Call) -> Iterator[Call]:
    """The call is under way while the body runs; afterwards it can be read, and hooks are silent."""
    call.scoped = True
    begin(call)
    try:
        yield call
    finally:
        call.active, call.forward, call.armed, call.parts, call.inside = False, None, None, None, None
        call.prepared = None


def called(model: nn.Module) -> nn.Module:
    """The model whose forward runs: `model`, or the copy of it that `DataParallel` made for this thread."""
    module = _CALLED.get()
    return module if module is not None and getattr(module, "_is_replica", False) else model


def enter_model(module: nn.Module, *args: Any) -> None:
    """Forward pre-hook of a model: notes which module runs in this context."""
    _CALLED.set(module)


def leave_model(module: nn.Module, *args: Any) -> None:
    """Forward hook of a model: notes that its module has run."""
    _CALLED.set(None)


class Caller:
    """What an attachment offers around calls: to make one with what is known beforehand, and to read the last one."""

    active: bool
    _latest: Call | None = None

    @contextmanager
    def call(self, **fields: Any) -> Iterator[Call]:
        """One call of the model with what is known beforehand: `encoded`, `questions`, `settings`, `begin_alike`
        (see `Call`)."""
        with scope(Call(self, **fields)) as new_call:
            self._latest = new_call
            yield new_call

    def asking(self, questions: list[str]) -> Any:
        """A call for methods that read the question itself: `with attached.asking(["..."]): model.generate(...)`, with
        the text asked in each row of the batch.
        """
        return self.call(questions=questions)

    def current(self, fresh: bool = True) -> Call:
        """The call under way. Where nobody has begun one it begins here and lasts until the next; `fresh` begins anew
        unless somebody ends the present one.
        """
        call = current(self)
        if call is None or (fresh and not call.scoped):
            call = begin(Call(self))
            self._latest = call
        return call

    @property
    def _last(self) -> Call | None:
        return latest(self) or self._latest

    @property
    def outcomes(self) -> list[PictureOutcome]:
        """What became of each picture of the last call of this thread, or of any thread where this one made none."""
        return self._last.outcomes if self._last else []

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the last call that go into its record."""
        return self._last.notes if self._last else ()

    def milliseconds(self) -> dict[str, float]:
        """Time the last reduction took, by step: the host's bookkeeping and the method's own work."""
        watches = {
            id(reduction.watch): reduction.watch for outcome in self.outcomes for _, reduction in outcome.reductions
        }
        spent: dict[str, float] = {}
        for watch in (self._last.watch if self._last else None, *watches.values()):
            for name, time in watch.milliseconds().items() if watch else ():
                spent[name] = spent.get(name, 0.0) + time
        return spent
