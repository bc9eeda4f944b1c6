"""Attention weights as a model computes them, read off its own softmax while it runs. Nothing of a host is used for it:
it is what a host is held against.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

KERNEL, SOFTMAX = "scaled_dot_product_attention", "softmax"  # names of torch's functions


class Watch(TorchFunctionMode):
    """Keeps square attention weights, of as many queries as keys, that are computed inside a module.

    Args:
        module: a block of a tower or a layer of a language model.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.weights: list[Tensor] = []  # [..., n, n] each, float32
        self._inside = 0
        self._module = module

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if self._inside and name == KERNEL:
            self._keep(attention_weights(*args, **kwargs))
        output = function(*args, **kwargs)
        if self._inside and name == SOFTMAX:
            self._keep(output)
        return output

    def _keep(self, weights: Tensor) -> None:
        if weights.ndim > 2 and weights.shape[-1] == weights.shape[-2] > 1:
            self.weights.append(weights.detach().float())

    def _enter(self, *args: Any) -> None:
        self._inside += 1

    def _leave(self, *args: Any) -> None:
        self._inside -= 1


@contextmanager
def watching(module: nn.Module) -> Iterator[Watch]:
    """The weights that a module computes while the body runs."""
    watch = Watch(module)
    handles = [
        module.register_forward_pre_hook(watch._enter),
        module.register_forward_hook(watch._leave, always_call=True),
    ]
    try:
        with watch:
            yield watch
    finally:
        for handle in handles:
            handle.remove()


def attention_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The weights of torch's attention, given its arguments: [..., L, S] in float32."""
    if key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = query.float() @ key.float().transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        logits = logits.masked_fill(~torch.ones_like(logits, dtype=torch.bool).tril(), float("-inf"))
    if attn_mask is not None:
        hidden = attn_mask.dtype == torch.bool
        logits = logits.masked_fill(~attn_mask, float("-inf")) if hidden else logits + attn_mask.float()
    return logits.softmax(-1)
