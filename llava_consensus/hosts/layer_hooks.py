"""Hooks between decoder layers: they shorten the sequence before the layers a method names, with the key-value cache,
padding and any number of pictures in a row.

`arm` announces the sequence that was just assembled; the next forward over it is the prefill that is cut. Hooks replace
what enters a layer (states, position ids and embeddings, mask); the attention kernel stays the model's own. After the
last layer the sequence has its full length again, zero where a token was dropped, so that the head, a loss with labels
and `generate` see the shapes they know. Decode steps are recognised by their cache: each layer gets the position and
the mask that fit its own number of columns. A later turn on the same cache keeps the first choice. All state of a
forward is in its call (`Call`); only the metadata of KV caches outlives it.
"""

import weakref
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import CutDecoder, Tap, Tiles
from llava_consensus.hosts.caches import CUTS, cache_given, known, remember
from llava_consensus.hosts.call import Call, Report, Shadow, current_call, named, uncompiled
from llava_consensus.hosts.cut_forward import VALUES, CutCache, CutForward, CutState, DecodeStep, PendingPrefill, fits
from llava_consensus.hosts.sequence import Layout
from llava_consensus.reduction.tokens import Stopwatch

OBSERVED = ("previous", VALUES)  # what of a method's `attention` is read while layers run
_NONE: Mapping[int, tuple[Any, CutCache]] = {}
# by hooks
_LAST: ContextVar[Mapping[int, tuple[Any, CutCache]]] = ContextVar("llava_consensus_last_cut", default=_NONE)


