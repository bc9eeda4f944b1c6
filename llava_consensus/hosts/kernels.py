"""Reading queries and keys when an attention module passes them to its kernel, and in a vision tower (`Recorder`).

Every attention module of transformers 5 asks `ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)` for its kernel in
each forward. While at least one thread records, that method returns a recording kernel. Otherwise the library is
untouched, so torch.compile and decode steps see nothing of this. Towers of SAM and timm ask for none.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial, wraps
from typing import Any, NamedTuple, TypeVar

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import one_hot, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from llava_consensus.errors import OptionError
from llava_consensus.hosts.rows import without_cache

Result = TypeVar("Result")
Block = tuple[str, int]  # name of a list of blocks of a tower, and which of them
_LOCK = threading.Lock()
_SPIES: dict[int, Callable[..., Any]] = {}  # by thread; a forward runs in one
AttentionInterface: Any = getattr(transformers, "AttentionInterface", None)  # transformers 4 has none
_PLAIN: Any = getattr(AttentionInterface, "get_interface", None)
OLD = AttentionInterface is None  # official LLaVA's own pin


class KernelCall(NamedTuple):
    """One call of an attention kernel: queries and keys are rotated, and not scaled."""

    module: nn.Module
    query: Tensor  # [B, H, S, d]
    key: Tensor  # [B, H_kv, S, d]
    value: Tensor  # [B, H_kv, S, d_v]
    mask: Any
    options: dict[str, Any]  # scaling, softcap, cu_seq_lens_q, ...
    output: Tensor | None  # [B, S, H, d_v]

    @property
    def scale(self) -> float:
        scaling = self.options.get("scaling")
        return self.query.shape[-1] ** -0.5 if scaling is None else float(scaling)

    @property
    def places(self) -> int:
        """Last channels of queries and keys that are for their places, see `placed`."""
        return int(self.options.get("places", 0))

    def extra(self, which: Tensor, where: Tensor, width: int) -> dict[str, Any]:
        """Logits that the kernel adds for rows `where` [P, L] of prompts `which` [P, 1], as `TextProbe` has them."""
        found, options = {}, self.options
        bias, sink = options.get("position_bias"), options.get("sinks", options.get("s_aux"))
        if bias is not None:
            found["bias"] = bias.transpose(1, 2)[which, where].transpose(1, 2)[..., :width].detach().float()
        if sink is not None:
            sink = sink.view(1, -1, 1, 1) if sink.ndim == 1 else sink
            sink = sink.expand(*self.query.shape[:3], 1).transpose(1, 2)
            found["sink"] = sink[which, where].transpose(1, 2).detach().float()
        return found


UNLIKE = (
    "the attention of this language model is not that of its queries and keys, or calls no attention function of "
    "transformers: take a method that reads none of it (llava-consensus list)"
)
DIFFERENCES = ("diffllama",)  # types whose attention is a difference of two


def uncompiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """Like `torch.compiler.disable`, applied at the first call in a process that has the compiler. It is not imported
    here, since that takes seconds.
    """
    made: list[Callable[..., Result]] = []

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Result:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not made:
            made.append(torch.compiler.disable(function))
        return made[0](*args, **kwargs)

    return run


def forget_graphs() -> None:
    """Compiled graphs do not notice hooks that come or go later: the next call compiles again."""
    reset = getattr(sys.modules.get("torch._dynamo"), "reset_code_caches", None)
    if reset is not None:
        reset()


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of a module that other threads may run too, which passes by in those."""
    thread = threading.get_ident()

    @wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs) if threading.get_ident() == thread else None

    return run


class EarlyExit(Exception):
    """Ends a forward of which no more is needed."""


def _get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
    kernel, spy = _PLAIN(self, name, default), _SPIES.get(threading.get_ident())
    return kernel if spy is None else partial(spy, kernel)


def start(spy: Callable[..., Any]) -> Callable[..., Any] | None:
    """Route this thread's kernel calls through `spy(kernel, module, q, k, v, mask, *args, **options)`."""
    with _LOCK:
        before = _SPIES.get(threading.get_ident())
        _SPIES[threading.get_ident()] = spy
        AttentionInterface.get_interface = _get_interface
    return before


def stop(before: Callable[..., Any] | None = None) -> None:
    """Back to `before`; with the last recording of all threads the library has its own method again."""
    with _LOCK:
        _SPIES.pop(threading.get_ident(), None)
        if before is not None:
            _SPIES[threading.get_ident()] = before
        if not _SPIES:
            AttentionInterface.get_interface = _PLAIN


