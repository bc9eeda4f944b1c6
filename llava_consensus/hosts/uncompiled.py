"""Functions that `torch.compile` leaves alone, marked without importing the compiler, which takes seconds."""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def uncompiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """As `torch.compiler.disable`, applied at the first call in a process that has the compiler: in any other there is
    nothing to leave alone.
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
