"""Calls of an attached model, and how hooks find the one under way.

A call (`Call`: its input and its report) lives in a context variable: every thread, and every asynchronous task, sees
its own, so that calls never meet. Below stand the pieces that every host installs: functions replaced on an instance
(`Shadow`), the lengths of `generate`, hooks that collect parts of the vision tower, and tower blocks whose output is
not read.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from llava_consensus.hosts.base import PictureOutcome, Tap, Tower
from llava_consensus.hosts.towers import blocks_read, earlier_block, taps_read
from llava_consensus.reduction.tokens import Stopwatch

COLLECTED = "collected"  # in the state of a call: parts of the tower
UNDER_WAY = "generate"  # there: the `generate` that forwards belong to
MORE = "more rows"  # there: rows by which the prompt that `generate` counts is longer than the full one
COUNTING = "_prepare_generated_length"  # function of transformers 5 that settles how long an answer may be


class CachedLayer(NamedTuple):
    """The cache of one layer, all rows of the batch together."""

    bytes: int  # of keys and values
    rows: int  # R
    length: int  # positions of each row, padding among them


@dataclass(frozen=True)
class Report:
    """Result of one call: per-picture outcomes, notes, timings, cache sizes."""

    outcomes: list[PictureOutcome] = field(default_factory=list)  # of each picture
    notes: tuple[str, ...] = ()  # remarks that go into the record
    watch: Stopwatch | None = None  # times of the last reduction
    cache: tuple[CachedLayer, ...] = ()  # sizes of the cache that the prefill left


@dataclass(frozen=True)
class Given:
    """Inputs of a call that are known before the model runs.

    Args:
        encoded: of each picture that went through the tower before, what its host reads.
        questions: text asked in each row of the batch, for methods that read it.
        pictures: of PIL, those of the batch in order, for budgets that follow from them.
        settings: entries of the model's configuration that are others in this call.
    """

    encoded: list[Any] | None = None
    questions: list[str] | None = None
    pictures: list[Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Call:
    """One call, from its first forward to its last."""

    owner: Any  # the attachment
    given: Given = field(default_factory=Given)
    scoped: bool = False  # whether somebody ends this call; else the next one does
    active: bool = True
    report: Report = field(default_factory=Report)
    whole: Sequence[PictureOutcome] = ()  # of a composition, outcomes of the methods that have acted before
    state: dict[str, Any] = field(default_factory=dict)  # what hooks hand on while forwards run, by subject

    def tell(self, report: Report) -> None:
        """Stores the per-picture outcomes of this call; the cache sizes stay those of the first forward."""
        outcomes = (
            [
                one._replace(before=whole.before, origin=whole.origin, reductions=())
                for one, whole in zip(report.outcomes, self.whole, strict=True)
            ]
            if self.whole and report.outcomes
            else report.outcomes
        )
        self.report = replace(report, outcomes=outcomes, cache=self.report.cache)


_NONE: Mapping[int, Call] = {}
# Not attributes of the attachment: several threads may use one model at a time, each within a call of its own.
_CALLS: ContextVar[Mapping[int, Call]] = ContextVar("llava_consensus_calls", default=_NONE)  # by attachment
_CALLED: ContextVar[nn.Module | None] = ContextVar("llava_consensus_called", default=None)  # model whose forward runs


def latest_call(owner: Any) -> Call | None:
    """The call of an attachment that began last in this context."""
    # An id is given again when its object is gone, so the owner itself is compared too.
    call = _CALLS.get().get(id(owner))
    return call if call is not None and call.owner is owner else None


def current_call(owner: Any) -> Call | None:
    """The call of an attachment that is under way in this context."""
    call = latest_call(owner)
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
        call.active = False
        call.state.clear()


def running() -> nn.Module | None:
    """The module whose forward runs in this context; None outside of a forward."""
    return _CALLED.get()


def called(model: nn.Module) -> nn.Module:
    """The module that runs now: `model`, or its `DataParallel` replica of this thread."""
    module = _CALLED.get()
    return module if module is not None and getattr(module, "_is_replica", False) else model


def enter_model(module: nn.Module | None, *args: Any) -> None:
    """Forward pre-hook of a model: notes which module runs in this context."""
    _CALLED.set(module)


def leave_model(module: nn.Module, *args: Any) -> None:
    """Forward hook of a model: notes that its module has run."""
    _CALLED.set(None)


Result = TypeVar("Result")
_ABSENT = ...  # survives a deep copy as the same object


def on_stack(frame: FrameType | None, codes: Mapping[tuple[str, str], str], value: Any) -> bool:
    """True if one of these functions runs in a frame or in one that called it, and was given `value`.

    Args:
        codes: name of the argument by the file and name of a function: the compiler makes code objects of its own.
    """
    while frame is not None:
        argument = codes.get((frame.f_code.co_filename, frame.f_code.co_name))
        if argument is not None and frame.f_locals.get(argument) is value:
            return True
        frame = frame.f_back
    return False


def code_of(function: Any) -> tuple[str, str]:
    """File and name of a function, as `on_stack` takes them."""
    code = inspect.unwrap(function).__code__
    return code.co_filename, code.co_name


class Shadow:
    """`name` of `target` is `value` until `restore`."""

    def __init__(self, target: Any, name: str, value: Any) -> None:
        self.target, self.name, self.value = target, name, value
        self.before = vars(target).get(name, _ABSENT)
        # Past the model's own `__setattr__`, which would register what it takes for a submodule or a parameter.
        object.__setattr__(target, name, value)

    def uncover(self, twin: Any) -> None:
        """A shallow copy of the target gets what stood there."""
        if self.before is _ABSENT:
            vars(twin).pop(self.name, None)
        else:
            vars(twin)[self.name] = self.before

    def restore(self) -> None:
        """Puts back what stood there. A second time does nothing."""
        if self.name in vars(self.target):
            if self.before is _ABSENT:
                object.__delattr__(self.target, self.name)
            else:
                object.__setattr__(self.target, self.name, self.before)


def uncompiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """Like `torch.compiler.disable`, applied at the first call in a process that has the compiler: in any other there
    is nothing to leave alone. The compiler is not imported here, since that takes seconds.
    """
    made: list[Callable[..., Result]] = []

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Result:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not made:
            made.append(torch.compiler.disable(function))
        return made[0](*args, **kwargs)

    return run


def install_taps(attachment: Any, tower: Tower) -> list[Any]:
    """Hooks for what the attachment's method reads of the tower; they collect while a call wants it."""
    taps = taps_read(tower, attachment.reader)
    return [tap.module.register_forward_hook(partial(_collect, attachment, tap)) for tap in taps]


