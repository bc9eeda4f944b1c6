"""transformers 4.37.2, official LLaVA's own pin: its attention asks for no kernel, and its caches are tuples that hold
no book. Queries and keys are computed by the attention module's own projections.
"""

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts.cache import Book
from llava_consensus.hosts.kernels import KernelCall
from llava_consensus.hosts.layers import Layers
from llava_consensus.hosts.units import Unit
from llava_consensus.reduction.decoder import Cut

PROJECTIONS = ("q_proj", "k_proj", "v_proj")  # in the order in which an attention module runs them


def angles_of(decoder: Any, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [R, S, d] of positions [R, S], on any version."""
    if hasattr(decoder, "rotary_emb"):
        cos, sin = decoder.rotary_emb(states, positions)
        return cos, sin
    cos, sin = _table(decoder.layers[0].self_attn, states)
    return cos[positions], sin[positions]


def _call(attention: Any, projected: dict[str, Tensor], positions: Tensor, mask: Any) -> KernelCall:
    """Queries, keys and values [R, H, S, d] of an attention module from the outputs [R, S, H d] of its projections."""
    query, key, value = (
        projected[name].detach().unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for name in PROJECTIONS
    )
    cos, sin = _table(attention, value)
    family = sys.modules[type(attention).__module__]
    query, key = family.apply_rotary_pos_emb(query, key, cos, sin, positions)
    return KernelCall(attention, query, key, value, mask, {}, None)


def _table(attention: Any, states: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions [n, d]."""
    longest = max(attention.config.max_position_embeddings, states.shape[-2])
    cos, sin = attention.rotary_emb(states, seq_len=longest)
    return cos, sin


class PinnedLayers(Layers):
    """The layers of a decoder."""

    def __init__(self, decoder: nn.Module, method: Any) -> None:
        super().__init__(decoder, method)
        if self.kernel not in ("sdpa", "eager"):
            raise OptionError(f"attn_implementation={self.kernel!r}: cutting between layers needs sdpa or eager")
        self.sees_ahead = False
        self.reach = int(self.config.max_position_embeddings)

    @staticmethod
    def mask_functions() -> dict[str, Any]:
        """None: masks are made here."""
        return {}

    def check(self, size: int) -> None:
        """Raises OptionError for a sliding window that is narrower than prompts of so many rows."""
        if self.window and size >= self.window:
            raise OptionError(
                f"sliding_window={self.window} is narrower than this prompt of {size} rows: methods that cut between "
                f"layers need every row to be seen on transformers {transformers.__version__}, or transformers >= 5"
            )

    def cuts_of(self, unit: Unit) -> dict[int, Cut]:
        """Cuts of an image by layer."""
        found = super().cuts_of(unit)
        if 0 in found:
            raise OptionError(
                "a cut before the first decoder layer needs transformers >= 5: generate() of "
                f"{transformers.__version__} takes the length of the prompt from that layer's cache"
            )
        return found

    def mask(self, index: int, hidden: Tensor, two: Tensor | None, cache: Any, ahead: Tensor | None) -> Tensor:
        """Additive mask [R, 1, n, columns] of one layer, by the length of its own cache."""
        rows, new = hidden.shape[:2]
        if two is None:
            held = 0 if cache is None else cache.get_seq_length(index)
            two = torch.ones(rows, held + new, dtype=torch.bool, device=hidden.device)
        seen = self.dense(index, two, new)
        return torch.zeros_like(seen, dtype=hidden.dtype).masked_fill(~seen, torch.finfo(hidden.dtype).min)

    def angles(self, decoder: Any, index: int, hidden: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, W, d] of a layer's arguments."""
        attention = decoder.layers[index].self_attn
        cos, sin = _table(attention, hidden)
        return cos[arguments["position_ids"]], sin[arguments["position_ids"]]

    def read(self, layer: Any, spy: Callable[..., Any]) -> Any:
        """Shows a layer's queries, keys and values to `spy` when it runs; `stop` ends it."""
        attention, thread = layer.self_attn, threading.get_ident()
        seen: dict[str, Any] = {}

        def begin(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if threading.get_ident() == thread and module is attention:
                seen.clear()
                seen.update(kwargs)

        def take(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
            if not seen or threading.get_ident() != thread or module is not getattr(attention, name):
                return
            seen[name] = output
            if name == PROJECTIONS[-1]:
                with torch.no_grad():
                    call = _call(attention, seen, seen["position_ids"], seen["attention_mask"])
                spy(lambda *_, **more: None, attention, call.query, call.key, call.value, call.mask)

        hooks = [getattr(attention, name).register_forward_hook(partial(take, name)) for name in PROJECTIONS]
        return [attention.register_forward_pre_hook(begin, with_kwargs=True), *hooks]

    def stop(self, reading: Any) -> None:
        """Ends `read`."""
        for hook in reading:
            hook.remove()

    def own_call(self, layer: Any, hidden: Tensor, arguments: dict[str, Any]) -> KernelCall:
        """Queries, keys and values that a layer would have for these states and arguments."""
        with torch.no_grad():
            normed = layer.input_layernorm(hidden)
            projected = {name: getattr(layer.self_attn, name)(normed) for name in PROJECTIONS}
            return _call(layer.self_attn, projected, arguments["position_ids"], arguments["attention_mask"])

    def widen(self, decoder: Any) -> list[Any]:
        """Hooks on the tables of positions, which would be as long as a layer's own cache: too short for positions that
        are kept.
        """

        def reach(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, {**kwargs, "seq_len": max(kwargs["seq_len"], self.reach)}

        tables = [layer.self_attn.rotary_emb for layer in decoder.layers]
        return [table.register_forward_pre_hook(reach, with_kwargs=True) for table in tables]


class Held:
    """A cache of tuples (key, value) for each layer, with the book of the prompt it began with."""

    def __init__(self, layers: Any, book: Book | None) -> None:
        self.layers, self.reduction_book = layers, book

    def get_seq_length(self, index: int = 0) -> int:
        """Rows that a layer holds."""
        return int(self.layers[index][0].shape[-2])

    @property
    def fits(self) -> bool:
        """Whether its lengths are those of the book, and of rows that came after."""
        book = self.reduction_book
        if book is None or len(self.layers[0][0]) % len(book.real):
            return False
        sizes = [
            (book.layers[number].index if number in book.layers else book.real).shape[1]
            for number in range(len(self.layers))
        ]
        more = {self.get_seq_length(number) - size for number, size in enumerate(sizes)}
        return len(more) == 1 and min(more) >= 0
