"""Queries and keys of one attention module, read where the module hands them to its attention kernel.

Every attention module of transformers 5 looks its kernel up at each forward, by the name in its own configuration. A
tap gives one module instance a configuration whose name leads to `_tapped`, which records the call where this thread
records, and then runs the kernel the module had. What is recorded has norms, rotation and compression (MLA) behind it,
so no code knows how a family makes its queries. Other modules, and other models of the same class, keep their kernel.
"""

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from llava_consensus.hosts.base import Heads, Overlay
from llava_consensus.hosts.call import Shadow

# Transformers 4.37 has none; its models are not attached, but `list --hosts` reads this file there.
AttentionInterface: Any = getattr(transformers, "AttentionInterface", None)
NAME = "_attn_implementation_internal"  # attribute of a configuration behind its `_attn_implementation`
OWN = "_llava_consensus_own"  # attribute of a tapped configuration: the one it stands for
OBSERVE = "_llava_consensus_observe"  # another one: a function that is given each kernel call


class KernelName(str):
    """The name of an attention kernel: equal to it for every comparison, another key for a dictionary.

    Models compare the name: nine families of 5.23 apply their sparse mask only under "sdpa" or "eager", and 47 files
    search it for "flash". Under a name of its own a tap silently changes their logits. The other seams are worse:
    replacing the kernel in the registry reaches every model of the process, a mode on torch's own SDPA misses flash
    kernels, swapping the configuration for the length of a call breaks with a second thread, and a `forward` with
    other globals breaks where accelerate or PEFT have wrapped it.
    """

    def __hash__(self) -> int:
        return ~super().__hash__()  # asked for several times in every layer and step


class KernelCall(NamedTuple):
    """Arguments and output of one kernel call of an attention module: rotated, before the scale."""

    module: nn.Module
    query: Tensor  # [B, H, S, d]
    key: Tensor  # [B, H_kv, S, d]
    value: Tensor  # [B, H_kv, S, d_v]
    mask: Any  # [B or 1, 1, S, S] bool or additive; [B, S] of flash kernels; None
    options: dict[str, Any]  # scaling, softcap, s_aux, cu_seq_lens_q, ...
    output: Tensor | None  # [B, S, H, d_v]; None where the forward was left before the kernel

    @property
    def scale(self) -> float:
        """The factor of the products of queries and keys."""
        scaling = self.options.get("scaling")
        return self.query.shape[-1] ** -0.5 if scaling is None else float(scaling)

    @property
    def cap(self) -> float:
        """The bound of their logits, tanh(x / cap) * cap; 0 for none."""
        return float(self.options.get("softcap") or 0.0)


class Left(Exception):
    """Raised before the kernel to leave a forward of which no more is needed."""


class _Recording(NamedTuple):
    modules: frozenset[int]  # ids
    leaves: bool  # whether the first recorded call ends the forward
    cuts_graph: bool  # whether outputs become leaves of the autograd graph
    shapes: bool  # whether tensors are recorded without their numbers
    calls: list[KernelCall]


_RECORDING: ContextVar[_Recording | None] = ContextVar("llava_consensus_recording", default=None)


def modules_of(model: nn.Module, without: Iterable[nn.Module] = ()) -> Iterator[nn.Module]:
    """A module and all below it, in the order of `modules()`, which hands each up through all that are above it.

    Args:
        without: modules that are left out, with all below them.
    """
    seen, following = set(map(id, without)), [model]
    while following:
        module = following.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            following += [child for child in reversed(module._modules.values()) if child is not None]


def attention_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that may look up a kernel, in order."""
    return filter(attends, modules_of(model))


def attends(module: nn.Module) -> bool:
    """Whether a module may look up a kernel."""
    return (
        "Attention" in type(module).__name__
        and not isinstance(module, transformers.PreTrainedModel)
        and hasattr(getattr(module, "config", None), NAME)
    )


def install(modules: Iterable[nn.Module], observe: Callable[[KernelCall], None] | None = None) -> list[Shadow]:
    """Taps on these modules; `restore` of the shadows takes them off. Modules that are tapped already are left out.

    Args:
        observe: is given each kernel call that runs.
    """
    shadows = []
    for module in modules:
        own: Any = module.config
        told = vars(own)
        if OWN in told:
            told[OBSERVE] = observe or told[OBSERVE]
            continue
        config: Any = object.__new__(_tapped_class(own.__class__))
        # In the instance and not in a closure, so that a deep copy of the model reads its own configuration.
        vars(config).update({**told, OWN: own, OBSERVE: observe})
        shadows.append(Shadow(module, "config", config))
    return shadows


@functools.cache  # transformers makes a dataclass of each, which takes a millisecond
def _tapped_class(kind: type) -> type:
    return type("Tapped" + kind.__name__, (kind,), {NAME: property(_kernel_name, _ignore)})


@contextmanager
def untapped(modules: Collection[nn.Module]) -> Iterator[None]:
    """The modules have their own configurations while the body runs."""
    tapped: dict[nn.Module, Any] = {one: one.config for one in modules if OWN in vars(one.config)}
    for module, config in tapped.items():
        object.__setattr__(module, "config", vars(config)[OWN])
    try:
        yield
    finally:
        for module, config in tapped.items():
            object.__setattr__(module, "config", config)


def _kernel_name(config: Any) -> Any:
    name = getattr(vars(config)[OWN], NAME)  # at each call, so that `set_attn_implementation` keeps working
    if name is None:
        return None
    tapped = KernelName(name)
    if tapped not in AttentionInterface._global_mapping:
        AttentionInterface.register(tapped, _tapped)
    return tapped


def _ignore(config: Any, value: Any) -> None:
    """A copy of a configuration sets its name; it is the own configuration's here."""


