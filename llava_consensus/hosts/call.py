"""One call of an attached model: what was given, what became of it, and which call is under way. Hooks are installed
once, when a method is attached; they look here and do nothing where no call is under way.

A call lives in a context variable: every thread, and every asynchronous task, sees its own, so that calls never meet.

At the end are the tools by which a model's functions lead here: `Shadow` replaces one on one instance, and `uncompiled`
keeps `torch.compile` out of it.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from llava_consensus.hosts.base import PictureOutcome
from llava_consensus.reduction.tokens import Stopwatch


class CachedLayer(NamedTuple):
    """The cache of one layer, all rows of the batch together."""

    bytes: int  # of keys and values
    rows: int  # R
    length: int  # positions of each row, padding among them


@dataclass(frozen=True)
class Given:
    """What is known of a call before the model runs.

    Args:
        encoded: of each picture that went through the tower before, what its host reads.
        questions: text asked in each row of the batch, for methods that read it.
        settings: entries of the model's configuration that are others in this call.
        begin_alike: whether all prompts have the same words, and no padding, in front of their pictures, so that what
            they begin with is probed once.
    """

    encoded: list[Any] | None = None
    questions: list[str] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    begin_alike: bool = False


@dataclass(frozen=True)
class Report:
    """What became of a call."""

    outcomes: list[PictureOutcome] = field(default_factory=list)  # of each picture
    notes: tuple[str, ...] = ()  # remarks that go into the record
    watch: Stopwatch | None = None  # times of the last reduction
    cache: tuple[CachedLayer, ...] = ()  # sizes of the cache that the prefill left


@dataclass(eq=False)
class Call:
    """One call, from its first forward to its last."""

    owner: Any  # the attachment
    given: Given = field(default_factory=Given)
    scoped: bool = False  # whether somebody ends this call; else the next one does
    active: bool = True
    report: Report = field(default_factory=Report)
    state: dict[str, Any] = field(default_factory=dict)  # what hooks hand on while forwards run, by subject

    def tell(self, report: Report) -> None:
        """Takes in what became of the pictures; the sizes of the cache are those of the first forward."""
        self.report = replace(report, cache=self.report.cache)


_NONE: Mapping[int, Call] = {}
# Not attributes of the attachment: several threads may use one model at a time, each within a call of its own.
_CALLS: ContextVar[Mapping[int, Call]] = ContextVar("llava_consensus_calls", default=_NONE)  # by attachment
_CALLED: ContextVar[nn.Module | None] = ContextVar("llava_consensus_called", default=None)  # model whose forward runs


def latest(owner: Any) -> Call | None:
    """The call of an attachment that began last in this context."""
    # An id is given again when its object is gone, so the owner itself is compared too.
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
        call.active = False
        call.state.clear()


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


def cache_given(arguments: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a model or a layer, or the results of one, by name; None where there is none."""
    return next((arguments[name] for name in CACHE if arguments.get(name) is not None), None)


def cached_layers(cache: Any, axis: int = -2) -> list[CachedLayer]:
    """Sizes of a cache of transformers 5 (`layers`, of which some may hold no keys, or hold them quantized, and are not
    counted), of 4.37 (`key_cache`) or of the older tuples, whose keys have their positions along `axis`.
    """
    pairs: list[tuple[Tensor, Tensor]]
    if hasattr(cache, "layers"):
        pairs = [(one.keys, one.values) for one in cache.layers if getattr(getattr(one, "keys", None), "ndim", 0) == 4]
    elif hasattr(cache, "key_cache"):
        pairs = list(zip(cache.key_cache, cache.value_cache, strict=True))
    else:
        pairs = [(layer[0], layer[1]) for layer in cache]
    return [CachedLayer(key.nbytes + value.nbytes, key.shape[0], key.shape[axis]) for key, value in pairs]


Result = TypeVar("Result")

CACHE = ("past_key_values", "cache", "past_key_value")  # in transformers up to 5.23, from 5.24 on, in layers of 4.37
_ABSENT = ...  # survives a deep copy as the same object


class Shadow:
    """`name` of `target` is `value` until `restore`."""

    def __init__(self, target: Any, name: str, value: Any) -> None:
        self.target, self.name = target, name
        self.before = vars(target).get(name, _ABSENT)
        # Past the model's own `__setattr__`, which would register what it takes for a submodule or a parameter.
        object.__setattr__(target, name, value)

    def restore(self) -> None:
        """Puts back what stood there. A second time does nothing."""
        if self.name in vars(self.target):
            if self.before is _ABSENT:
                object.__delattr__(self.target, self.name)
            else:
                object.__setattr__(self.target, self.name, self.before)


def uncompiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """As `torch.compiler.disable`, applied at the first call in a process that has the compiler: in any other there is
    nothing to leave alone. The compiler is not imported here, since that takes seconds.
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