@uncompiled
def _forward(attachment: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """The inner model's own forward, of the replica that runs where it is one."""
    if plain is not None:
        return plain(*args, **kwargs)
    module = attachment.here.decoder.module
    return type(module).forward(module, *args, **kwargs)


class Cuts:
    """The hooks of one attachment, whose method is an `InDecoder`.

    Raises:
        OptionError: for an attention kernel other than sdpa and eager.
    """

    def __init__(self, attachment: Any) -> None:
        decoder = attachment.model.decoder
        if decoder.kernel not in ("sdpa", "eager"):
            raise OptionError(f"attn_implementation={decoder.kernel!r}: cutting between layers needs sdpa or eager")
        self.attachment = attachment
        self.method: Any = attachment.stages[-1].method
        self.depth = len(decoder.layers)
        if self.method.attention == VALUES and not hasattr(decoder, "value_taps"):  # a decoder of another package
            raise OptionError(
                f"{type(self.method).__name__} reads the values of attention, and {type(decoder).__name__} has no "
                "value_taps that give them. Take another method that acts between layers"
            )

    def install(self, decoder: CutDecoder) -> list[Any]:
        """Handles of all hooks; silent until a call is under way."""
        handles = [decoder.module.register_forward_pre_hook(self._begin, with_kwargs=True)]
        for index, layer in enumerate(decoder.layers):
            handles.append(layer.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True))
            if self.method.attention in OBSERVED:
                for which, tap in enumerate(self._taps(decoder, index)):
                    handles.append(tap.module.register_forward_hook(partial(self._collect, index, which)))
        for table in decoder.tables():
            handles.append(table.register_forward_pre_hook(self._reach, with_kwargs=True))
        handles.append(decoder.layers[-1].register_forward_hook(self._leave))
        return handles

    def shadows(self, decoder: CutDecoder) -> list[Shadow]:
        """The inner model's forward, kept out of compiled graphs: there the hooks would be traced once and for all; and
        what else of it must know of a shortened sequence.
        """
        replacements = {"forward": _forward, **getattr(decoder, "replaced", {})}
        attributes = vars(decoder.module)
        shadows = [
            Shadow(decoder.module, name, partial(replacement, self.attachment, attributes.get(name)))
            for name, replacement in replacements.items()
        ]
        if hasattr(decoder, "tapped") and self.method.attention != "none":
            shadows += decoder.tapped(range(self.depth), self._observe if self.method.attention in OBSERVED else None)
        return shadows

    def _taps(self, decoder: CutDecoder, index: int) -> list[Tap]:
        """Taps of what the method reads of a layer while it runs."""
        return decoder.value_taps(index) if self.method.attention == VALUES else decoder.taps(index)

    def arm(self, call: Call, layout: Layout, embeds: Tensor, tiles: list[Tiles]) -> None:
        """The next forward of this call over a sequence of this shape, while `embeds` [R, S, D] is alive, is cut. The
        tiles of each picture are for methods that read the tower.

        Raises:
            OptionError: for a budget the method has no cuts for.
        """
        units = [(unit, self.method.cuts(unit.budget, len(unit.places), self.depth)) for unit in layout.reduced()]
        _state(call).armed = PendingPrefill(layout, units, weakref.ref(embeds), tiles) if units else None
        whole = [outcome._replace(entering=(outcome.after,) * self.depth) for outcome in call.report.outcomes]
        call.tell(Report(whole, watch=Stopwatch(embeds.device) if units else None))

    def armed(self, call: Call) -> PendingPrefill | None:
        """The sequence that is announced."""
        return _state(call).armed

    def again(self, call: Call, armed: PendingPrefill, read: Tensor) -> None:
        """Announces the prompts of a call once more, ids or embeddings [R, S + n, ...] of them and n rows after."""
        more = read.shape[1] - armed.layout.real.shape[1]
        _state(call).armed = armed._replace(layout=armed.layout.longer(more), embeds=weakref.ref(read), more=more)

    def given(self, call: Call, inputs: dict[str, Any]) -> None:
        """Tells the arguments of the model whose forward begins."""
        _state(call).given = inputs.get("attention_mask")
        _state(call).placed = inputs.get("position_ids") is not None

    def _begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        call = current_call(self.attachment)
        if call is not None:
            state = _state(call)
            mask, given = kwargs.get("attention_mask"), state.given
            state.forward, state.mask, state.layer_parts, state.kernel_call = None, mask, {}, None
            if isinstance(mask, Mapping):  # one for each type of layer, which the model made of what it was given
                state.mask = given
            state.outer = {"position_ids": kwargs.get("position_ids")}

    def _enter(self, index: int, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Pre-hook of layer `index`: passes the states on unchanged, or shortened."""
        call = current_call(self.attachment)
        if call is None:
            return None
        state, hidden = _state(call), args[0] if args else kwargs["hidden_states"]
        if index == 0:
            state.forward = self._recognise(call, state, hidden, kwargs)
        if state.forward is None:
            return None
        given = named(type(layer).forward, args, kwargs) if len(args) > 1 else kwargs
        hidden, changes = state.forward.enter(index, hidden, given)
        if not changes:
            return None
        if len(args) > 1:
            given = {name: value for name, value in given.items() if value is not args[0]}
        if args:
            return (hidden,), {**given, **changes}
        return args, {**given, **changes, "hidden_states": hidden}

    def _recognise(
        self, call: Call, state: CutState, hidden: Tensor, kwargs: dict[str, Any]
    ) -> CutForward | DecodeStep | None:
        """Classifies this forward: the announced prefill, a decode step on a cache that was cut, or neither."""
        cache = cache_given(kwargs)
        armed, state.armed = state.armed, None
        rows, size = armed.layout.real.shape if armed else (1, 0)
        if armed and armed.embeds() is not None and hidden.shape[1] == size and hidden.shape[0] % rows == 0:
            if cache is not None and cache.get_seq_length() > 0:
                raise OptionError("pictures in a later turn on a cache are not supported: pass the whole conversation")
            if getattr(cache, "is_compileable", False):
                raise OptionError(
                    f"cache_implementation: layers of a static cache have one length, and {type(self.method).__name__} "
                    "leaves them several. Leave it out, or take a method that acts before the language model"
                )
            state.cache = cache
            return CutForward(self.attachment, call, state, armed, hidden, kwargs)
        if cache is None or cache.get_seq_length() == 0:
            return None
        cut_cache = known(cache, CUTS) or self._last_that_fits(cache)
        if not isinstance(cut_cache, CutCache):
            return None
        return DecodeStep(self.attachment.here.decoder, cut_cache, cut_cache.grown(cache), state)

    def _last_that_fits(self, cache: Any) -> CutCache | None:
        """The last prefill of this context that was cut, where a cache is as that left it: transformers 4.37 makes a
        new cache object at every step.
        """
        owner, cut_cache = _LAST.get().get(id(self), (None, None))
        return cut_cache if owner is self and cut_cache is not None and fits(cut_cache, cache) else None

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After the last layer: the full length again. A prefill that was cut is reported, and bound to its cache."""
        call = current_call(self.attachment)
        if call is None or (state := _state(call)).forward is None:
            return None
        forward, state.forward = state.forward, None
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(forward, CutForward):
            cache, state.cache = state.cache, None
            cut_cache = CutCache(forward.rows.size - forward.more, forward.columns)
            cut = forward.outcomes(hidden)
            others = {key: entry for key, entry in _LAST.get().items() if entry[0].attachment.active}
            _LAST.set({**others, id(self): (self, cut_cache)})
            remember(cache, cut_cache, CUTS)
            report = call.report  # pictures that were not cut passed whole
            outcomes = [cut.get(index, outcome) for index, outcome in enumerate(report.outcomes)]
            call.tell(replace(report, outcomes=outcomes))
        states = forward.end(hidden)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    def _collect(self, index: int, which: int, module: nn.Module, args: Any, output: Any) -> None:
        """Keeps query or key of a layer that the next one is cut by."""
        call = current_call(self.attachment)
        if call is None or (state := _state(call)).forward is None:
            return
        if state.forward.wants(index):
            tap = self._taps(state.forward.decoder, index)[which]  # of the replica that runs, where it is one
            with torch.no_grad():  # a checkpoint that computes the layer again collects nothing, and must save as much
                state.layer_parts |= {name: value.detach() for name, value in tap.read(output).items()}

    def _observe(self, index: int, kernel_call: Any) -> None:
        """Keeps the kernel call of a layer that the next one is cut by."""
        call = current_call(self.attachment)
        if call is not None and (state := _state(call)).forward is not None and state.forward.wants(index):
            query, key = kernel_call.query, kernel_call.key
            if self.method.attention == VALUES:
                query = key = kernel_call.value
            state.kernel_call = kernel_call._replace(query=query.detach(), key=key.detach(), value=None, mask=None)

    def _reach(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Version 4.37 looks positions up in a table as long as the layer's own cache, too short for positions kept."""
        call = current_call(self.attachment)
        if call is None or (state := _state(call)).forward is None:
            return None
        return args, {**kwargs, "seq_len": max(kwargs["seq_len"], state.forward.reach)}


def _state(call: Call) -> CutState:
    """State that the hooks of this file share in a call."""
    return call.state.setdefault("cuts", CutState())