@contextmanager
def spying(spy: Callable[..., Any]) -> Iterator[None]:
    """Kernel calls of this thread go through `spy` in the body."""
    before = start(spy)
    try:
        yield
    finally:
        stop(before)


def first_call(run: Callable[[], Any]) -> KernelCall:
    found: list[KernelCall] = []

    def spy(
        kernel: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *_: Any,
        **more: Any,
    ) -> Any:  # fmt: skip
        found.append(KernelCall(module, query.detach(), key.detach(), value.detach(), attention_mask, more, None))
        raise EarlyExit

    with torch.no_grad(), spying(spy), suppress(EarlyExit):
        run()
    if not found:
        raise OptionError(UNLIKE)
    return found[0]


def first_attention(
    decoder: Any, arguments: dict[str, Any], rotated: bool = True, asking: tuple[Tensor, Tensor] | None = None
) -> KernelCall:
    """Queries and keys of the decoder's first attention layer (SCAP): its forward runs as far as the first kernel call.
    Layers in front of it that are no attention (Qwen3.5, LFM2) hand their input on, see `skip_in_probe`.

    Args:
        rotated: False for queries and keys without rotation, which are those of position 0.
        asking: batch indices [R, 1] and columns [R, L] of the rows whose queries are read; None for all.
    """
    if decoder.config.model_type in DIFFERENCES:
        raise OptionError(UNLIKE)
    arguments = {**without_cache(arguments), "use_cache": False}
    if not rotated:
        embeds, positions = arguments["inputs_embeds"], arguments.get("position_ids")
        none = torch.zeros(embeds.shape[:2], dtype=torch.long, device=embeds.device)
        arguments["position_ids"] = none if positions is None else torch.zeros_like(positions)
    _PROBING.on = True
    hooks = [] if asking is None else project_asking(decoder, asking, arguments["inputs_embeds"].shape[1])
    try:
        return first_call(lambda: decoder.forward(**arguments))
    finally:
        _PROBING.on = False
        for hook in hooks:
            hook.remove()


_PROBING = threading.local()


def _leading(decoder: nn.Module) -> int:
    """How many layers are in front of the first one with attention."""
    kinds = getattr(decoder.config, "layer_types", None) or ["full_attention"]
    return next((i for i, kind in enumerate(kinds) if "attention" in kind and "linear" not in kind), 0)


def project_asking(decoder: Any, asking: tuple[Tensor, Tensor], size: int) -> list[Any]:
    """Hooks by which the first attention projects queries of the rows that ask only, and values of the first row only:
    while probing, other queries [R, S, D] are zero, and all values equal. Other projections take all rows.
    """
    layer = next(iter(list(getattr(decoder, "layers", []))[_leading(decoder) :]), None)
    attention = getattr(layer, "self_attn", None)
    query, value = (getattr(attention, name, None) for name in ("q_proj", "v_proj"))

    # copies of the modules have these hooks too
    @in_this_thread
    def shorten(module: Any, args: Any) -> Any:
        if module not in (query, value):
            return None
        return (args[0][asking] if module is query else args[0][:, :1], *args[1:])

    @in_this_thread
    def restore(module: Any, args: Any, output: Tensor) -> Any:
        if module not in (query, value):
            return None
        if module is value:
            return output.expand(-1, size, -1)
        return output.new_zeros(len(output), size, output.shape[2]).index_put_(asking, output)

    parts = [part for part in (query, value) if isinstance(part, nn.Module)]
    before = [part.register_forward_pre_hook(shorten) for part in parts]
    return before + [part.register_forward_hook(restore) for part in parts]


