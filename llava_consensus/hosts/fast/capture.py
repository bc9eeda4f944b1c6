"""A function of fixed buffers, captured once and replayed: on a GPU a `torch.cuda.CUDAGraph`, on a CPU a tape of what
torch dispatched (`tape.py`).

CUDA graphs are taken directly, not through `torch.compile(mode="reduce-overhead")`: a graph replays the very kernels
that run without it, takes no compiler and no minutes of compilation, and sees nothing of the hooks, shadows and context
variables by which an attachment works, which a tracer would have to follow.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from llava_consensus.hosts.fast.tape import Tape, tensors_used

WARM_UPS = 2  # runs before a capture: libraries choose their kernels, and what is remembered is worked out


class Captured(Protocol):
    """A captured function. Its buffers are read and written where they stand."""

    def replay(self) -> None:
        """Does again what the function did."""
        ...


class CudaGraph:
    """A function of buffers on a CUDA device as a graph.

    Args:
        run: reads and writes buffers that outlive the graph.
        device: of all of them.
        pool: of memory for what lies between; graphs that share one must not run at the same time.
    """

    def __init__(self, run: Callable[[], None], device: torch.device, pool: Any) -> None:
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    run()
                self._held = tensors_used(run)
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                run()

    def replay(self) -> None:
        """Launches the graph on the current stream."""
        self._graph.replay()


class Capturing:
    """Captures functions for one device.

    Raises:
        NotImplementedError: for a device that knows neither.
    """

    types: ClassVar[tuple[str, ...]] = ("cuda", "cpu")

    def __init__(self, device: torch.device) -> None:
        if device.type not in self.types:
            raise NotImplementedError(f"no graphs on {device.type}")
        self.device = device
        self._pool: Any = None

    def __call__(self, run: Callable[[], None]) -> Captured:
        """A function of fixed buffers, captured."""
        if self.device.type != "cuda":
            return Tape(run)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return CudaGraph(run, self.device, self._pool)


class Function:
    """A function of tensors, captured with a buffer for everything that goes in and comes out.

    Args:
        function: of tensors of fixed shapes, gives tensors.
        inputs: examples of what goes in.
        capturing: for their device.
    """

    def __init__(
        self, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], capturing: Capturing
    ) -> None:
        self.inputs = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in inputs]
        self.outputs = [torch.empty_like(tensor) for tensor in function(*self.inputs)]

        def run() -> None:
            for buffer, value in zip(self.outputs, function(*self.inputs), strict=True):
                buffer.copy_(value)

        self._captured = capturing(run)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """The function's results, in buffers that the next call overwrites."""
        for buffer, value in zip(self.inputs, inputs, strict=True):
            if buffer.shape != value.shape or buffer.dtype != value.dtype:
                raise ValueError(f"captured for {buffer.shape} {buffer.dtype}, given {value.shape} {value.dtype}")
            buffer.copy_(value)
        self._captured.replay()
        return self.outputs
