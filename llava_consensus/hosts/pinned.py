"""transformers 4.37.2, official LLaVA's own pin: its attention asks for no kernel, so that queries and keys are read
where the module's own projections return them, and its caches are tuples.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts.kernels import OLD, KernelCall, in_this_thread
from llava_consensus.hosts.layers import Layers
from llava_consensus.hosts.rows import Book
from llava_consensus.hosts.taps import split_heads
from llava_consensus.hosts.units import Unit
from llava_consensus.reduction.decoder import Cut
from llava_consensus.reduction.saliency import rotate


def layers_of(decoder: Any, method: Any) -> Layers:
    return PinnedLayers(decoder, method) if OLD else Layers(decoder, method)


def angles_of(decoder: Any, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [R, S, d] of positions [R, S], on any version."""
    if hasattr(decoder, "rotary_emb"):
        cos, sin = decoder.rotary_emb(states, positions)
        return cos, sin
    return _angles(decoder.layers[0].self_attn, states, positions)


def _angles(attention: Any, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    longest = max(attention.config.max_position_embeddings, states.shape[-2])
    cos, sin = attention.rotary_emb(states, seq_len=longest)
    return cos[positions], sin[positions]


def _projections(attention: Any) -> list[nn.Module]:
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def _call(attention: Any, projected: list[Tensor], angles: tuple[Tensor, Tensor], mask: Any) -> KernelCall:
    """Queries, keys and values [R, H, S, d] from the outputs [R, S, H d] of the projections."""
    query, key, value = (split_heads(states.detach(), width=attention.head_dim) for states in projected)
    return KernelCall(attention, rotate(query, *angles), rotate(key, *angles), value, mask, {}, None)


class PinnedLayers(Layers):
    def __init__(self, decoder: nn.Module, method: Any) -> None:
        super().__init__(decoder, method)
        if self.kernel not in ("sdpa", "eager"):
            raise OptionError(f"attn_implementation={self.kernel!r}: cutting between layers needs sdpa or eager")
        self.sees_ahead = False
        self.reach = int(self.config.max_position_embeddings)

    @staticmethod
    def mask_functions() -> dict[str, Any]:
        return {}

    def check(self, size: int) -> None:
        if self.window and size >= self.window:
            raise OptionError(
                f"sliding_window={self.window} is narrower than this prompt of {size} rows: methods that cut between "
                f"layers need every row to be seen on transformers {transformers.__version__}, or transformers >= 5"
            )

    def cuts_of(self, unit: Unit) -> dict[int, Cut]:
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
        return angles_of(decoder, hidden, arguments["position_ids"])

    def read(self, layer: Any, spy: Callable[..., Any]) -> Any:
        attention, projected = layer.self_attn, list[Tensor]()
        parts = _projections(attention)

        # copies of the modules have these hooks too
        @in_this_thread
        def note(module: nn.Module, args: Any, output: Tensor) -> None:
            if module in parts:
                projected.append(output)

        @in_this_thread
        def show(module: nn.Module, args: Any, given: dict[str, Any], output: Any) -> None:
            if module is attention:
                angles = _angles(attention, projected[0], given["position_ids"])
                call = _call(attention, projected, angles, given["attention_mask"])
                spy(lambda *_, **more: None, attention, call.query, call.key, call.value, call.mask)

        hooks = [part.register_forward_hook(note) for part in parts]
        return [attention.register_forward_hook(show, with_kwargs=True), *hooks]

    def stop(self, reading: Any) -> None:
        for hook in reading:
            hook.remove()

    def own_call(self, layer: Any, hidden: Tensor, arguments: dict[str, Any]) -> KernelCall:
        with torch.no_grad():
            normed = layer.input_layernorm(hidden)
            projected = [part(normed) for part in _projections(layer.self_attn)]
        angles = _angles(layer.self_attn, hidden, arguments["position_ids"])
        return _call(layer.self_attn, projected, angles, arguments["attention_mask"])

    def widen(self, decoder: Any) -> list[Any]:
        """Hooks on the tables of angles, which would be as long as a layer's own cache, and so too short for positions
        that are kept. The first layer is never cut, and asks for all of them.
        """

        def reach(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            self.reach = max(self.reach, kwargs["seq_len"])
            return args, {**kwargs, "seq_len": self.reach}

        tables = [layer.self_attn.rotary_emb for layer in decoder.layers]
        return [table.register_forward_pre_hook(reach, with_kwargs=True) for table in tables]


class Held:
    """A cache of tuples (key, value) for each layer. It has the book of the last prompt if its lengths are those of the
    book and of rows that came after.
    """

    def __init__(self, layers: Any, book: Book | None) -> None:
        self.layers, self.reduction_book = layers, None
        if book is None or len(layers[0][0]) % len(book.real):
            return
        sizes = [book.layers[n].index.shape[1] if n in book.layers else book.size for n in range(len(layers))]
        more = {self.get_seq_length(number) - size for number, size in enumerate(sizes)}
        if len(more) == 1 and min(more) >= 0:
            self.reduction_book = book

    def get_seq_length(self, index: int = 0) -> int:
        return int(self.layers[index][0].shape[-2])
