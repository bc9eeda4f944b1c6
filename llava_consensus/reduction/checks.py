"""Checks that end in a clear error: values of options, and numbers that must be finite. Torch only."""

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


def ensure_finite(stage: str, values: Tensor) -> Tensor:
    """`values`, or NonFiniteError naming the stage. On an accelerator the check is queued, so nothing waits for it."""
    is_finite = torch.isfinite(values).all()
    message = f"{stage}: NaN or infinite values. Check the weights, or use bfloat16 where float16 overflows"
    if values.device.type == "cpu":
        if not is_finite:
            raise NonFiniteError(message)
    else:
        torch._assert_async(is_finite, message)
    return values