@contextmanager
def collecting(call: Call) -> Iterator[dict[str, Tensor]]:
    """The parts that hooks take from the tower while the body runs."""
    parts: dict[str, Tensor] = {}
    call.state[COLLECTED] = parts
    try:
        yield parts
    finally:
        call.state.pop(COLLECTED, None)


def _collected(attachment: Any) -> dict[str, Tensor] | None:
    """Parts collected so far; None outside of `collecting`."""
    call = current_call(attachment)
    return None if call is None else call.state.get(COLLECTED)


def _collect(attachment: Any, tap: Tap, module: nn.Module, inputs: Any, output: Any) -> None:
    collected = _collected(attachment)
    if collected is None:
        return
    parts = tap.read(output)
    if parts.keys() & collected.keys():
        raise RuntimeError(
            "the vision tower ran twice for one set of pictures: multi-scale (S2) towers are not adapted"
        )
    collected |= {name: value.detach() for name, value in parts.items()}


def skip_unread(attachment: Any, tower: Any) -> list[Shadow]:
    """Shadows of the blocks after the last one that projector or method reads: while an attachment encodes pictures
    they hand their input on, which changes no bit of what is read; elsewhere they run. None where a tower does not say
    in which form its blocks return states.
    """
    if not hasattr(tower, "result"):
        return []
    last = max(tower.feature_block, earlier_block(tower, attachment.reader), *blocks_read(tower, attachment.reader))
    return [
        Shadow(block, "forward", partial(_pass_on, attachment, block.forward)) for block in tower.blocks[last + 1 :]
    ]


def _pass_on(attachment: Any, plain: Callable[..., Any], hidden: Any, *args: Any, **kwargs: Any) -> Any:
    """Forward of an unread block."""
    if _collected(attachment) is None:
        return plain(hidden, *args, **kwargs)
    return attachment.here.tower.result(hidden)


@functools.cache
def _names(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[1:]


def names_of(method: Any) -> tuple[str, ...]:
    """Names of the arguments of a bound method, or of what somebody has put in its place on the instance."""
    function = getattr(method, "__func__", None)
    return tuple(inspect.signature(method).parameters) if function is None else _names(function)


def named(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a method by name, positional ones among them."""
    return {**dict(zip(_names(function), args, strict=False)), **kwargs}


def recounting(attachment: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces the function by which `generate` settles its lengths: `max_length` and `min_length` count the original
    prompt, and `generate` counts the reduced one.
    """
    module, call = attachment.model.module, current_call(attachment)
    function = getattr(type(module), COUNTING)
    kwargs = named(function, args, kwargs)
    config, more = kwargs["generation_config"], 0 if call is None else call.state.get(MORE, 0)
    if config.max_new_tokens is None and not kwargs["has_default_max_length"]:
        config.max_length = max(config.max_length + more, 1)
    if config.min_new_tokens is None and config.min_length and not kwargs["has_default_min_length"]:
        config.min_length = max(config.min_length + more, 0)
    return (plain or partial(function, module))(**kwargs)
