"""A language model of transformers as its layers tell of it: queries and keys are read where a layer hands them to its
attention kernel, so that norms, rotation, compression and scale of a family need no code.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Heads, Overlay
from llava_consensus.hosts.caches import CACHE, cache_given
from llava_consensus.hosts.call import Shadow, current_call, named, names_of
from llava_consensus.hosts.decoders import LlamaDecoder
from llava_consensus.hosts.derived.memory import recalled, remember, state_of
from llava_consensus.hosts.derived.tap import (
    KernelCall,
    Left,
    attended,
    attention_modules,
    heads_of,
    install,
    modules_of,
    recording,
)

# Arguments of a layer that follow from positions and mask; others with a row for each of the prompt's are cut with it.
PLACED = ("position_ids", "position_embeddings", "attention_mask", "cache_position")
# Of the check of a layer: rows, the size of their embeddings, and how far from its view a layer may be in float32 and
# in other formats.
TRIED_ROWS, EMBEDDED, EXACT, ROUNDED = 8, 0.02, 1e-3, 0.2
# Raised by a forward that works in another way than it is called here.
UNREADABLE = (AttributeError, ImportError, LookupError, TypeError, ValueError, RuntimeError, AssertionError)
OWN = ("layer_idx", "training")  # attributes of an attention module that say nothing of how it works
WRAPPED = {"forward", "_compiled_call_impl"}  # attributes of a module that others set to run it in their way


class TapDecoder(LlamaDecoder):
    """A language model with `layers` and, where they rotate, a module `rotary_emb`.

    Args:
        module: the language model, or the one that has it as `model`.
        axes: of positions; several are kept, since numbering them anew has no meaning.
        sees_ahead: whether rows of pictures attend to later ones, as the model's own mask says.
        unturned: type of the layers that rotate nothing.
    """

    def __init__(self, module: Any, axes: int = 1, sees_ahead: bool = False, unturned: str = "-") -> None:
        super().__init__(module if hasattr(module, "layers") else getattr(module, "model", module))
        self.axes, self.keeps_positions, self.sees_ahead, self._unturned = axes, axes > 1, sees_ahead, unturned
        # children of attention modules that keys do not depend on, and the width of what each returns, by `kind_of`
        self._idle: dict[Any, dict[str, int]] = {}

    def attention(self, layer: int) -> nn.Module | None:
        """The attention module of a layer; None where it has none that hands queries and keys to a kernel."""
        return next(attention_modules(self.layers[layer]), None)

    def tapped(self, layers: Iterable[int], observe: Callable[[int, KernelCall], None] | None = None) -> list[Shadow]:
        """Taps on the attention modules of layers; `observe` is given the number and each kernel call of one."""
        shadows: list[Shadow] = []
        for layer in layers:
            module = self.attention(layer)
            if module is not None:
                shadows += install([module], None if observe is None else partial(observe, layer))
        return shadows

    def taps(self, layer: int) -> list[Any]:
        """No taps of modules: kernel calls are observed."""
        return []

    value_taps = taps

    def rotary(self, hidden: Tensor, positions: Tensor) -> Any:
        """Positions [R, S], or [R, S, A] of A axes, as layers of this kind rotate by them."""
        rotary = self.module.rotary_emb
        places = positions.permute(2, 0, 1) if positions.ndim == 3 else positions
        by_kind = "layer_type" in names_of(rotary.forward)
        return rotary(hidden, places, self.kind) if by_kind else rotary(hidden, places)

    def angles(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, S, d] of a head's channels in any order, those that do not turn among them."""
        turned = self.rotary(hidden, positions)
        cos, sin = (turned.real, turned.imag) if isinstance(turned, Tensor) else turned
        if self.kind == self._unturned:
            return torch.ones_like(cos), torch.zeros_like(sin)
        rest = 0 if isinstance(turned, Tensor) else self.layers[0].self_attn.head_dim - cos.shape[-1]
        pad = torch.nn.functional.pad
        return pad(cos, (0, rest), value=1.0), pad(sin, (0, rest))

    def positions(self, layer_arguments: dict[str, Any], rows: int, outer: Mapping[str, Any]) -> Tensor:
        """Position ids [rows, S], or [rows, S, A]: those a layer was given, or that the model was."""
        own = None if self.axes > 1 else layer_arguments.get("position_ids")
        given = outer.get("position_ids") if own is None else own
        if given is None:
            turned, cache = layer_arguments["position_embeddings"], cache_given(layer_arguments)
            turned = turned if isinstance(turned, Tensor) else turned[0]  # [..., S, d]
            start = 0 if cache is None else cache.get_seq_length()
            given = torch.arange(start, start + turned.shape[-2], device=turned.device)[None]
        if self.axes == 1:
            return given.expand(rows, -1)
        axes = given[None] if given.ndim == 2 else given[-self.axes :]
        return axes.expand(self.axes, rows, -1).permute(1, 2, 0)

    def arguments(self, hidden: Tensor, positions: Tensor, mask: Tensor | None) -> dict[str, Any]:
        """Kwargs of a layer's forward for these positions and this mask."""
        given = super().arguments(hidden, positions, mask)
        return given if self.axes == 1 else {**given, "position_ids": None}

    @torch.no_grad()
    def read(
        self, layer: int, hidden: Tensor, positions: Tensor, row: Tensor, columns: Tensor,
        rope: bool = True, given: Mapping[str, Any] | None = None,
    ) -> Heads:  # fmt: skip
        """Queries of asked rows and keys of all rows that enter a layer, by the layer itself as far as its kernel: once
        with the asked rows alone, and once with all rows and no projection but that of keys.

        Args:
            hidden: [R, S, D] that enters the layer.
            row, columns: [P] and [P, L] rows that ask.
            rope: whether they are rotated.
            given: kwargs that the layer was given, of which those that are no rows are passed.
        """
        attention = self.attention(layer)
        assert attention is not None
        other = {
            name: value for name, value in (given or {}).items()
            if not isinstance(value, Tensor) and name not in (*PLACED, *CACHE)
        }  # fmt: skip

        def call(module: Any, attention: nn.Module, hidden: Tensor, positions: Tensor) -> KernelCall:
            arguments = self.at(layer).arguments(hidden, positions, None)
            if not rope and "position_embeddings" in arguments:
                arguments["position_embeddings"] = _still(arguments["position_embeddings"])
            return kernel_call(module, attention, hidden, {**other, **arguments})

        module = self.layers[layer]
        idle = self._idle.get(kind_of(attention))
        own = attention in set(module.children()) and not any(vars(one).keys() & WRAPPED for one in (module, attention))
        if not (own and idle and columns.numel()) or self.follows_length:
            return heads_of(call(module, attention, hidden, positions), row, columns)
        asked = row[:, None], columns
        query = call(module, attention, hidden[asked], positions[asked]).query
        keys = heads_of(call(*idling(module, attention, idle), hidden, positions), row[:0], columns[:0])
        return keys._replace(query=query.detach())

    def check_attention(self, cut: bool, read: bool) -> None:
        """Holds the first layer of each kind, on a few rows of noise, to what is read of it: it gets the positions as
        they are made here, and its kernel does softmax of queries and keys. Twins of the modules run, so that no hook
        fires, no mode changes and no number is drawn. Weights that are not there are taken on trust, and what was found
        of a model that is still what it was is remembered (`memory`).

        Args:
            cut: whether rows leave between layers: then every kind of layer is tried, and none may mix rows but by
                attention.
            read: whether queries and keys will be asked for, and not only observed.
        Raises:
            OptionError: the language model works in another way.
        """
        if not self.layers:
            raise self._other("it has no layers like Llama's")
        check_unpacked(self.module, self.layers[0])
        weights = list(self.layers[0].parameters())
        if any(weight.is_meta or not weight.numel() for weight in weights):
            return
        tried = self._to_try(cut)
        others = [layer for index, layer in enumerate(self.layers) if index not in tried]
        purpose = (type(self), self.axes, self._unturned, self.embedding_scale, *tried, read)
        state = state_of(modules_of(self.module, others))
        known = recalled(self.module, purpose, state)
        if known is not None:
            self._idle.update(known)
            return
        like = next(weight for weight in weights if weight.is_floating_point())
        size = self.module.config.hidden_size
        noise = torch.randn(
            1, TRIED_ROWS, size, generator=torch.Generator().manual_seed(0), device="cpu", dtype=torch.float32
        )
        embeds = (EMBEDDED * noise).to(like.device, like.dtype)
        self._try_layers(tried, {"inputs_embeds": embeds}, embeds * self.embedding_scale, read)
        remember(self.module, purpose, state, dict(self._idle))

    def check_layers(self, cut: bool, call: Mapping[str, Any]) -> None:
        """`check_attention` by a call of the language model, of which queries and keys are only observed.

        Args:
            cut: whether rows leave between layers.
            call: its arguments.
        Raises:
            OptionError: the language model works in another way.
        """
        self._try_layers(self._to_try(cut), call)

    def _to_try(self, cut: bool) -> list[int]:
        """Numbers of the first layers of each kind."""
        if cut and any(isinstance(one, nn.Conv1d) for layer in self.layers for one in layer.modules()):
            raise self._other("its layers mix rows by a convolution too")
        if cut and getattr(self.module.config, "num_kv_shared_layers", None):
            raise self._other("its last layers read keys of earlier ones")
        tried: dict[Any, int] = {}
        for index, _ in enumerate(self.layers if cut else self.layers[:1]):
            module = self.attention(index)
            if module is None:
                raise self._other(f"layer {index} hands no queries and keys to an attention kernel")
            tried.setdefault((kind_of(module), self.at(index).kind), index)
        return list(tried.values())

    @torch.no_grad()
    def _try_layers(
        self, tried: list[int], call: Mapping[str, Any], entering: Tensor | None = None, read: bool = False
    ) -> None:
        """Runs these layers in a call of the language model.

        Args:
            call: its arguments.
            entering: [R, S, D] what should enter the first layer, where that is known.
            read: as in `check_attention`.
        Raises:
            OptionError: the language model works in another way.
        """
        try:
            for index, what, difference in self._layer_differences(tried, call, entering, read):
                if not difference <= room_of(call["inputs_embeds"]):
                    raise self._other(f"{what} of layer {index} differs by {difference:.2g} of its size")
        except OptionError:
            raise
        except Unlike as error:
            raise self._other(f"its first layers cannot be read ({error})") from error
        except UNREADABLE as error:
            raise self._other("its first layers cannot be run alone, with the arguments that they are given") from error

    def _layer_differences(self, tried: list[int], call: Mapping[str, Any], entering: Tensor | None, read: bool) -> Any:
        """Number of a layer, what is compared, and the difference as a share of its size."""
        reached = [Recorder(layer, ends=index == tried[-1]) for index, layer in enumerate(self.layers)]
        embeds = call["inputs_embeds"]
        with torch.autocast(embeds.device.type, enabled=False):
            with contextlib.suppress(Reached):
                twin(self.module, layers=reached)(**{**call, "use_cache": False, "past_key_values": None})
            states = reached[0].given[0]
            if states.shape != embeds.shape:
                raise Unlike("they hand on more than one row of states for each row of the prompt")
            if entering is not None:
                yield 0, "what enters the attention", distance(entering, states)
            for index in tried:
                hidden, given = reached[index].given
                positions = self.positions(given, len(hidden), call)
                for name, value in given.items():
                    rows = isinstance(value, Tensor) and hidden.shape[1] in value.shape and name not in PLACED
                    if rows and value.shape[:2] not in (hidden.shape[:2], (1, hidden.shape[1])):
                        raise Unlike(f"they are given {name} of a shape that cannot be cut")
                ours = self.at(index).arguments(hidden, positions, None).get("position_embeddings")
                for one, own in zip(_tensors(ours), _tensors(given.get("position_embeddings")), strict=True):
                    yield index, "the rotation", distance(one, own.expand(one.shape))
                layer = twin(self.layers[index])
                attention = next(attention_modules(layer))
                install([attention])
                with recording([attention]) as calls:
                    layer.forward(hidden, **given)
                if len(calls) != 1:
                    raise Unlike(f"the attention of layer {index} calls its kernel {len(calls)} times")
                (kernel,) = calls
                assert kernel.output is not None
                found, seen = _attended_rows(kernel)
                yield index, "the attention", distance(found[seen], kernel.output.transpose(1, 2)[seen])
                if not read:
                    continue
                few = slice(1, None, 2)
                arguments = self.at(index).arguments(hidden[:, few], positions[:, few], None)
                query = kernel_call(layer, attention, hidden[:, few], arguments).query
                if distance(query, kernel.query[:, :, few]) <= room_of(hidden):
                    self._idle[kind_of(attention)] = idle_children(layer, attention, hidden, given, kernel)

    def _other(self, why: str) -> OptionError:
        return OptionError(
            f"language model {type(self.module).__name__} is not adapted to methods that read its attention: {why}. "
            "Take a method that acts after the tower and asks no question of the language model (llava-consensus list)"
        )

    @property
    def replaced(self) -> dict[str, Any]:
        """Functions of the inner model that must know of a shortened sequence, by name."""
        return {"_deepstack_process": add_planes} if hasattr(self.module, "_deepstack_process") else {}


