"""Language models of official LLaVA as methods read them: Llama-like ones (Llama, Mistral, ...) in transformers 4.37
and 5, with separate projections of queries and keys, norms of them where a model has some, and rotary positions. Those
of transformers' own models are read by `derived/decoder.py`.
"""

import contextlib
import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Tap
from llava_consensus.hosts.call import named
from llava_consensus.hosts.towers import RETURNS_TENSOR, split_heads
from llava_consensus.reduction.saliency import rotate

SLIDING = "sliding_attention"  # type of layers
LENGTHWISE = ("dynamic", "longrope")  # types of rotary embeddings
# Of the check of a layer: rows, the size of their embeddings, the standard deviation of their logits, and how far from
# its view a layer may be in float64 and in other formats.
PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # formats of weights that are not quantised
TRIED_ROWS, EMBEDDED, SPREAD, EXACT, ROUNDED = 8, 0.02, 4.0, 1e-3, 0.2


class LlamaDecoder:
    """A view of an inner language model with `layers`, `norm` and a rotary embedding there or in every layer; whether
    it is one, `check_attention` tells.
    """

    axes = 1  # of positions
    kind: str  # of the layers that angles, arguments and window are of; "" where all are of one

    def __init__(self, module: Any) -> None:
        self.module: Any = module
        self.layers: Any = getattr(module, "layers", ())
        self.embedding_scale: float = getattr(module, "embedding_multiplier", 1.0)
        self.reach: int = getattr(module.config, "max_position_embeddings", 0)
        self.kind = _type_of(module.config, 0)
        self.follows_length = _follows_length(module.config)

    @property
    def kernel(self) -> str:
        """Attention implementation: sdpa, eager, ... Users may change it while a method is attached."""
        kernel: str = getattr(self.module.config, "_attn_implementation", "eager")
        return kernel

    def at(self, layer: int) -> "LlamaDecoder":
        """View whose rotation, arguments and window are those of this layer's type."""
        kind = _type_of(self.module.config, layer)
        if kind == self.kind:
            return self
        view = copy.copy(self)
        view.kind = kind
        return view

    @property
    def window(self) -> int | None:
        """Sliding window of these layers in rows, the row itself included; None for full causal attention."""
        return getattr(self.module.config, "sliding_window", None) if self.kind in ("", SLIDING) else None

    def norm(self, hidden: Tensor) -> Tensor:
        """The norm after the last layer."""
        normed: Tensor = self.module.norm(hidden)
        return normed

    def normed(self, layer: int, hidden: Tensor) -> Tensor:
        """States as the attention of a layer reads them."""
        normed: Tensor = self.layers[layer].input_layernorm(hidden)
        return normed

    def query(self, layer: int, normed: Tensor) -> Tensor:
        """Queries before rotation, by the layer's own modules: [R, L, D] -> [R, H, L, d]."""
        attention = self.layers[layer].self_attn
        return self._heads(attention, attention.q_proj(normed), "q_norm")

    def key(self, layer: int, normed: Tensor) -> Tensor:
        """Keys before rotation: [R, S, D] -> [R, H_kv, S, d]."""
        attention = self.layers[layer].self_attn
        return self._heads(attention, attention.k_proj(normed), "k_norm")

    def scale(self, layer: int) -> float:
        """Scale of the attention logits: of the layer, or 1 / sqrt(head width)."""
        attention = self.layers[layer].self_attn
        scale: float = getattr(attention, "scaling", attention.head_dim**-0.5)
        return scale

    def rotary(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, S, d] of the model's rotary embedding, for positions [R, S]."""
        if hasattr(self.module, "rotary_emb"):
            cos, sin = self.module.rotary_emb(hidden, positions)
            return cos, sin
        rotary = self.layers[0].self_attn.rotary_emb
        if "position_ids" in inspect.signature(rotary.forward).parameters:
            cos, sin = rotary(hidden, positions)
            return cos, sin
        cos, sin = rotary(hidden, seq_len=max(self.reach, hidden.shape[1]))
        return cos[positions], sin[positions]

    def angles(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, S, d] by which attention is calibrated by distance."""
        return self.rotary(hidden, positions)

    def positions(self, layer_arguments: dict[str, Any], rows: int, outer: Mapping[str, Any]) -> Tensor:
        """Position ids [rows, S] that a layer was given."""
        positions: Tensor = layer_arguments["position_ids"]
        return positions.expand(rows, -1)

    def taps(self, layer: int) -> list[Tap]:
        """Taps of the queries and keys of a layer while it runs."""
        attention = self.layers[layer].self_attn
        return [
            Tap(attention.q_proj, lambda output: {"query": self._heads(attention, output, "q_norm")}),
            Tap(attention.k_proj, lambda output: {"key": self._heads(attention, output, "k_norm")}),
        ]

    def value_taps(self, layer: int) -> list[Tap]:
        """Taps of the values of a layer while it runs, in the place of queries and of keys."""
        attention = self.layers[layer].self_attn

        def read(output: Tensor) -> dict[str, Tensor]:
            values = self._heads(attention, output, "v_norm")
            return {"query": values, "key": values}

        return [Tap(attention.v_proj, read)]

    def arguments(self, hidden: Tensor, positions: Tensor, mask: Tensor | None) -> dict[str, Any]:
        """Kwargs of a layer's forward for these positions [R, W] and this mask [R, 1, q, W]: true where a column is
        seen, or additive.
        """
        if mask is not None and mask.dtype == torch.bool and self.kernel == "eager":
            mask = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill(~mask, torch.finfo(hidden.dtype).min)
        changes = {"position_ids": positions, "attention_mask": mask}
        if hasattr(self.module, "rotary_emb"):
            return {**changes, "position_embeddings": self.rotary(hidden, positions)}
        return changes

    @torch.no_grad()
    def check_attention(self, cut: bool) -> None:
        """Holds the attention of the first layer, on a few rows of noise, against what is read of it here: what enters
        it, its norm, queries, keys, scale and rotation. Twins of the modules run, so that no hook fires, no mode
        changes and no number is drawn. Weights that are not there, sharded or on the meta device, are taken on trust.

        Args:
            cut: whether rows leave between layers: then the first layer of each kind is held against its view, and none
                may mix rows but by attention.
        Raises:
            OptionError: the language model works in another way.
        """
        if not self.layers:
            raise self._other("it has no layers like Llama's")
        if cut and any(isinstance(one, nn.Conv1d) for layer in self.layers for one in layer.modules()):
            raise self._other("its layers mix rows by a convolution too")
        check_unpacked(self.module, self.layers[0])
        weights = list(getattr(self.layers[0], "self_attn", self.layers[0]).parameters())
        if any(weight.is_meta or not weight.numel() for weight in weights):
            return
        plain = bool(weights) and all(type(weight.data) is Tensor and weight.dtype in PLAIN for weight in weights)
        plain = plain and not any(_holds_buffers(one) for one in self.layers[0].modules())
        # Apple's devices, flash kernels and masks of transformers 4 know no float64
        exact = plain and self.kernel in ("sdpa", "eager") and RETURNS_TENSOR and weights[0].device.type != "mps"
        try:
            differences = list(self._differences(cut, torch.float64 if exact else None))
        except (AttributeError, ImportError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise self._other(f"its first layers cannot be read ({error})") from error
        for layer, difference in differences:
            if not difference <= (EXACT if exact else ROUNDED):
                raise self._other(f"the attention of layer {layer} differs by {difference:.2g} of its size")

    def _differences(self, cut: bool, dtype: torch.dtype | None) -> Iterator[tuple[int, float]]:
        """Difference of each tried layer from its view, as a share of its attention output."""
        first: dict[Any, int] = {}
        for index, layer in enumerate(self.layers if cut else self.layers[:1]):
            first.setdefault(kind_of(layer.self_attn), index)
        tried = list(first.values())
        reached = [Recorder(layer, ends=index == tried[-1]) for index, layer in enumerate(self.layers)]
        view = copy.copy(self)
        view.module, view.layers = twin(self.module, layers=reached), {}
        like = next(weight for weight in self.layers[0].parameters() if weight.is_floating_point())
        noise = torch.randn(
            1, TRIED_ROWS, self.module.config.hidden_size,
            generator=torch.Generator().manual_seed(0), device="cpu", dtype=torch.float32,
        )  # fmt: skip
        embeds = (EMBEDDED * noise).to(like.device, dtype or like.dtype)
        with torch.autocast(like.device.type, enabled=False):
            run(view.module, inputs_embeds=embeds, use_cache=False)
            yield 0, distance(embeds * self.embedding_scale, reached[0].given[0])
            for index in tried:
                hidden, arguments = reached[index].given
                layer, attention = self.layers[index], twin(self.layers[index].self_attn, dtype)
                entering = Recorder(attention, ends=True)
                parts = {"self_attn": entering, "input_layernorm": twin(layer.input_layernorm, dtype)}
                view.layers[index] = twin(layer, **parts)
                run(view.layers[index], hidden, **arguments)
                states, arguments = entering.given
                yield index, distance(view.normed(index, hidden), states)
                yield index, view._attention_distance(index, attention, states, arguments)

    def _attention_distance(self, layer: int, attention: Any, states: Tensor, arguments: dict[str, Any]) -> float:
        """Distance between a layer's attention output and the one computed from its queries, keys and values."""
        places = torch.arange(TRIED_ROWS, device=states.device)
        positions = places[None] if self.axes == 1 else places[None, :, None].expand(1, -1, self.axes)
        scale = (SPREAD / self._logits(layer, states, positions).std().clamp_min(1e-6)).sqrt()
        states = states * scale.to(states.dtype)
        logits = self._logits(layer, states, positions)
        probability = logits.masked_fill(places > places[:, None], float("-inf")).softmax(-1)
        value = split_heads(attention.v_proj(states), attention.v_proj.out_features // attention.head_dim)
        value = value.to(probability.dtype).repeat_interleave(probability.shape[1] // value.shape[1], 1)
        ours = attention.o_proj((probability @ value).transpose(1, 2).flatten(2).to(states.dtype))
        return distance(ours, attention(hidden_states=states, **arguments)[0])

    def _logits(self, layer: int, states: Tensor, positions: Tensor) -> Tensor:
        """Attention logits [1, H, S, S], in float32 at least."""
        angles, wide = self.at(layer).rotary(states, positions), torch.promote_types(states.dtype, torch.float32)
        query, key = (rotate(one, *angles).to(wide) for one in (self.query(layer, states), self.key(layer, states)))
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        return query @ key.transpose(-1, -2) * self.scale(layer)

    def _other(self, why: str) -> OptionError:
        return OptionError(
            f"language model {type(self.module).__name__} is not adapted to methods that read its attention: {why}. "
            "Take a method that acts after the tower and asks no question of the language model (llava-consensus list)"
        )

    def tables(self) -> Sequence[nn.Module]:
        """Rotary modules that look positions up in a table as long as their own cache; none on current versions."""
        if hasattr(self.module, "rotary_emb"):
            return []
        return [layer.self_attn.rotary_emb for layer in self.layers]

    @staticmethod
    def _heads(attention: Any, states: Tensor, norm: str) -> Tensor:
        heads = split_heads(states, states.shape[-1] // attention.head_dim)
        norm_module = getattr(attention, norm, None)
        return heads if norm_module is None else norm_module(heads)


class Reached(Exception):
    """The last stand-in was called."""


class Recorder:
    """Replaces a module in a trial: records its arguments, and passes the states on or ends the trial."""

    def __init__(self, module: nn.Module, ends: bool) -> None:
        self.module, self.ends = module, ends
        self.given: tuple[Tensor, dict[str, Any]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = named(type(self.module).forward, args, kwargs)
        hidden: Tensor = arguments.pop("hidden_states")
        self.given = hidden, arguments
        if self.ends:
            raise Reached
        return hidden if RETURNS_TENSOR else (hidden,)


def twin(module: nn.Module, dtype: torch.dtype | None = None, **parts: Any) -> Any:
    """A module with the same weights, or copies of them in `dtype`, in evaluation mode, without hooks and with the
    forward of its class; named children are replaced.
    """
    copied: Any = object.__new__(type(module))
    copied.__dict__.update({name: value for name, value in vars(module).items() if name != "forward"})
    children = {name: child for name, child in module._modules.items() if name not in parts}
    weights = {
        name: weight if weight is None or dtype is None else nn.Parameter(weight.detach().to(dtype), False)
        for name, weight in module._parameters.items()
    }
    hooks = {name: type(value)() for name, value in vars(module).items() if name.endswith("_hooks")}
    twins = {name: child if child is None else twin(child, dtype) for name, child in children.items()}
    copied.__dict__.update(hooks, _modules=twins, _parameters=weights, training=False, **parts)
    return copied


def check_unpacked(model: nn.Module, layer: nn.Module) -> None:
    """Raises OptionError for a layer whose weights are not there until the model has run."""
    if any(isinstance(one, nn.Linear) and getattr(one, "weight", None) is None for one in layer.modules()):
        raise OptionError(
            f"language model {type(model).__name__}: its weights are packed until its first forward "
            "(compressed-tensors). Run the model once, or load with CompressedTensorsConfig(dequantize=True), and "
            "attach then"
        )


def _holds_buffers(module: nn.Module) -> bool:
    """True if a projection keeps its weights outside of parameters, as GPTQ, AWQ and torch quantisation do: it runs
    only in the format it was made for.
    """
    return hasattr(module, "in_features") and not isinstance(getattr(module, "weight", None), nn.Parameter)


def run(module: Any, *args: Any, **kwargs: Any) -> None:
    """Runs a module until a stand-in ends it."""
    with contextlib.suppress(Reached):
        module(*args, **kwargs)


def kind_of(attention: nn.Module) -> Any:
    """Equal for attention modules that work alike: all but their weights and their number."""
    told = {name: value for name, value in vars(attention).items() if isinstance(value, int | float | str | None)}
    return type(attention), *sorted((name, str(value)) for name, value in told.items() if name != "layer_idx")


def distance(ours: Tensor, own: Tensor) -> float:
    """Distance relative to the size of `own`."""
    wide = torch.promote_types(own.dtype, torch.float32)
    return float((ours.to(wide) - own.to(wide)).norm() / own.to(wide).norm().clamp_min(1e-12))


def _type_of(config: Any, layer: int) -> str:
    """The type of a layer; "" for models whose layers have one."""
    types = getattr(config, "layer_types", None)
    return types[layer] if types else ""


def _follows_length(config: Any) -> bool:
    """True if rotary angles depend on the length of the sequences read so far, as with dynamic scaling."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [given, *(value for value in given.values() if isinstance(value, Mapping))]  # one for each type of layer
    return any(kind.get("rope_type", kind.get("type")) in LENGTHWISE for kind in kinds)
