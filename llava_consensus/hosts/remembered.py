"""A bounded memory of what was worked out before, for any number of threads."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

Value = TypeVar("Value")


class Remembered:
    """Values by key, at most `most` of them; the one that was not asked for the longest goes first. A copy is empty."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[Hashable, Any] = OrderedDict()
        self._door = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key, made when it is not there. Tensors are made outside of inference mode, so that training
        can use them too.
        """
        with self._door:
            if key in self._values:
                self._values.move_to_end(key)
                known: Value = self._values[key]
                return known
        with torch.inference_mode(False), torch.no_grad():
            made = make()
        with self._door:
            self._values[key] = made
            while len(self._values) > self._most:
                self._values.popitem(last=False)
        return made

    def values(self) -> list[Any]:
        """All values, the one that was not asked for the longest first."""
        with self._door:
            return list(self._values.values())

    def __len__(self) -> int:
        return len(self._values)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Remembered":
        return type(self)(self._most)
