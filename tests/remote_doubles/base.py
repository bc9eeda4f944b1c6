"""What the doubles share. `generate` is a greedy loop that calls them as that of transformers 4.37 did, for which the
models were written: later versions no longer take their caches of tuples.
"""

import math
from functools import partial
from typing import Any
from zlib import crc32

import numpy
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

Norm = partial(nn.RMSNorm, eps=1e-6)


class Greedy(PreTrainedModel, GenerationMixin):
    """A model with a greedy `generate`."""

    def _init_weights(self, module: Any) -> None:
        """Weights come from `built` or from a checkpoint."""

    @torch.no_grad()
    def generate(self, inputs: Any = None, input_ids: Any = None, **given: Any) -> Tensor:
        ids, count, past = inputs if input_ids is None else input_ids, given.pop("max_new_tokens"), None
        names = ("token_type_ids", "images", "attention_mask", "position_ids")
        given = {name: given[name] for name in names if given.get(name) is not None}
        given.setdefault("attention_mask", torch.ones_like(ids))
        for _ in range(count):
            step = self.prepare_inputs_for_generation(ids, past_key_values=past, use_cache=True, **given)
            out = self(**step, return_dict=True)
            past, word = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat((ids, word), 1)
            given["attention_mask"] = torch.cat((given["attention_mask"], torch.ones_like(word)), 1)
            if "token_type_ids" in given:
                given["token_type_ids"] = torch.cat((given["token_type_ids"], torch.zeros_like(word)), 1)
        return ids


def built(model_class: Any, config: Any) -> Any:
    """A model with random weights of a size at which answers depend on everything. They follow from names, so that a
    double and the code it stands for get the same.
    """
    model = model_class(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            wide = "position" in name or name.endswith(("query", "pos_embed"))
            scale = 0.5 if wide else 1.2 / math.sqrt(parameter.shape[-1])
            own = torch.Generator().manual_seed(crc32(f"0/{name}".encode()))
            parameter.data = torch.empty(parameter.shape).normal_(std=scale, generator=own)
        else:
            parameter.data.fill_(1.0 if name.endswith("weight") or ".ls" in name else 0.0)
    return model.eval()


def pixels_of(image: Image.Image, size: int) -> Tensor:
    """An image as numbers around 0: [3, size, size]."""
    values = numpy.array(image.convert("RGB").resize((size, size)), dtype=numpy.float32)
    return torch.from_numpy(values).permute(2, 0, 1) / 127.5 - 1


def angles(positions: Tensor, frequencies: Tensor) -> list[Tensor]:
    """Cosines and sines [..., S, d] of rotary positions [..., S]."""
    half = positions[..., None] * frequencies
    both = torch.cat((half, half), -1)
    return [both.cos(), both.sin()]


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, -1)
    return (states * cos + torch.cat((-second, first), -1) * sin).to(states.dtype)


def causal(mask: Tensor, new: int, extra: int) -> Tensor:
    """Added to logits [R, 1, new, extra + new]: 0 where a column is seen; `mask` [R, extra + new]."""
    seen = torch.ones(new, extra + new, dtype=torch.bool).tril(extra) & mask[:, None, None].bool()
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


def answer(logits: Tensor, labels: Any, cache: Any) -> CausalLMOutputWithPast:
    loss = None if labels is None else cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
