"""What was proved of a model, remembered as long as the model lasts and is what it was.

A proof runs a model's own modules, which takes longer than the rest of `attach`. What it depends on is looked at every
time: modules, what each has and its class runs, weights and buffers, configurations and kernels. Where one of these is
another, the proof is made anew. A weight is another one by its place, its format or its version, which every operation
on it raises; numbers that are written in place through `.data` alone leave no trace, and change no way of working.
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
    """What a proof depends on."""

    told: list[Any]  # in order; objects by their ids
    held: list[Any]  # weak references to these: ids are theirs as long as they live

    def lasts(self, now: "State") -> bool:
        """Whether all of it is still there, and the same."""
        return self.told == now.told and all(one() is not None for one in self.held)


class _Teller:
    """Notes what values are: plain ones and containers by what they hold, all others by identity."""

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
        """Notes what several values are."""
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
    """What these modules are now; None where one does not tell."""
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
    """What was remembered of a model that is still in this state; None for nothing."""
    before, found = _PROVED.get(model, {}).get(purpose, (None, None))
    return found if before is not None and state is not None and before.lasts(state) else None


def remember(model: nn.Module, purpose: Any, state: State | None, found: Any) -> None:
    """Remembers what a proof of a model in this state found."""
    if state is not None:
        _PROVED.setdefault(model, {})[purpose] = state, found
