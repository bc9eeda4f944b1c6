"""Checks that end in a clear error: values of options, and numbers that must be finite. Torch only."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from llava_consensus.errors import ConsensusError, OptionError


class NonFiniteError(ConsensusError, FloatingPointError):
    """A stage of the reduction produced NaN or infinity; a ranking of such numbers would mean nothing."""


def choose(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises OptionError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise OptionError(f"{name}={value!r} must be one of {', '.join(allowed)}")


def within(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    """Raises OptionError unless `value` is a number in [low, high], or (low, high] with `open_low`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (low < value if open_low else low <= value) or not value <= high:  # type: ignore[operator]
        bound = f"above {low:g}" if high == float("inf") else f"in {'(' if open_low else '['}{low:g}, {high:g}]"
        raise OptionError(f"{name}={value!r} must be a number {bound}")


def boolean(name: str, value: object) -> None:
    """Raises OptionError unless `value` is true or false."""
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r} must be true or false")


def whole_or_none(name: str, value: object, meaning: str) -> None:
    """Raises OptionError unless `value` is a whole number or None."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise OptionError(f"{name}={value!r} must be a whole number, {meaning}, or left out")


def numbers(name: str, text: object, whole: bool = False) -> list[float]:
    """The numbers of a text such as `8 16 24`, or of one number. OptionError for anything else."""
    try:
        found = [float(word) for word in str(text).split()]
    except ValueError:
        found = [float("nan")]
    if not all(math.isfinite(number) and (not whole or number.is_integer()) for number in found):
        kind = "whole numbers" if whole else "numbers"
        raise OptionError(f"{name}={text!r} must be {kind} with spaces between them, such as '8 16 24'")
    return found


_waiting: ContextVar[list[tuple[str, Tensor]] | None] = ContextVar("waiting", default=None)


@contextmanager
def checked_together() -> Iterator[None]:
    """What `ensure_finite` is given in the body is checked at its end, all of it in five operations. NonFiniteError
    names the stage; on an accelerator the words name every stage that was checked.
    """
    waiting: list[tuple[str, Tensor]] = []
    token = _waiting.set(waiting)
    try:
        yield
    finally:
        _waiting.reset(token)
    if not waiting:
        return
    on_cpu = all(values.device.type == "cpu" for _, values in waiting)
    order = 2 if on_cpu else torch.inf  # on the CPU the largest value takes thirty times as long as the Euclidean norm
    norms = torch._foreach_norm([values for _, values in waiting], order)  # NaN or infinite where one of the values is
    try:
        _assert(" or ".join(stage for stage, _ in waiting), (torch.stack(norms) < torch.inf).all())
    except NonFiniteError:  # on the CPU; the norm of large values can be infinite where none of them is
        for stage, values in waiting:
            ensure_finite(stage, values)


def ensure_finite(stage: str, values: Tensor) -> Tensor:
    """`values`, or NonFiniteError naming the stage. On an accelerator the check is queued, so nothing waits for it, and
    what it finds ends the program later with the same words.
    """
    waiting = _waiting.get()
    if waiting is None:
        _assert(stage, torch.isfinite(values).all())
    elif values.numel():
        waiting.append((stage, values))
    return values


def _assert(stage: str, is_finite: Tensor) -> None:
    message = f"{stage}: NaN or infinite values. Check the weights, or use bfloat16 where float16 overflows"
    try:
        torch._assert_async(is_finite, message)
    except RuntimeError as error:
        raise NonFiniteError(message) from error
