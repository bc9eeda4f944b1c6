"""Records what the blocks of a vision tower do while it runs: queries and keys of their attention, and their outputs.

transformers   the kernel that an attention module asks for (`kernels.py`)
SAM            modules that write their attention out, with logits for the places of two patches
timm           torch's `scaled_dot_product_attention`
resamplers     torch's `MultiheadAttention`, whose weights say how much a query looks at each position
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from llava_consensus.hosts.kernels import KernelCall, spying

Block = tuple[str, int]  # name of a list of blocks, and which of them
WRITTEN_OUT = "get_decomposed_rel_pos"  # function of SAM's attention modules


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
        self.thread, self.running = threading.get_ident(), list[Block]()
        self.written = [module for module in self.place if hasattr(module, WRITTEN_OUT)]
        self.fused = any(type(module).__module__.startswith("timm.") for module in self.place)

    @contextmanager
    def recording(self, apart: bool) -> Iterator[None]:
        """Records in the body, with `apart` also attention that asks no kernel of transformers."""
        hooks = [module.register_forward_hook(self.share) for module in self.resamplers]
        for block, own in self.blocks.items():
            hooks.append(own.register_forward_pre_hook(partial(self.begin, block)))
            hooks.append(own.register_forward_hook(partial(self.end, block)))
        for module in self.written if apart else ():
            hooks.append(module.register_forward_hook(self.written_out, with_kwargs=True))
        try:
            with spying(self.spy), _Fused(self) if apart and self.fused else nullcontext():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def keep(
        self, block: Block, module: Any, query: Tensor, key: Tensor, mask: Any, options: dict[str, Any], output: Tensor
    ) -> Tensor:
        """Records a call; its output [B, S, ...] as it goes on."""
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
        if threading.get_ident() != self.thread:
            return None
        with torch.no_grad():
            query, key, options = placed(module, next(iter((*args, *kwargs.values()))))
        result = self.keep(self.place[module], module, query, key, None, options, output[0].flatten(1, 2))
        return result.view(output[0].shape), *output[1:]

    def begin(self, block: Block, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self.thread:
            self.running.append(block)

    def end(self, block: Block, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self.thread:
            self.running.pop()
            states = output[0] if isinstance(output, tuple) else output
            self.record.states.setdefault(block, []).append(states.detach())

    def share(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self.thread and output[1] is not None:
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
