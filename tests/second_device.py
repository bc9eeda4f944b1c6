"""A second device for machines without one: its tensors lie in ordinary memory, and mixing them with those of the CPU
raises, as on a GPU.

    with Standin() as device:
        onto(model)                                     # parameters and buffers
        model.generate(**there(inputs))
    device.waits, device.copies                         # reads of numbers from the device, and copies to it

It behaves as CUDA does where that differs from the CPU: indices of the CPU into a tensor of the device are a copy, and
`.item()`, `.tolist()`, `.cpu()`, `nonzero` and masks as indices wait. Tensors without dimensions of the CPU may go with
any. Nothing is said of speed, streams or kernels. Torch keeps such a device for the rest of a process, so whatever uses
it goes into a process of its own (`apart`).
"""

import multiprocessing
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("privateuseone", 0)
aten = torch.ops.aten
READS = {  # whose result, or the size of it, is a number of the device
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
    aten.unique_consecutive.default,
    aten._unique2.default,
}
INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
NUMBERS = {aten._local_scalar_dense.default, aten.equal.default}  # which return no tensor


def apart(work: Callable[..., Any], *given: Any) -> Any:
    """Return what `work` returns in a forked process; the test fails with its traceback where it raises."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(theirs, work, given))
    process.start()
    theirs.close()
    try:
        result, error = mine.recv()
    except EOFError:
        result, error = None, "the process died"
    process.join()
    if error:
        pytest.fail(error)
    return result


def _tell(pipe: Any, work: Callable[..., Any], given: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    _register()  # before anything computes a gradient
    try:
        pipe.send((work(*given), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))


class OnDevice(Tensor):
    """A tensor of the device; `raw` has its numbers."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> "OnDevice":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=DEVICE
        )
        made.raw = raw
        return made

    def __init__(self, raw: Tensor) -> None:
        pass

    def __repr__(self, **options: Any) -> str:
        return f"OnDevice({self.raw})"

    def __iter__(self) -> Any:
        return iter(self.unbind(0))

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **options: Any) -> Any:
        raise TypeError("can't convert a tensor of the device to numpy: copy it to the CPU first")

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(Counter(), function, args, kwargs or {})


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, OnDevice) else value


def back(values: Any) -> Any:
    """The same values with their tensors on the CPU."""
    return tree_map(_raw, values)


def there(values: Any) -> Any:
    """The same values with copies of their tensors on the device."""
    return tree_map(lambda value: OnDevice(value.clone()) if isinstance(value, Tensor) else value, values)


