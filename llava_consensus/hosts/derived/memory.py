"""Memory of proofs about a model, kept as long as the model lives and has not changed.

A proof runs a model's own modules, which takes longer than the rest of `attach`. Everything it depends on is compared
every time: modules, their attributes and forwards, parameters and buffers, configurations and kernels; after any change
the proof is made anew. A parameter has changed where its storage, format or version differs, and every operation in
place raises the version. Two things are not seen: numbers written through `.data`, which leave no trace and change no
code, and functions that a forward reaches through another one.
"""

import inspect
from collections import OrderedDict
from collections.abc import Iterable
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from llava_consensus.hosts.derived.tap import NAME, attends, kernel_of

PLAIN = frozenset({int, float, str, bool, type(None), complex, bytes, torch.dtype, torch.device, torch.Size})
EMPTY = frozenset({dict, list, tuple, set, OrderedDict})  # types that may hold nothing
# Raised where something does not tell what it is: packed weights, tensors of inference mode, classes without code.
UNTOLD = (TypeError, AttributeError, RuntimeError, NotImplementedError, StopIteration)
_PROVED: WeakKeyDictionary[nn.Module, dict[Any, tuple["State", Any]]] = WeakKeyDictionary()


class State(NamedTuple):
    """Everything a proof depends on."""

    told: list[Any]  # in order; objects by their ids
    held: list[Any]  # weak references to those objects: an id is theirs as long as they live

    def lasts(self, now: "State") -> bool:
        """Whether all of it is still there, and the same."""
        return self.told == now.told and all(one() is not None for one in self.held)


class _Teller:
    """Writer of a State: plain values and containers by their contents, all others by identity."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.held: list[Any] = []
        self._known = set[int]()

    def identity(self, value: Any) -> bool:
        """Notes an object; True the first time."""
        self.told.append(id(value))
        if id(value) in self._known:
            return False
        self._known.add(id(value))
        self.held.append(ref(value))
        return True

    def values(self, values: Iterable[Any]) -> None:
        """Notes several values."""
        told = self.told
        for value in values:
            kind = type(value)
            told.append(kind)
            if kind in PLAIN:
                told.append(value)
            elif kind not in EMPTY or value:  # most hooks of a module are empty containers
                self._other(value)

    def _other(self, value: Any) -> None:
        if isinstance(value, dict):
            self.told.append(len(value))
            if PLAIN.issuperset(map(type, value)):
                self.told += value
            else:
                self.values(value)
            self.values(value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            self.told.append(len(value))
            self.values(value)
        elif isinstance(value, Tensor):
            self.identity(value)
            self.told += value.data_ptr(), value._version, value.dtype, value.device, value.shape
        elif self.identity(value) and NAME in getattr(value, "__dict__", ()):
            self.values([vars(value)])  # of a configuration

    def code(self, kind: type) -> None:
        """Notes the forward of a class, and what it names of its file and of the class."""
        forward: Any = kind.forward  # type: ignore[attr-defined]
        own = inspect.unwrap(forward)
        names = own.__code__.co_names
        for one in (kind, forward, own.__code__):
            self.identity(one)
        self.values(map(own.__globals__.get, names))
        for name in names:
            function = getattr(kind, name, None)
            if isinstance(function, FunctionType):
                self.identity(function)


def state_of(modules: Iterable[nn.Module]) -> State | None:
    """State of these modules; None where one cannot be told."""
    teller, kinds = _Teller(), dict[type, None]()
    try:
        for module in modules:
            kinds[type(module)] = None
            teller.values([vars(module)])
            if attends(module):
                teller.values([kernel_of(module, module.config)])
        for kind in kinds:
            teller.code(kind)
    except UNTOLD:
        return None
    return State(teller.told, teller.held)


def recalled(model: nn.Module, purpose: Any, state: State | None) -> Any:
    """Result that was remembered of a model in this state; None without one."""
    before, found = _PROVED.get(model, {}).get(purpose, (None, None))
    return found if before is not None and state is not None and before.lasts(state) else None


def remember(model: nn.Module, purpose: Any, state: State | None, found: Any) -> None:
    """Remembers the result of a proof of a model in this state."""
    if state is not None:
        _PROVED.setdefault(model, {})[purpose] = state, found