@contextmanager
def recording(
    modules: Collection[nn.Module], leaves: bool = False, cuts_graph: bool = False, shapes: bool = False
) -> Iterator[list[KernelCall]]:
    """Records the kernel calls of tapped modules in this thread (and asynchronous task) while the body runs.

    Args:
        modules: whose calls are recorded.
        leaves: whether the first of them raises `Left`.
        cuts_graph: whether each output becomes a leaf of the autograd graph, which begins there: what stands in front
            ran without gradients, and nothing of it is kept.
        shapes: whether queries, keys and values are recorded on the meta device, without numbers: those of a whole
            tower can take more memory than its weights.
    """
    calls: list[KernelCall] = []
    with setting(_RECORDING, _Recording(frozenset(map(id, modules)), leaves, cuts_graph, shapes, calls)):
        yield calls


@contextmanager
def setting(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """A context variable has this value while the body runs."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _tapped(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **options: Any
) -> Any:
    """The attention function behind a tapped name."""
    config = vars(module.config)
    own, observe = config[OWN], config[OBSERVE]
    active = _RECORDING.get()
    if active is not None and id(module) not in active.modules:
        active = None
    if active is not None and active.leaves:
        active.calls.append(KernelCall(module, query, key, value, attention_mask, options, None))
        raise Left
    kernel = kernel_of(module, own)
    # with the configuration it had: flash kernels read `module.config` themselves
    output = kernel(Overlay(module, config=own), query, key, value, attention_mask, *args, **options)
    if observe is not None:
        observe(KernelCall(module, query, key, value, attention_mask, options, None))
    if active is not None and active.shapes:
        query, key, value = (one.to("meta") for one in (query, key, value))
        active.calls.append(KernelCall(module, query, key, value, None, {}, None))
    elif active is not None:
        result = output[0]
        if active.cuts_graph:
            result = result.detach().requires_grad_()
            torch.set_grad_enabled(True)  # until the `no_grad` around the recording ends
        output = (result, *output[1:])
        active.calls.append(KernelCall(module, query, key, value, attention_mask, options, result))
    return output


def kernel_of(module: Any, config: Any) -> Any:
    """The attention kernel that a module of this configuration looks up."""
    library, eager = _library(module.__class__)
    return library.ALL_ATTENTION_FUNCTIONS.get_interface(str(getattr(config, NAME)), getattr(library, eager, None))


def heads_of(call: KernelCall, row: Tensor, columns: Tensor) -> Heads:
    """Queries of the rows `columns` [P, L] of the sequences `row` [P], and all keys, of a kernel call. Both are
    rotated: the angles turn nothing.
    """
    query = call.query.detach().transpose(1, 2)[row[:, None], columns].transpose(1, 2)
    key = call.key.detach()
    still = key.new_ones(len(key), key.shape[2], key.shape[3])
    return Heads(query, key, still, torch.zeros_like(still), call.scale, call.cap)


def attended(
    query: Tensor, key: Tensor, value: Tensor, scale: float, cap: float = 0.0, seen: Tensor | None = None
) -> Tensor:
    """Softmax of queries [..., H, n, d] and keys [..., H_kv, m, d], times values, in float32 at least; `seen`
    [..., n, m] is true where a query sees a key.
    """
    groups = query.shape[-3] // key.shape[-3]
    wide = torch.promote_types(query.dtype, torch.float32)
    key, value = (one.repeat_interleave(groups, -3).to(wide) for one in (key, value))
    logits = query.to(wide) @ key.transpose(-1, -2) * scale
    if cap:
        logits = torch.tanh(logits / cap) * cap
    if seen is not None:
        logits = logits.masked_fill(~seen, float("-inf"))
    return logits.softmax(-1) @ value


@functools.cache  # every layer and step asks for it
def _library(kind: type) -> tuple[Any, str]:
    """The file of an attention module's class that looks kernels up, and the name of its own eager attention, which has
    no entry in the registry: that of a vision tower where it has two, empty where it has none.
    """
    files = (sys.modules[one.__module__] for one in kind.__mro__)
    library = next(file for file in files if hasattr(file, "ALL_ATTENTION_FUNCTIONS"))
    names = [name for name in vars(library) if name.endswith("eager_attention_forward")]
    vision = [name for name in names if name.startswith("vision") and "Vision" in kind.__name__]
    return library, next(iter(vision or names), "")
