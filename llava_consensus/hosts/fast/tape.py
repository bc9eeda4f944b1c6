"""What a CUDA graph is on a GPU, on any device: everything that torch dispatches while a function runs is recorded with
the tensors it used, and replayed on those same tensors. No Python of the function runs again.

What cannot be in a graph is refused while it is recorded: a wait for the device, or data of the host. With `strict`, a
replay runs the function itself and compares what it dispatches with the record, operation by operation, so that other
tensors than the fixed buffers, changed shapes and changed numbers are found.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

# operations whose result, or whose result's shape, has to reach the host
WAITS = frozenset(
    {
        "_local_scalar_dense",
        "item",
        "is_nonzero",
        "nonzero",
        "equal",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "bincount",
    }
)
HOST_DATA = frozenset({"lift_fresh", "lift_fresh_copy"})  # what `torch.tensor(...)` becomes


class CaptureError(RuntimeError):
    """Something that cannot be captured, or a replay that is not what was captured. A mistake of this program."""


class Slot(NamedTuple):
    """In place of a tensor that an earlier operation of the record made."""

    number: int


class Step(NamedTuple):
    """One operation of a record."""

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[int, ...]  # numbers of the tensors it gives
    done: tuple[int, ...]  # numbers of those that are not needed behind it


class Tape:
    """A function of fixed buffers as a record of what it dispatched.

    Args:
        run: reads and writes buffers that outlive the tape.
    Raises:
        CaptureError: for what no graph can hold.
    """

    strict: ClassVar[bool] = False  # whether a replay runs the function and compares

    def __init__(self, run: Callable[[], None]) -> None:
        run()  # as before a graph: what is remembered is worked out
        self._run, recorder = run, _recorded(run)
        self.steps, self._tensors = _with_ends(recorder.steps), recorder.count

    def replay(self) -> None:
        """Does what was recorded, on the same buffers."""
        if self.strict:
            with _AsOnGpu(), _Recorder(self.steps) as again:
                self._run()
            again.finish()
            return
        tensors: list[Any] = [None] * self._tensors
        for operation, args, kwargs, made, done in self.steps:
            named = {name: _real(value, tensors) for name, value in kwargs.items()} if kwargs else kwargs
            result = operation(*[_real(part, tensors) for part in args], **named)
            if isinstance(result, Tensor):
                tensors[made[0]] = result
            else:
                for number, value in zip(made, _tensors(result), strict=True):
                    tensors[number] = value
            for number in done:
                tensors[number] = None


def tensors_used(run: Callable[[], None]) -> list[Tensor]:
    """The tensors that a function uses and has not made itself: buffers, weights, and what is remembered. A graph knows
    no more of them than where they are, so whoever holds it must hold them too.

    Raises:
        CaptureError: for what no graph can hold.
    """
    steps = _recorded(run).steps
    return [leaf for step in steps for leaf in tree_flatten((step.args, step.kwargs))[0] if isinstance(leaf, Tensor)]


def _recorded(run: Callable[[], None]) -> "_Recorder":
    recorder = _Recorder()
    with _AsOnGpu(), recorder:
        run()
    return recorder


class _AsOnGpu(TorchFunctionMode):
    """`one_hot` as it is on a GPU, where it does not look at the numbers it is given."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.nn.functional.one_hot:
            return function(*args, **(kwargs or {}))
        index, count = args
        return index.new_zeros(*index.shape, count).scatter_(-1, index[..., None], 1)


