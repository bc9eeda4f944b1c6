"""What an attached model must answer, by another route than the package's: transformers' own language model called with
its own arguments, cut to the rows that are left; and saliencies of queries and keys that a patched kernel has seen.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from families import IMAGE
from torch import Tensor
from transformers import AttentionInterface


def called(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """What a model's language model is given of a prompt."""
    found: list[dict[str, Any]] = []
    hook = model.get_decoder().register_forward_pre_hook(lambda _, args, kwargs: found.append(kwargs), with_kwargs=True)
    with torch.no_grad():
        model(**inputs, use_cache=False)
    hook.remove()
    return found[0]


def cut(value: Any, rows: Tensor, size: int, visual: Tensor) -> Any:
    """An argument of the language model of a prompt of `size` rows, for the rows in this order."""
    if isinstance(value, dict):
        return {name: cut(one, rows, size, visual) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(cut(one, rows, size, visual) for one in value)
    if not isinstance(value, Tensor):
        return value
    features = value.ndim == 2 and value.is_floating_point()  # that are added between layers
    if value.ndim and len(value) == len(visual) and (len(visual) != size or features):
        return value[torch.isin(visual, rows)]
    for axis in range(value.ndim):
        if value.shape[axis] == size:
            value = value.index_select(axis, rows)
    return value


def answer(model: Any, inputs: dict[str, Any], outcomes: list[Any], keeps: bool, image: int = IMAGE) -> Tensor:
    """Logits [V] after one prompt without padding, of whose images these are the outcomes, in order."""
    call, size = called(model, inputs), inputs["input_ids"].shape[1]
    visual = (inputs["input_ids"][0] == image).nonzero()[:, 0]
    left, merged = torch.ones(size, dtype=torch.bool), {}
    first = 0
    for outcome in outcomes:
        tokens = visual[first : first + outcome.before]  # structural rows stand behind
        first += outcome.before + outcome.structural
        tile, whole = outcome.origin[0], len(outcome.reductions) == 1
        for part, reduction in outcome.reductions:
            own = tokens if whole else tokens[tile == tile[0] + part]
            left[own] = False
            source = own[reduction.source[0]]
            left[source] = True
            merged |= dict(zip(source.tolist(), reduction.tokens[0], strict=True))
    rows = left.nonzero()[:, 0]
    arguments = {name: cut(value, rows, size, visual) for name, value in call.items()}
    for place, row in enumerate(rows.tolist()):
        if row in merged:
            arguments["inputs_embeds"][:, place] = merged[row].to(arguments["inputs_embeds"])
    positions = call.get("position_ids")
    if positions is None or positions.ndim == 2:
        first_position = 0 if positions is None else int(positions[0, 0])
        arguments["position_ids"] = first_position + (rows if keeps else torch.arange(len(rows)))[None]
    if arguments.get("attention_mask") is None:
        arguments["attention_mask"] = torch.ones(1, len(rows), dtype=torch.long)
    with torch.no_grad():
        states = model.get_decoder()(**arguments)[0][:, -1:]
    return (states if states.shape[-1] == model.config.get_text_config().vocab_size else head(model, states))[0, -1]


def head(model: Any, states: Tensor) -> Tensor:
    """Logits as the model makes them of the last states."""
    config = model.config.get_text_config()
    logits = model.get_output_embeddings()(states) / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return torch.tanh(logits / cap) * cap if cap else logits


@contextlib.contextmanager
def kernel_calls(kernel: str = "sdpa") -> Iterator[list[tuple[Any, ...]]]:
    """Module, query, key and scale of every call of a kernel, by the one that is registered for all models."""
    calls: list[tuple[Any, ...]] = []
    own = AttentionInterface._global_mapping[kernel]

    def seen(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any) -> Any:
        calls.append((module, query, key, options.get("scaling") or query.shape[-1] ** -0.5))
        return own(module, query, key, value, attention_mask, **options)

    with mock.patch.dict(AttentionInterface._global_mapping, {kernel: seen}):
        yield calls


def probabilities(query: Tensor, key: Tensor, scale: float, causal: bool) -> Tensor:
    """Softmax of one entry, mean over heads: [n, n]."""
    key = key.repeat_interleave(len(query) // len(key), 0)
    logits = query @ key.transpose(-1, -2) * scale
    if causal:
        logits = logits.masked_fill(~torch.ones_like(logits, dtype=torch.bool).tril(), -math.inf)
    return logits.softmax(-1).mean(0)


def cross(model: Any, inputs: dict[str, Any], layer: int, image: int = IMAGE) -> list[Tensor]:
    """SCAP of each image of a prompt, by the first attention on the embeddings; the layers before it are left out."""
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None) or decoder.model.layers
    with contextlib.ExitStack() as stack:
        for one in layers[:layer]:
            stack.enter_context(mock.patch.object(one, "forward", lambda hidden, *_, **__: hidden))
        calls = stack.enter_context(kernel_calls())
        with torch.no_grad():
            model(**inputs, use_cache=False)
    inside = {id(module) for module in model.get_decoder().modules()}
    _, query, key, scale = next(call for call in calls if id(call[0]) in inside)
    weights = probabilities(query[0], key[0], scale, causal=True)
    visual = inputs["input_ids"][0] == image
    found = []
    for start, stop in spans(visual):
        text = torch.arange(len(visual)) >= stop
        rows = weights[text & ~visual][:, start:stop]
        found.append((rows / (rows.sum(-1, keepdim=True) + 1e-6)).mean(0))
    return found


def spans(visual: Tensor) -> list[tuple[int, int]]:
    edges = torch.nn.functional.pad(visual.int(), (1, 1)).diff()
    return list(zip((edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist(), strict=True))


def received(query: Tensor, key: Tensor, scale: float, members: Tensor) -> Tensor:
    """Attention that the patches of each token receive from the other patches of a tile: [N]."""
    weights = probabilities(query, key, scale, causal=False)
    weights = weights - torch.diag(weights.diagonal())
    return (weights.sum(0) / (len(weights) - 1))[members].mean(1)