def kernel_call(module: Any, attention: nn.Module, hidden: Tensor, arguments: dict[str, Any]) -> KernelCall:
    """The call of a layer's attention kernel, which does not run, and nothing behind it."""
    with recording([attention], leaves=True) as calls, contextlib.suppress(Left):
        module.forward(hidden, **arguments)  # past the layer's hooks, which are for the model's own forward
    return calls[0]


class _Spoiled(Overlay):
    """What the child returns, with one entry of the batch not a number: whatever depends on it is none either."""

    entry: int
    width = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.own(*args, **kwargs).clone()
        output[self.entry] = float("nan")
        self.width = output.shape[-1]
        return output


class _Idle(Overlay):
    """Zeros in the place of what the child returns, which take no memory."""

    width: int

    def __call__(self, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return states.new_zeros(()).expand(*states.shape[:-1], self.width)


def idling(layer: Any, attention: Any, idle: Mapping[str, int]) -> tuple[Any, Any]:
    """A layer and its attention module of the same weights, in which these children return zeros."""
    return replaced(
        layer, attention, {name: _Idle(getattr(attention, name), width=width) for name, width in idle.items()}
    )


def replaced(layer: Any, attention: Any, children: Mapping[str, Any]) -> tuple[Any, Any]:
    """A layer and its attention module of the same weights, with other children of the latter."""
    above = {child: name for name, child in layer.named_children()}[attention]
    copied = []
    for module, parts in (attention, children), (layer, {}):
        copied.append(object.__new__(type(module)))
        vars(copied[-1]).update({**vars(module), **parts})  # where an attribute is looked for before the children
    vars(copied[1])[above] = copied[0]
    return copied[1], copied[0]


def idle_children(layer: Any, attention: Any, hidden: Tensor, given: dict[str, Any], own: KernelCall) -> dict[str, int]:
    """Children of an attention module on whose output the keys do not depend, and the width they return in its place:
    of one head where the module takes that. None where a layer without them gives other keys.

    Args:
        layer: a twin, and `attention` that in it.
        hidden, given: of one call of it.
        own: the kernel call it led to.
    """
    spoiled = {name: _Spoiled(child, entry=entry) for entry, (name, child) in enumerate(attention.named_children())}
    with contextlib.suppress(*UNREADABLE):
        batch = hidden.expand(len(spoiled), *hidden.shape[1:])
        key = kernel_call(*replaced(layer, attention, spoiled), batch, given).key
        clean = key.isfinite().flatten(1).all(1).tolist()
        whole = {name: one.width for (name, one), still in zip(spoiled.items(), clean, strict=True) if still}
        heads, rows, width = own.query.shape[1:]
        for idle, left in (dict.fromkeys(whole, width), 1), (whole, heads):
            with contextlib.suppress(*UNREADABLE):
                found = kernel_call(*idling(layer, attention, idle), hidden, given)
                if torch.equal(found.key, own.key) and found.query.shape[1:3] == (left, rows):
                    return idle
    return {}


class Unlike(ValueError):
    """What a layer does that is not adapted."""


class Reached(Exception):
    """The last `Recorder` was called."""


class Recorder(Overlay):
    """Records the arguments of a layer, and passes the states on or ends the trial."""

    ends: bool
    given: tuple[Tensor, dict[str, Any]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = named(type(self.own).forward, args, kwargs)
        hidden: Tensor = arguments.pop("hidden_states")
        self.given = hidden, arguments
        if self.ends:
            raise Reached
        return hidden


def twin(module: nn.Module, **parts: Any) -> Any:
    """A module with the same weights, in evaluation mode, without hooks and with the forward of its class; named
    children are replaced.
    """
    copied: Any = object.__new__(type(module))
    copied.__dict__.update({name: value for name, value in vars(module).items() if name != "forward"})
    children = {name: child for name, child in module._modules.items() if name not in parts}
    hooks = {name: type(value)() for name, value in vars(module).items() if name.endswith("_hooks")}
    twins = {name: child if child is None else twin(child) for name, child in children.items()}
    copied.__dict__.update(hooks, _modules=twins, training=False, **parts)
    return copied


def check_unpacked(model: nn.Module, layer: nn.Module) -> None:
    """Raises OptionError for a layer whose weights are not there until the model has run."""
    if any(isinstance(one, nn.Linear) and getattr(one, "weight", None) is None for one in layer.modules()):
        raise OptionError(
            f"language model {type(model).__name__}: its weights are packed until its first forward "
            "(compressed-tensors). Run the model once, or load with CompressedTensorsConfig(dequantize=True), and "
            "attach then"
        )


def kind_of(attention: nn.Module) -> Any:
    """Equal for attention modules that work alike: all but their weights, their number and their mode."""
    told = {name: value for name, value in vars(attention).items() if isinstance(value, int | float | str | None)}
    return type(attention), *sorted((name, str(value)) for name, value in told.items() if name not in OWN)


def room_of(states: Tensor) -> float:
    """The largest `distance` of rounding in the format of these states."""
    return EXACT if states.dtype in (torch.float32, torch.float64) else ROUNDED


def distance(ours: Tensor, own: Tensor) -> float:
    """Distance relative to the size of `own`."""
    wide = torch.promote_types(own.dtype, torch.float32)
    return float((ours.to(wide) - own.to(wide)).norm() / own.to(wide).norm().clamp_min(1e-12))


def _still(turned: Any) -> Any:
    """What rotates nothing, in the form that a rotation has."""
    if isinstance(turned, Tensor):
        return torch.ones_like(turned)
    cos, sin = turned
    return torch.ones_like(cos), torch.zeros_like(sin)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors of a rotation, complex ones as pairs of numbers."""
    parts = [] if value is None else [value] if isinstance(value, Tensor) else list(value)
    return [torch.view_as_real(one) if one.is_complex() else one for one in parts]


def _attended_rows(call: KernelCall) -> tuple[Tensor, Tensor]:
    """Softmax of a call's queries and keys, times its values, in float32 at least [R, H, S, d_v], and which of these
    see a row at all [R, H, S].
    """
    if call.options.get("s_aux") is not None:
        raise Unlike("their attention has sinks")
    mask, (rows, columns) = call.mask, (call.query.shape[2], call.key.shape[2])
    plain = torch.ones(rows, columns, dtype=torch.bool, device=call.query.device).tril()
    if not isinstance(mask, Tensor):
        mask = plain
    elif mask.ndim == 2:
        mask = mask[:, None, None].bool() & plain
    mask = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    found = attended(call.query, call.key, call.value, call.scale, call.cap, mask)
    return found, mask.any(-1).expand(call.query.shape[:-1])


def add_planes(attachment: Any, plain: Any, hidden: Tensor, visual_pos_masks: Tensor, visual_embeds: Tensor) -> Tensor:
    """Replaces Qwen3-VL's `_deepstack_process`, which adds features [visual tokens, D] to visual rows: after a cut it
    adds them to the rows that are left.
    """
    call, module = current_call(attachment), attachment.here.decoder.module
    state = call.state.get("cuts") if call is not None else None
    rows = getattr(state.forward, "rows", None) if state is not None else None
    if rows is None or hidden.shape[1] == visual_pos_masks.shape[1]:
        run_plain = plain or type(module)._deepstack_process.__get__(module)
        return run_plain(hidden, visual_pos_masks, visual_embeds)
    plane = hidden.new_zeros(len(hidden), rows.size + 1, hidden.shape[2])
    plane[:, :-1][visual_pos_masks.to(hidden.device)] = visual_embeds.to(hidden.device, hidden.dtype)
    return hidden + plane.gather(1, rows.origin[..., None].expand_as(hidden))
