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

from llava_consensus.hosts.base import PictureOutcome, Tiles
from llava_consensus.reduction.stopwatch import Stopwatch

if TYPE_CHECKING:
    from llava_consensus.hosts.decoder.cache import CachedLayer
    from llava_consensus.hosts.decoder.forwards import Armed, CutForward, Step


@dataclass(eq=False)
class Call:
    """One call. The first fields are given, the others are filled while it runs."""

    owner: Any  # the attachment
    encoded: list[Tiles] | None = None  # one for each picture that went through the tower before
    questions: list[str] | None = None  # text asked in each row of the batch, for methods that read it
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the host, where this call differs from its model
    scoped: bool = False  # whether somebody ends this call; else the next one does
    active: bool = True
    outcomes: list[PictureOutcome] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    watch: Stopwatch | None = None  # times of the last reduction
    parts: dict[str, Tensor] | None = None  # taken from the tower while it runs
    inside: Any = None  # of a method inside the tower: its state while the tower runs
    cache: "list[CachedLayer]" = field(default_factory=list)  # sizes of the cache that the prefill left
    armed: "Armed | None" = None  # a sequence that is about to be read and cut
    forward: "CutForward | Step | None" = None  # of the decoder, under way
    layer_parts: dict[str, Tensor] = field(default_factory=dict)  # queries and keys of the layer before a cut
    mask: Tensor | None = None  # [R, columns] of the decoder's forward under way


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
    others = {key: one for key, one in _CALLS.get().items() if one.owner.active}
    _CALLS.set({**others, id(call.owner): call})
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


def called(model: nn.Module) -> nn.Module:
    """The model whose forward runs: `model`, or the copy of it that `DataParallel` made for this thread."""
    module = _CALLED.get()
    return module if module is not None and getattr(module, "_is_replica", False) else model


def enter_model(module: nn.Module, *given: Any) -> None:
    """Forward pre-hook of a model."""
    _CALLED.set(module)


def leave_model(module: nn.Module, *given: Any) -> None:
    """Forward hook of a model."""
    _CALLED.set(None)
