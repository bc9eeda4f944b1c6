"""Checks that end in a clear error: values of options, and numbers that must be finite. Torch only."""

import math

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


def ensure_finite(stage: str, values: Tensor) -> Tensor:
    """`values`, or NonFiniteError naming the stage. On an accelerator the check is queued, so nothing waits for it, and
    what it finds ends the program later with the same words.
    """
    if values.device.type == "cpu" and bool(torch.linalg.vector_norm(values.detach()) < torch.inf):
        return values  # one pass; the norm of large values can be infinite where none of them is, so look again
    message = f"{stage}: NaN or infinite values. Check the weights, or use bfloat16 where float16 overflows"
    try:
        torch._assert_async(torch.isfinite(values).all(), message)
    except RuntimeError as error:
        raise NonFiniteError(message) from error
    return values
