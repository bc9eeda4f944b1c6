"""The seam between decoder layers: shortens the sequence before the layers a method names, with the key-value cache,
padding and any number of pictures in a row.

`arm` announces the sequence that was just assembled; the next forward over it is the prefill that is cut. Hooks on the
decoder's layers replace what enters them (states, position ids and embeddings, mask); the attention kernel stays the
model's own. Behind the last layer the sequence has its full length again, zero where a token was dropped, so that the
head, a loss with labels and `generate` see the shapes they know. Decode steps are recognised by their cache: each
layer gets the position and the mask that fit its own number of columns. A later turn on the same cache keeps the first
choice. Works on transformers 4.37.2 and 5, Llama and Mistral, sdpa and eager attention.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import ImageOutcome
from llava_consensus.hosts.decoder.forwards import Armed, Kept, Prefill, Step, check_window, fits
from llava_consensus.hosts.sequence.layout import Layout
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.stopwatch import Stopwatch

Report = Callable[[dict[int, ImageOutcome], Stopwatch], None]
CACHE = ("past_key_values", "past_key_value")  # its name in transformers 5 and 4.37


class DecoderSeam:
    """Hooks of one method on one decoder, until `detach`.

    Args:
        decoder: inner language model with `layers` and `norm`.
        method: a DecoderMethod.
        report: is given the outcomes of a prefill, by picture of the layout, and the time of its stages.
    Raises:
        OptionError: for an attention kernel other than sdpa and eager.
    """

    def __init__(self, decoder: Any, method: Any, report: Report) -> None:
        self.kernel = getattr(decoder.config, "_attn_implementation", "eager")
        if self.kernel not in ("sdpa", "eager"):
            raise OptionError(f"attn_implementation={self.kernel!r}: cutting between layers needs sdpa or eager")
        self.decoder, self.method, self.report = decoder, method, report
        self.depth = len(decoder.layers)
        self.stages = Stopwatch(torch.device("cpu"))
        self._armed: Armed | None = None
        self._run: Prefill | Step | None = None
        self._mask: Tensor | None = None  # [R, columns] of the running forward
        self._known: weakref.WeakKeyDictionary[Any, Kept] = weakref.WeakKeyDictionary()
        self._last: Kept | None = None
        self._taps: list[Any] = []
        self._handles = [decoder.register_forward_pre_hook(self._begin, with_kwargs=True)]
        for index, layer in enumerate(decoder.layers):
            self._handles.append(layer.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True))
            rotary = getattr(layer.self_attn, "rotary_emb", None)
            if rotary is not None:
                self._handles.append(rotary.register_forward_pre_hook(self._reach, with_kwargs=True))
        self._handles.append(decoder.layers[-1].register_forward_hook(self._leave))

    def detach(self) -> None:
        """Takes every hook off; what a running or broken forward left behind goes too."""
        for handle in (*self._handles, *self._taps):
            handle.remove()
        self._handles, self._taps, self._run, self._armed, self._last = [], [], None, None, None
        self._known.clear()

    def arm(self, layout: Layout, budget: Budget, embeds: Tensor) -> None:
        """The next forward over a sequence of this shape, while `embeds` [R, S, D] is alive, is cut.

        Raises:
            OptionError: for a budget the method has no cuts for.
        """
        units = [(unit, self.method.stages(budget, len(unit.places), self.depth)) for unit in layout.reduced()]
        self._armed = Armed(budget.tokens, layout, units, weakref.ref(embeds)) if units else None
        self.stages = Stopwatch(embeds.device)

    def untouched(self, outcome: ImageOutcome) -> ImageOutcome:
        """The outcome of a picture that is not cut."""
        return outcome._replace(entering=(outcome.before,) * self.depth)

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._run, self._mask = None, kwargs.get("attention_mask")
        for handle in self._taps:
            handle.remove()
        self._taps = []

    def _enter(self, index: int, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """What enters layer `index`: as it was, or shortened."""
        hidden = args[0] if args else kwargs["hidden_states"]
        if index == 0:
            self._run = self._recognise(hidden, kwargs)
        if self._run is None:
            return None
        hidden, changes = self._run.enter(index, hidden, kwargs)
        if not changes:
            return None
        if args:
            return (hidden, *args[1:]), {**kwargs, **changes}
        return args, {**kwargs, **changes, "hidden_states": hidden}

    def _recognise(self, hidden: Tensor, kwargs: dict[str, Any]) -> Prefill | Step | None:
        """Whether this forward is the prefill that was announced, a step on a cache that was cut, or neither."""
        cache = next((kwargs[name] for name in CACHE if kwargs.get(name) is not None), None)
        armed, self._armed = self._armed, None
        rows, size = armed.layout.real.shape if armed else (1, 0)
        if armed and armed.embeds() is not None and hidden.shape[1] == size and hidden.shape[0] % rows == 0:
            if cache is not None and cache.get_seq_length() > 0:
                raise OptionError("pictures in a later turn on a cache are not supported: pass the whole conversation")
            check_window(self.decoder.config, size)
            return Prefill(self, armed, hidden, kwargs, cache)
        if cache is None or cache.get_seq_length() == 0:
            return None
        kept = self._known.get(cache) or (self._last if self._last and fits(self._last, cache) else None)
        return Step(self, kept, cache.get_seq_length() - kept.size, self._mask) if kept else None

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Behind the last layer: the full length again."""
        run, self._run = self._run, None
        if run is None:
            return None
        states = run.end(output[0] if isinstance(output, tuple) else output)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    def tap(self, index: int, found: dict[str, Tensor]) -> None:
        """Collects query and key of layer `index` while it runs."""
        attention = self.decoder.layers[index].self_attn
        for name, module in (("query", attention.q_proj), ("key", attention.k_proj)):

            def keep(module: nn.Module, args: Any, output: Tensor, name: str = name) -> None:
                found[name] = output.detach()

            self._taps.append(module.register_forward_hook(keep))

    def remember(self, cache: Any, kept: Kept) -> None:
        """Binds a prefill to its cache. Version 4.37 makes a new cache object at every step: the last one counts."""
        self._last = kept
        if cache is not None:
            self._known[cache] = kept

    def angles(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, W, d] of the host's rotary embedding."""
        if hasattr(self.decoder, "rotary_emb"):
            cos, sin = self.decoder.rotary_emb(hidden, positions)
            return cos, sin
        rotary, reach = self.decoder.layers[0].self_attn.rotary_emb, self.decoder.config.max_position_embeddings
        cos, sin = rotary(hidden, seq_len=max(reach, hidden.shape[1]))
        return cos[positions], sin[positions]

    def _reach(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Version 4.37 looks positions up in a table as long as the layer's own cache, too short for positions kept."""
        if self._run is None:
            return None
        return args, {**kwargs, "seq_len": max(kwargs["seq_len"], self._run.reach)}

    def replace(self, hidden: Tensor, positions: Tensor, mask: Tensor | None) -> dict[str, Any]:
        """Arguments of a layer for these positions [R, W] and this mask."""
        if mask is not None and self.kernel == "eager":
            mask = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill(~mask, torch.finfo(hidden.dtype).min)
        changes = {"position_ids": positions, "attention_mask": mask}
        if hasattr(self.decoder, "rotary_emb"):
            return {**changes, "position_embeddings": self.angles(hidden, positions)}
        return changes
