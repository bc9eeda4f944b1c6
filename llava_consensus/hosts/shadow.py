"""Functions of a model that are replaced on one instance and put back (the class is never touched), and functions that
`torch.compile` leaves alone.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

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