def skip_in_probe(decoder: nn.Module) -> list[Any]:
    """Hooks by which leading layers without attention are passed over while probing: SCAP reads the embeddings."""

    def skip(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not getattr(_PROBING, "on", False):
            return None
        return (args[0], *output[1:]) if isinstance(output, tuple) else args[0]

    leading = list(getattr(decoder, "layers", []))[: _leading(decoder)]
    return [layer.register_forward_hook(skip) for layer in leading]


class Recorder:
    """Hooks of one run in one thread.

    Args:
        blocks: to be recorded.
        resamplers: behind them.
        record: whose calls, states and pooling are filled (`tower.Encoded`).
        cut: whether the autograd graph begins at the attention output of the blocks, if it has not begun before.
        holds: whether calls keep their output.
    """

    def __init__(
        self, blocks: dict[Block, nn.Module], resamplers: list[nn.Module], record: Any, cut: bool, holds: bool
    ) -> None:
        self.blocks, self.resamplers, self.record, self.cut, self.holds = blocks, resamplers, record, cut, holds
        self.place = {module: block for block, own in sorted(blocks.items()) for module in own.modules()}
        self.running: list[Block] = []
        self.written = [module for module in self.place if hasattr(module, "get_decomposed_rel_pos")]  # SAM
        self.fused = any(type(module).__module__.startswith("timm.") for module in self.place)

    @contextmanager
    def recording(self, apart: bool) -> Iterator[None]:
        """Records in the body, with `apart` also attention that asks no kernel of transformers."""
        share, written_out = in_this_thread(self.share), in_this_thread(self.written_out)
        hooks = [module.register_forward_hook(share) for module in self.resamplers]
        for block, own in self.blocks.items():
            if apart and self.fused:
                hooks.append(own.register_forward_pre_hook(in_this_thread(partial(self.begin, block))))
            hooks.append(own.register_forward_hook(in_this_thread(partial(self.end, block))))
        for module in self.written if apart else ():
            hooks.append(module.register_forward_hook(written_out, with_kwargs=True))
        try:
            with spying(self.spy), _Fused(self) if apart and self.fused else nullcontext():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def keep(
        self, block: Block, module: Any, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any], output: Tensor
    ) -> Tensor:
        """Records a call, and returns the output [B, S, ...] that the next module reads."""
        if self.cut and not output.requires_grad:
            output = output.detach().requires_grad_()
            torch.set_grad_enabled(True)  # until the `no_grad` around ends
        query, key = query.detach(), key.detach()
        call = KernelCall(module, query, key, key, mask, options, output if self.holds else None)
        self.record.calls.setdefault(block, []).append(call)
        return output

    def spy(
        self, kernel: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None,
        *args: Any, **options: Any,
    ) -> Any:  # fmt: skip
        output = kernel(module, query, key, value, attention_mask, *args, **options)
        block = self.place.get(module)
        if block is None:
            return output
        return self.keep(block, module, query, key, attention_mask, options, output[0]), *output[1:]

    def written_out(self, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        with torch.no_grad():
            query, key, options = placed(module, next(iter((*args, *kwargs.values()))))
        result = self.keep(self.place[module], module, query, key, None, options, output[0].flatten(1, 2))
        return result.view(output[0].shape), *output[1:]

    def begin(self, block: Block, module: nn.Module, args: Any) -> None:
        self.running.append(block)

    def end(self, block: Block, module: nn.Module, args: Any, output: Any) -> None:
        if self.running:
            self.running.pop()
        states = output[0] if isinstance(output, tuple) else output
        self.record.states.setdefault(block, []).append(states.detach())

    def share(self, module: nn.Module, args: Any, output: Any) -> None:
        if output[1] is not None:
            self.record.pooling.append(output[1].detach())


class _Fused(TorchFunctionMode):
    """Records torch's own kernel."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, recorder = kwargs or {}, self.recorder
        output = func(*args, **options)
        if func is not scaled_dot_product_attention or not recorder.running:
            return output
        mask, scale = options.get("attn_mask"), {"scaling": options.get("scale")}
        block, (query, key) = recorder.running[-1], args[:2]
        output = recorder.keep(block, None, query, key, mask, scale, output.transpose(1, 2))
        return output.transpose(1, 2)


def placed(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Queries and keys [B, H, S, d + h + w] of SAM's attention to states [B, h, w, D], and options of the call.

    A query adds one number to the logits of all keys in a row of patches, and one to those in a column. These numbers
    are its last channels, and a key has ones at its row and column.
    """
    heads, (height, width) = module.num_attention_heads, hidden.shape[1:3]
    query, key, _ = module.qkv(hidden).flatten(1, 2).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    if not module.use_rel_pos:
        return query, key, {"scaling": module.scale}
    grid = query.unflatten(2, (height, width))
    rows = torch.einsum("bnhwc,hkc->bnhwk", grid, module.get_rel_pos(height, height, module.rel_pos_h))
    columns = torch.einsum("bnhwc,wkc->bnhwk", grid, module.get_rel_pos(width, width, module.rel_pos_w))
    added = torch.cat((rows, columns), -1).flatten(2, 3) / module.scale
    place = torch.arange(height * width, device=hidden.device)
    ones = torch.cat((one_hot(place // width, height), one_hot(place % width, width)), -1).to(key.dtype)
    key = torch.cat((key, ones.expand(*key.shape[:2], -1, -1)), -1)
    return torch.cat((query, added), -1), key, {"scaling": module.scale, "places": height + width}
