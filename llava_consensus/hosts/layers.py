"""Drop visual tokens between decoder layers with hooks that are armed only in the forward passes that need them.

    pre-hook of a layer    at a cut the method chooses; from the first cut on, the rows that are left are gathered in
                           the states and in every argument with a row axis, and the layer gets a separate mask
    post-hook of a layer   puts the layer's output back into the states at their full length

Because each layer puts its rows back, everything between layers keeps the shapes it knows: DeepStack additions, the
final norm, `output_hidden_states`, logits, labels. A dropped row keeps the state it had. The KV cache of later layers
is shorter. Letters: R rows of the batch, S length of the prompt, W rows that a layer sees, P images that are cut
together, v their visual tokens, n the ones they began with.
"""

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts import kernels
from llava_consensus.hosts.images import Integers
from llava_consensus.hosts.prompts import Prompt
from llava_consensus.hosts.rows import Book, Rows, cache_in, given_rows, is_static, upload, without_cache
from llava_consensus.hosts.units import Unit
from llava_consensus.reduction.calibration import seen_logits
from llava_consensus.reduction.decoder import Chosen, Cut, only_cut

ALONE = ("moe", "mlp")  # layer types in which rows do not see each other
RECURRENT = ("linear_attention", "conv", "mamba", *ALONE)  # layer types without an attention kernel


