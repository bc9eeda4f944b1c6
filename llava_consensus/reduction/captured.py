"""Loops of many small steps as one launch. A greedy choice (farthest point sampling, determinantal point processes)
takes a few operations for each token it chooses, and on a GPU each of them costs its launch. Inside `capturing()`, what
such a loop dispatches on CUDA is captured once for each shape of its inputs and is one graph from then on; on other
devices, and outside, the loop runs as it is written. Torch only.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

MOST = 16  # graphs of one loop; the one that was not used for the longest goes first
LARGEST = 1 << 28  # bytes of the inputs of a loop that is captured: a graph keeps a copy of them
Given = ParamSpec("Given")
Result = TypeVar("Result")

_wanted: ContextVar[bool] = ContextVar("capturing", default=False)
_running: ContextVar[object | None] = ContextVar("loop", default=None)


class Recorded(NamedTuple):
    """A captured loop: `replay` reads `given` and writes `result`."""

    replay: Callable[[], object]
    given: list[Tensor]
    result: Any  # a tensor, or a tuple of them


@contextmanager
def capturing() -> Iterator[None]:
    """Loops that run in the body, in this thread, may be captured."""
    token = _wanted.set(True)
    try:
        yield
    finally:
        _wanted.reset(token)


def running() -> object | None:
    """What stands for the loop that is under way in this thread, so that its operations can be told from others."""
    return _running.get()


def captured(loop: Callable[Given, Result]) -> Callable[Given, Result]:
    """The same loop, captured where that is wanted and possible. It takes tensors and values that can be compared, and
    returns a tensor or a tuple of them; what it does follows from their shapes and the values alone.
    """
    known: OrderedDict[Hashable, Recorded] = OrderedDict()
    door = threading.Lock()

    @functools.wraps(loop)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        tensors = [value for value in args if isinstance(value, Tensor)]
        device = tensors[0].device
        record = RECORDERS.get(device.type) if _wanted.get() and not torch.is_grad_enabled() else None
        if record is None or sum(value.nbytes for value in tensors) > LARGEST or _inside_another(device):
            return _eagerly(loop, *args, **kwargs)
        shapes = tuple((value.shape, value.dtype) if isinstance(value, Tensor) else value for value in args)
        key = (shapes, tuple(sorted(kwargs.items())), device, _queue(device))
        with door:
            if key not in known:
                known[key] = record(functools.partial(loop, **kwargs), args)
                while len(known) > MOST:
                    known.popitem(last=False)
            known.move_to_end(key)
            replay, given, result = known[key]
            for own, value in zip(given, tensors, strict=True):
                own.copy_(value)
            replay()
            return cast("Result", result.clone() if isinstance(result, Tensor) else tuple(map(torch.clone, result)))

    return run


def _eagerly(loop: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    token = _running.set(object())
    try:
        return loop(*args, **kwargs)
    finally:
        _running.reset(token)


def _inside_another(device: torch.device) -> bool:
    """Whether the loop is being captured as a part of something larger."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _queue(device: torch.device) -> int:
    """Of which queue of the device the copy, the graph and the copy back are part: graphs of two queues never meet."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def copied(args: tuple[Any, ...]) -> tuple[list[Any], list[Tensor]]:
    """Arguments whose tensors are copies, and these copies."""
    own = [value.clone() if isinstance(value, Tensor) else value for value in args]
    return own, [value for value in own if isinstance(value, Tensor)]


def _record_cuda(loop: Callable[..., Any], args: tuple[Any, ...]) -> Recorded:
    """Runs the loop once beside the current stream, as CUDA asks for, and captures it."""
    own, given = copied(args)
    device = given[0].device
    current, beside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    beside.wait_stream(current)
    with torch.cuda.stream(beside):
        loop(*own)
    current.wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = loop(*own)
    return Recorded(graph.replay, given, result)


RECORDERS: dict[str, Callable[[Callable[..., Any], tuple[Any, ...]], Recorded]] = {"cuda": _record_cuda}
