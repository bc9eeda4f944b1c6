"""What the doubles share. `generate` is a greedy loop that calls them as that of transformers 4.37 did, for which the
models were written: later versions no longer take their caches of tuples.
"""

import math
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import numpy
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class Greedy(PreTrainedModel, GenerationMixin):
    """A model with a greedy `generate`."""

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


class LlavaLanguage(Greedy):
    """What forks of LLaVA share: generation, and a language model called with embeddings."""

    def prepare_inputs_for_generation(
        self,
        input_ids: Any,
        past_key_values: Any = None,
        attention_mask: Any = None,
        inputs_embeds: Any = None,
        **kwargs: Any,
    ) -> Any:
        ids = input_ids[:, -1:] if past_key_values else input_ids
        rest = {"past_key_values": past_key_values, "attention_mask": attention_mask, "images": kwargs.get("images")}
        return {"input_ids": ids, **rest, "use_cache": True}

    def answered(self, labels: Any, **inputs: Any) -> CausalLMOutputWithPast:
        """Logits of the language model, and the loss where there are labels."""
        inner = self.model(**inputs, use_cache=True)
        return answer(self.lm_head(inner[0]), labels, inner.past_key_values)


def held(cache: Any) -> int:
    return cache.get_seq_length() if hasattr(cache, "get_seq_length") else cache[-1][-1].shape[-2]


def joined(ids: Tensor, marks: Tensor, features: Iterator[Tensor], embed: Any) -> tuple[Tensor, Tensor]:
    """A row's embeddings with the next features at every place of an image (-200), and its labels."""
    parts, labels, start = [], [], 0
    for place in (*torch.where(ids == -200)[0].tolist(), len(ids)):
        parts.append(embed(ids[start:place]))
        labels.append(marks[start:place])
        if place < len(ids):
            parts.append(next(features))
            labels.append(marks.new_full((len(parts[-1]),), -100))
        start = place + 1
    return torch.cat(parts), torch.cat(labels)


def built(model_class: Any, config: Any, seed: int) -> Any:
    """A model with random weights of a size at which answers depend on everything. They follow from seed and name, so
    that a double and the code it stands for get the same.
    """
    model = model_class(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            wide = "position" in name or name.endswith(("query", "pos_embed"))
            scale = 0.5 if wide else 1.2 / math.sqrt(parameter.shape[-1])
            own = torch.Generator().manual_seed(crc32(f"{seed}/{name}".encode()))
            parameter.data = torch.empty(parameter.shape).normal_(std=scale, generator=own)
        else:
            parameter.data.fill_(1.0 if name.endswith("weight") or ".ls" in name else 0.0)
    return model.eval()


def pixels_of(image: Image.Image, size: int) -> Tensor:
    """An image as numbers around 0: [3, size, size]."""
    values = numpy.array(image.convert("RGB").resize((size, size)), dtype=numpy.float32)
    return torch.from_numpy(values).permute(2, 0, 1) / 127.5 - 1


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, -1)
    return (states * cos + torch.cat((-second, first), -1) * sin).to(states.dtype)


def causal(mask: Tensor, new: int, extra: int) -> Tensor:
    """Added to logits [R, 1, new, extra + new]: 0 where a column is seen; `mask` [R, extra + new]."""
    seen = torch.ones(new, extra + new, dtype=torch.bool).tril(extra) & mask[:, None, None].bool()
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, states: Tensor) -> Tensor:
        wide = states.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(states) * self.weight


def answer(logits: Tensor, labels: Any, cache: Any) -> CausalLMOutputWithPast:
    loss = (
        None if labels is None else nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    )
    return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