class Layers:
    """The layers of a decoder, as far as its configuration says."""

    def __init__(self, decoder: nn.Module, method: Any) -> None:
        self.masks, self.method = self.mask_functions(), method
        layers: Any = getattr(decoder, "layers", None)
        if layers is None:
            raise OptionError(
                f"{type(decoder).__name__}: its layers have no name that is known, and none can be cut before"
            )
        self.config: Any = decoder.config
        self.count = len(layers)
        if getattr(method, "layer", None) is not None:
            only_cut(method.layer, 0, self.count)
        kinds = getattr(self.config, "layer_types", None)
        plain = "sliding_attention" if getattr(self.config, "sliding_window", None) else "full_attention"
        self.kinds = [self.attention_kind(kind) for kind in list(kinds or [plain] * self.count)[: self.count]]
        self.readable = [kind not in RECURRENT for kind in self.kinds]
        self.chunk = getattr(self.config, "attention_chunk_size", None)
        self.window = min(
            (size for size in (getattr(self.config, "sliding_window", None), self.chunk) if size), default=None
        )
        shares = [any(getattr(part, "is_kv_shared_layer", False) for part in layer.modules()) for layer in layers]
        # the layer whose keys a layer reads, if they are not its own (Gemma 3n, 4)
        self.sources = [
            max(i for i in range(index) if self.kinds[i] == self.kinds[index] and not shares[i])
            if shares[index]
            else index
            for index in range(self.count)
        ]
        self.owns_keys = all(source == layer for layer, source in enumerate(self.sources))
        self.names = [list(inspect.signature(type(layer).forward).parameters)[1:] for layer in layers]
        rotary = getattr(decoder, "rotary_emb", None)
        self.sees_ahead: bool | None = None  # whether rows attend to later ones (images of Gemma 3)
        self.masks_all: bool | None = None  # whether layers have a mask in steps of one row without padding
        self.rotates_by_kind = rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters

    @staticmethod
    def mask_functions() -> Any:
        """The functions of transformers that make masks, by type of layer."""
        from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING

        return LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING

    def attention_kind(self, kind: str) -> str:
        """The type of a layer, as far as its attention's mask goes: of one that also is recurrent, that of the former.

        Raises:
            OptionError: for a type whose mask is not known.
        """
        found = self.masks.get(kind)
        if isinstance(found, dict):
            return next(name for name in found if name not in RECURRENT)
        if self.masks and found is None and kind not in RECURRENT:  # 4.37 has none
            raise OptionError(
                f"{type(self.method).__name__}: it is not known how layers of type {kind} mask their rows, and none "
                "can be cut before. Take a method that acts before the language model"
            )
        return kind

    def check(self, size: int) -> None:
        if self.chunk and size > self.chunk:
            raise OptionError(
                f"attention_chunk_size={self.chunk} is less than this prompt of {size} rows, whose chunks a cut "
                "between layers would move. Take a method that acts before the language model"
            )

    @property
    def kernel(self) -> str:
        return str(self.config._attn_implementation)

    def renumbers(self, axes: int, index: int = 0) -> bool:
        """Whether positions close up. Several axes, and layers that share keys of earlier ones, keep theirs."""
        return self.owns_keys and self.method.closes_gaps(index) and axes == 1

    def readable_layer(self, cut: int) -> int:
        """The next layer the method can be cut before: in hybrid models not every layer has an attention kernel, and
        one before the cut must keep the length of the prompt.
        """
        read = {"own": 0, "none": None}.get(self.method.attention, 1)
        last = max(index for index, kind in enumerate(self.kinds) if kind not in ALONE)
        for index in range(cut, last + 1):
            if (all(self.readable) and index >= (read or 0)) or (
                self.readable[index - (read or 0)] and any(self.readable[:index])
            ):
                return index
        raise OptionError(f"{type(self.method).__name__}: no layer with attention to cut before, from layer {cut} on")

    def cuts_of(self, unit: Unit) -> dict[int, Cut]:
        found = {}
        for cut in self.method.cuts(unit.budget, len(unit.places), self.count):
            layer = self.readable_layer(cut.layer)
            # behind, layers read the keys of earlier ones, and no cut shortens them
            if self.sources[layer] == layer:
                found[layer] = cut._replace(layer=layer)
        return found

    def mask(self, index: int, hidden: Tensor, two: Tensor | None, cache: Any, ahead: Tensor | None) -> Any:
        """Attention mask of one layer, in the format of its kernel, by the length of its cache.

        Args:
            two: [R, columns] False for padding, or None.
            ahead: [R, W, W] pairs of rows that see each other (images of Gemma 3), or None.
        """
        source, extra = self.sources[index], dict[str, Any]()
        states = hidden if hidden.ndim == 3 else hidden[0]  # Gemma 3n has several streams
        if ahead is not None:
            columns = ahead.shape[1] if cache is None else cache.get_mask_sizes(ahead.shape[1], source)[0]
            pairs = nn.functional.pad(ahead, (0, columns - ahead.shape[1]))  # columns of a static cache still empty
            extra["or_mask_function"] = lambda b, h, q, k: pairs[b, q, k]
        if self.readable[index]:
            extra["layer_idx"] = source
        return self.masks[self.kinds[index]](self.config, states, two, cache, **extra)

    def angles(self, decoder: Any, index: int, hidden: Tensor, arguments: dict[str, Any]) -> Any:
        return arguments.get("position_embeddings")

    def read(self, layer: nn.Module, spy: Callable[..., Any]) -> Any:
        """Shows a layer's queries, keys and values to `spy` when it runs; `stop` ends it."""
        return (kernels.start(spy),)

    def stop(self, reading: Any) -> None:
        kernels.stop(*reading)

    def own_call(self, layer: Any, hidden: Tensor, arguments: dict[str, Any]) -> kernels.KernelCall:
        """Queries, keys and values that a layer would have for these states and arguments."""
        return kernels.first_call(lambda: layer.forward(hidden, **without_cache(arguments)))

    def rotation(self, decoder: Any, index: int, hidden: Tensor, positions: Tensor) -> Any:
        return decoder.rotary_emb.forward(hidden, positions, *([self.kinds[index]] if self.rotates_by_kind else []))

    def dense(self, index: int, real: Tensor, new: int, ahead: Tensor | None = None) -> Tensor:
        """Causal mask [R, 1, new, columns] of the last rows over the real columns [R, columns], and over those that see
        each other `ahead`. Padding sees itself, so that its softmax is finite.
        """
        place = torch.arange(real.shape[1], device=real.device)
        row = place[real.shape[1] - new :, None]
        seen = place <= row if ahead is None else (place <= row) | ahead
        seen = seen & real[:, None]
        if self.kinds[index] == "sliding_attention":
            seen &= place > row - self.config.sliding_window
        return (seen | (place == row))[:, None]