def onto(module: nn.Module) -> Any:
    """The module, its parameters and buffers moved to the device."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                moved = OnDevice(parameter.detach())
                part._parameters[name] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = OnDevice(buffer)
    return module


def _run(counts: Counter[str], function: Any, args: Any, kwargs: Any) -> Any:
    """An operation on tensors of the device, of the CPU, or both where a device allows it."""
    leaves = tree_leaves((args, kwargs))
    tensors = [value for value in leaves if isinstance(value, Tensor)]
    on = [value for value in tensors if isinstance(value, OnDevice)]
    off = [value for value in tensors if not isinstance(value, OnDevice) and value.dim() > 0]
    named = next((value for value in leaves if isinstance(value, torch.device)), None)
    moves = function in (aten._to_copy.default, aten.copy_.default)
    if on and off and not moves and function not in INDEXING:
        shapes = [[tuple(value.shape) for value in side] for side in (on, off)]
        raise RuntimeError(f"{function}: tensors of the device {shapes[0]} with those of the CPU {shapes[1]}")
    to = _goes(function, args, on, named)
    _count(counts, function, args, bool(on), to)
    raw_args, raw_kwargs = tree_map(
        lambda value: torch.device("cpu") if isinstance(value, torch.device) else _raw(value), (args, dict(kwargs))
    )
    if raw_kwargs.get("pin_memory"):
        raw_kwargs["pin_memory"] = False
    with _disable_current_modes():
        result = function(*raw_args, **raw_kwargs)
    if function in NUMBERS:
        return result
    name = function._schema.name
    if name.endswith("_") and not name.endswith("__") and args and isinstance(args[0], Tensor):
        return args[0]
    if kwargs.get("out") is not None:
        return kwargs["out"]
    if not to:
        return result
    known = {id(value.raw): value for value in on}
    return tree_map(lambda value: known.get(id(value), OnDevice(value)) if isinstance(value, Tensor) else value, result)


def _goes(function: Any, args: Any, on: list[Tensor], named: torch.device | None) -> bool:
    """Whether the result of an operation is on the device."""
    if function is aten.copy_.default or function in INDEXING:
        if not isinstance(args[0], OnDevice) and function in INDEXING and on:
            raise RuntimeError(f"{function}: indices of the device into a tensor of the CPU")
        return isinstance(args[0], OnDevice)
    return bool(on) if named is None else named.type == DEVICE.type


def _count(counts: Counter[str], function: Any, args: Any, on: bool, to: bool) -> None:
    """Counts what waits for the device, and what is copied to it."""
    if function in READS:
        counts["waits"] += on
    elif function is aten._to_copy.default:
        counts["waits"] += on and not to
        counts["copies"] += to and not on
    elif function is aten.copy_.default:
        source = isinstance(args[1], OnDevice)
        counts["waits"] += source and not to
        counts["copies"] += to and not source
    elif function in INDEXING and to:
        indices = [index for index in args[1] if index is not None]
        counts["waits"] += any(index.dtype == torch.bool for index in indices)
        counts["copies"] += any(not isinstance(index, OnDevice) for index in indices)


class _Backend:
    """What torch asks a device's module for."""

    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = manual_seed = staticmethod(lambda seed: None)
    synchronize = empty_cache = set_rng_state = staticmethod(lambda *args: None)
    get_rng_state = staticmethod(lambda *args: torch.get_rng_state())
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])


def _register() -> None:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("standin", _Backend)


class Standin(TorchDispatchMode):
    """The device is there while the body of a `with` runs, and counts what happens to it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @property
    def waits(self) -> int:
        """How often a number was read from the device."""
        return self.counts["waits"]

    @property
    def copies(self) -> int:
        """How often something was copied to the device."""
        return self.counts["copies"]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(self.counts, function, args, kwargs or {})

    def __enter__(self) -> "Standin":
        self._patches = pytest.MonkeyPatch()
        for owner, name, value in _factories():
            self._patches.setattr(owner, name, value)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patches.undo()
        super().__exit__(*error)


def _factories() -> list[tuple[Any, str, Any]]:
    """Functions of torch that make tensors past its dispatcher, as they are while the device is there; and inference
    mode, which has no place for tensors that wrap others, as `no_grad`.
    """
    tensor = torch.tensor

    def made(data: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Tensor:
        to_device = device is not None and torch.device(device).type == DEVICE.type
        if isinstance(data, Tensor):
            return data.to(device=device or data.device, dtype=dtype or data.dtype)
        if isinstance(data, list | tuple):
            data = tree_map(lambda value: value.tolist() if isinstance(value, OnDevice) else value, list(data))
        result = tensor(data, dtype=dtype, device=None if to_device else device, **options)
        return result.to(DEVICE) if to_device else result

    def like(self: Tensor, data: Any, *, dtype: Any = None, device: Any = None, **options: Any) -> Tensor:
        return made(data, dtype=dtype or self.dtype, device=device or self.device, **options)

    def enter(self: Any) -> None:
        self._instead = torch.no_grad()
        self._instead.__enter__()

    def leave(self: Any, *error: Any) -> None:
        self._instead.__exit__(*error)

    return [
        (torch, "tensor", made),
        (torch, "as_tensor", lambda data, dtype=None, device=None: made(data, dtype=dtype, device=device)),
        (Tensor, "new_tensor", like),
        (torch.inference_mode, "__enter__", enter),
        (torch.inference_mode, "__exit__", leave),
    ]