class _Recorder(TorchDispatchMode):
    """Records operations, or compares them with a record."""

    def __init__(self, expected: list[Step] | None = None) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.count = 0
        self._expected = expected
        self._numbers: dict[int, int] = {}  # by the identity of a tensor
        self._held: list[Tensor] = []  # so that no identity occurs twice

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _refuse(operation, args)
        before = tree_map(self._known, (tuple(args), kwargs), is_leaf=lambda leaf: isinstance(leaf, Tensor))
        result = operation(*args, **kwargs)
        _refuse_mixed(operation, (args, kwargs), result)
        made = tuple(self._number(tensor) for tensor in _tensors(result))
        step = Step(operation, before[0], before[1], made, ())
        if self._expected is not None:
            self._compare(step)
        self.steps.append(step)
        return result

    def _known(self, leaf: Any) -> Any:
        number = self._numbers.get(id(leaf)) if isinstance(leaf, Tensor) else None
        return leaf if number is None else Slot(number)

    def _number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = self.count
            self._held.append(tensor)
            self.count += 1
        return self._numbers[id(tensor)]

    def _compare(self, step: Step) -> None:
        """Raises CaptureError where an operation is not the one that was recorded in its place."""
        assert self._expected is not None
        place = len(self.steps)
        if place >= len(self._expected):
            raise CaptureError(f"a replay goes on behind the {place} operations that were captured: {step.operation}")
        known = self._expected[place]
        if _signature(step) != _signature(known):
            raise CaptureError(
                f"operation {place} was captured as {known.operation} of {_shown(known)}, and is now "
                f"{step.operation} of {_shown(step)}"
            )

    def finish(self) -> None:
        """Raises CaptureError where operations are missing."""
        if self._expected is not None and len(self.steps) != len(self._expected):
            raise CaptureError(f"a replay has {len(self.steps)} operations, {len(self._expected)} were captured")


def _refuse(operation: Any, args: Any) -> None:
    """Raises CaptureError for an operation that no graph can hold."""
    name = operation.overloadpacket.__name__
    masked = name.startswith("index") and any(
        isinstance(part, Tensor) and part.dtype == torch.bool for part in (tree_flatten(args[1])[0] if args[1:] else ())
    )
    counted = name == "repeat_interleave" and isinstance(args[0], Tensor) and len(args) < 2
    if name in WAITS or masked or counted:
        raise CaptureError(f"{operation}: waits for the device, which cannot be captured")
    if name in HOST_DATA:
        raise CaptureError(f"{operation}: takes numbers of the host, which a replay would not see changed")


def _refuse_mixed(operation: Any, given: Any, result: Any) -> None:
    """Raises CaptureError where a tensor of the host meets one of the device; single numbers may."""
    devices = {tensor.device.type for tensor in _tensors(given) if tensor.ndim} | {
        tensor.device.type for tensor in _tensors(result) if tensor.ndim
    }
    if len(devices) > 1:
        raise CaptureError(f"{operation}: takes tensors of the host, which a graph would have to wait for")


def _signature(step: Step) -> Any:
    """Equal for steps that do the same on the same tensors."""
    leaves, tree = tree_flatten((step.args, step.kwargs))
    told = [("tensor", id(leaf), leaf.shape, leaf.stride()) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return step.operation, step.made, repr(told), str(tree)


def _shown(step: Step) -> str:
    leaves = tree_flatten((step.args, step.kwargs))[0]
    return ", ".join(f"tensor {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else str(leaf) for leaf in leaves)


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]


def _real(part: Any, tensors: list[Any]) -> Any:
    """An argument with tensors in place of their slots."""
    kind = type(part)
    if kind is Slot:
        return tensors[part.number]
    return [_real(one, tensors) for one in part] if kind is list else part


def _with_ends(steps: list[Step]) -> list[Step]:
    """The steps with what each of them used for the last time."""
    last: dict[int, int] = {}
    for place, step in enumerate(steps):
        leaves = tree_flatten((step.args, step.kwargs), is_leaf=lambda leaf: isinstance(leaf, Slot))[0]
        for number in (*step.made, *(leaf.number for leaf in leaves if isinstance(leaf, Slot))):
            last[number] = place
    ends: dict[int, list[int]] = {}
    for number, place in last.items():
        ends.setdefault(place, []).append(number)
    return [step._replace(done=tuple(ends.get(place, ()))) for place, step in enumerate(steps)]