@dataclass(eq=False)
class CutImage:
    """An image while its tokens are pruned, in one row of the batch."""

    unit: Unit
    row: int  # of the batch; beams repeat prompts
    end: int  # its last row in the prompt
    text: Integers  # columns of the rows whose queries are asked
    cuts: dict[int, Cut]  # by layer
    left: int  # visual tokens now
    reported: bool  # whether it is of the first beam of its prompt
    merged: int = 0  # of the tokens left, those made at the last cut
    entering: list[int] = field(default_factory=list)  # visual tokens that entered each layer so far
    measures: dict[str, list[Tensor]] = field(default_factory=dict)  # the method's statistics of its choices, per cut
    centres: Tensor | None = None  # [M] which of its n tokens those made at the last cut represent
    joined: Tensor | None = None  # [n] which of the M each of them went into, -1 for none

    @classmethod
    def of(cls, prompt: Prompt, unit: Unit, cuts: dict[int, Cut], asks: str) -> "CutImage":
        """An image before its first cut. If no text follows it, the last row of the prompt asks."""
        image, text = prompt.images[unit.image], prompt.text[unit.image]
        if asks == "last" or not len(text):
            text = np.flatnonzero(prompt.asks[image.row])[-1:]
        first = image.row % prompt.beams == 0
        return cls(unit, image.row, int(image.places[-1]), text, cuts, len(unit.places), first)

    def note(self, places: Tensor, chosen: Chosen, number: int) -> None:
        """Stores the result of one cut.

        Args:
            places: [v] rows of the prompt that its tokens are.
            number: of this image among those cut together.
        """
        self.merged = 0 if chosen.merged is None else chosen.merged.shape[1]
        for name, values in chosen.measures.items():
            self.measures.setdefault(name, []).append(values[number].detach())
        if chosen.centres is None:
            self.centres = self.joined = None
            return
        (whole,) = upload([self.unit.places], places.device)
        own = torch.searchsorted(whole, places)  # [v] which of its n tokens
        self.centres = own[chosen.centres[number]]
        if chosen.joined is not None:
            none = torch.full((len(whole),), -1, device=places.device)
            self.joined = none.scatter(0, own, chosen.joined[number])


class Hooks:
    """Hooks on the layers of one decoder for one forward pass. Those of other threads pass by."""

    enter: Any  # (index, hidden, kwargs) -> (hidden, kwargs) in front of a layer
    leave: Any  # (index, output) -> the layer's output, or None to leave it as it is

    def __init__(self, layers: Layers, decoder: Any) -> None:
        self.layers, self.decoder, self.thread = layers, decoder, threading.get_ident()
        self.handles: list[Any] = []
        self.replays = False  # whether the forward is over, and layers run again for a checkpoint's gradients

    def arm(self, numbers: Any, leaves: bool) -> None:
        for index in numbers:
            layer = self.decoder.layers[index]

            def enter(module: nn.Module, args: Any, kwargs: Any = None, index: int = index) -> Any:
                # without arguments by name it is being registered by another thread
                if kwargs is None or not self._holds(module, index):
                    return None
                kwargs = {**dict(zip(self.layers.names[index], args, strict=False)), **kwargs}
                hidden, kwargs = self.enter(index, kwargs.pop("hidden_states"), kwargs)
                return (hidden,), kwargs

            def leave(module: nn.Module, args: Any, output: Any, index: int = index) -> Any:
                if not self._holds(module, index):
                    return None
                return self.leave(index, output)

            self.handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
            if leaves:
                self.handles.append(layer.register_forward_hook(leave))

    def _holds(self, module: nn.Module, index: int) -> bool:
        """Whether the hooks are for this layer in this thread. A copy that was made meanwhile has them too."""
        here = self.replays or threading.get_ident() == self.thread
        return here and module is self.decoder.layers[index]

    def disarm(self) -> None:
        while self.handles:
            self.handles.pop().remove()


class Step(Hooks):
    """A decode step, or any later rows, on a cache whose layers have different lengths.

    Args:
        length: rows of the prompt and all that came after, those of this step among them.
        later: [R, length] 2D mask, or None.
        looks: whether it is to find out if layers have a mask.
    """

    def __init__(
        self, layers: Layers, decoder: Any, book: Book, length: int, later: Tensor | None, renumbers: bool, looks: bool
    ) -> None:
        super().__init__(layers, decoder)
        self.book, self.length, self.later, self.renumbers, self.looks = book, length, later, renumbers, looks
        self.holes = book.holes and later is not None
        self.made: dict[Any, Any] = {}  # arguments that layers of one kind and length share

    def enter(self, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """The mask and positions that fit the layer's own columns."""
        rows, kind, changed = self.book.layers[index], self.layers.kinds[index], dict[str, Any]()
        if self.looks:
            self.layers.masks_all = bool(self.layers.masks_all) or kwargs.get("attention_mask") is not None
        if index in self.book.weights:
            key = "calibrated", id(self.book.weights[index]), kind
            if key not in self.made:
                self.made[key] = self._calibrated(index, rows, hidden, cache_in(kwargs))
            changed["attention_mask"] = self.made[key]
        elif kwargs.get("attention_mask") is not None or rows.padded or self.holes:
            key = "mask", id(rows), kind
            if key not in self.made:
                two = self._columns(rows) if rows.padded or self.holes else None
                self.made[key] = self.layers.mask(index, hidden, two, cache_in(kwargs), None)
            changed["attention_mask"] = self.made[key]
        if self.renumbers and kwargs.get("position_ids") is not None:
            key = "positions", id(rows), kind
            if key not in self.made:
                positions = kwargs["position_ids"] - rows.removed
                angles = kwargs.get("position_embeddings")
                if angles is not None:
                    angles = self.layers.rotation(self.decoder, index, hidden, positions)
                self.made[key] = positions, angles
            changed["position_ids"], angles = self.made[key]
            changed |= {} if angles is None else {"position_embeddings": angles}
        return hidden, {**kwargs, **changed}

    def _columns(self, rows: Rows) -> Tensor:
        """Which columns of a layer are no padding: [R, W + rows since the prompt]."""
        if self.later is not None:
            later = self.later[:, self.book.real.shape[1] :].bool()
        else:
            later = rows.shown.new_ones(len(rows.index), self.length - self.book.size)
        return torch.cat((rows.shown, later), 1)

    def _calibrated(self, index: int, rows: Rows, hidden: Tensor, cache: Any) -> Tensor:
        real, sizes = self._columns(rows), self.book.weights[index]
        sizes = torch.cat((sizes, sizes.new_ones(len(sizes), real.shape[1] - sizes.shape[1])), 1)
        if self.layers.kinds[index] == "sliding_attention":  # a cache of windows has forgotten the first columns
            left = -cache.get_mask_sizes(hidden.shape[1], self.layers.sources[index])[0]
            real, sizes = real[:, left:], sizes[:, left:]
        return seen_logits(self.layers.dense(index, real, hidden.shape[1]), sizes, None, hidden.dtype)


def later_step(
    layers: Layers | None, decoder: Any, kwargs: dict[str, Any], book: Book, cache: Any, mask: Tensor | None
) -> tuple[dict[str, Any], Step | None]:
    """Arguments of the decoder for rows behind a shortened prompt, whose renumbered positions continue from its shorter
    length, and the hooks by which layers of different lengths get separate masks.

    Args:
        mask: [R, length] 2D mask that the model was given, or None.
    """
    new, positions = given_rows(kwargs).shape[1], kwargs.get("position_ids")
    if book.shift is not None and (positions is None or positions.ndim == 2):
        if positions is None:
            positions = int(cache.get_seq_length()) + torch.arange(new, device=book.shift.device)[None]
        kwargs = {**kwargs, "position_ids": positions - book.shift}
    if not book.layers or layers is None:
        return kwargs, None
    if new > 1 and mask is not None and not book.holes:
        book = book._replace(holes=True)
        cache.reduction_book = book
    axes = positions.shape[0] if isinstance(positions, Tensor) and positions.ndim == 3 else 1
    length = book.real.shape[1] + int(cache.get_seq_length()) - book.size + new
    renumbers = layers.renumbers(axes)
    # without padding, and with the prompt's own positions, one row needs no hook if no layer has a mask
    plain = new == 1 and not (renumbers or book.weights or book.padded or book.uneven or book.holes)
    plain = plain and (layers.window is None or length < layers.window)
    plain = plain and not (layers.kernel == "eager" or is_static(cache))
    if plain and layers.masks_all is False:
        return kwargs, None
    step = Step(layers, decoder, book, length, mask, renumbers, plain)
    step.arm(book.layers, False)
    return kwargs, step


def runs_again(decoder: Any) -> bool:
    return bool(decoder.training and torch.is_grad_enabled() and getattr(decoder, "gradient_checkpointing", False))
