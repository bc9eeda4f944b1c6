"""Qwen-VL and Qwen-VL-Chat of 2023 (`QWenLMHeadModel`): a ViT without class token, 1024 patches, and a resampler, whose
256 queries each look at all patches. The language model reads the queries.

A query has no attention in the tower: a method's tensors of patches are carried over by the resampler's attention
R [256, 1024], so that the saliency of a query is R p, of patches with saliency p, its keys R k and its features R v.
Positions follow the rows of the cache, so reduced prompts are always numbered again.

Attribute paths were checked against `modeling_qwen.py` in Immerso-AIIP-Ltd/Qwen-VL-Chat at e176543, a copy of the code
that the checkpoint carries; those of the tower against published copies of its `visual.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.images import Image, one_image
from llava_consensus.hosts.kernels import KernelCall
from llava_consensus.hosts.remote.entrances import EncodedImage, RemoteModel, rows_with
from llava_consensus.hosts.rows import Rows
from llava_consensus.hosts.taps import Tap, split_heads
from llava_consensus.hosts.units import visual_rows
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.saliency import rotate
from llava_consensus.reduction.tokens import Need


class QwenVLChat(RemoteModel):
    offers = frozenset({Need.ATTENTION, Need.FEATURES})
    cache_axis = 1

    @classmethod
    def check(cls, method: Method, model: str) -> None:
        super().check(method, model)
        if method.positions != "renumber":
            raise OptionError(
                f"positions={method.positions}: Qwen-VL numbers its rows by their place in the cache. Take renumber"
            )

    @property
    def vision(self) -> Any:
        """The ViT with the resampler after it; both keep their rows in front of the batch."""
        return self.module.transformer.visual

    @property
    def blocks(self) -> Any:
        return self.vision.transformer.resblocks

    @property
    def tokens(self) -> int:
        return int(self.vision.attn_pool.num_queries)

    @property
    def marks(self) -> tuple[int, int, int]:
        """Ids of the start of an image, of its end, and of its filler rows."""
        start: int = self.module.config.visual["image_start_id"]
        return start, start + 1, start + 2

    def encode(self, pixels: Tensor) -> Tensor:
        return self.vision(pixels)

    def states(self, output: Any) -> dict[str, Tensor]:
        return {"features": output.transpose(0, 1)}

    def attention(self, block: int) -> tuple[list[Tap], float]:
        attention = self.blocks[block].attn
        heads = attention.num_heads

        def packed(output: Tensor) -> dict[str, Tensor]:
            query, key, _ = split_heads(output.transpose(0, 1), heads).chunk(3, -1)  # [P, H, n, 3 d], head by head
            return {"query": query, "key": key}

        return [Tap(attention.in_proj, packed)], float((attention.embed_dim // heads) ** -0.5)

    def pooling(self) -> list[Tap]:
        return [Tap(self.vision.attn_pool.attn, lambda output: {"pooling": output[1]})]

    def first_attention(self, embeds: Tensor, inputs: dict[str, Any], rotated: bool) -> KernelCall:
        """Queries and keys of the first layer. Its angles are those of prompts within `seq_length`; longer ones are
        stretched by the model, which the probe leaves out.
        """
        decoder = self.module.transformer
        attention = decoder.h[0].attn
        parts = attention.c_attn(decoder.h[0].ln_1(embeds)).split(attention.split_size, dim=2)
        query, key, _ = (split_heads(part, attention.num_heads) for part in parts)
        if rotated:
            cos, sin = (part[0, :, 0].to(embeds.device)[None] for part in decoder.rotary_emb(embeds.shape[1]))
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        return KernelCall(attention, query, key, key, None, {}, None)

    def images(self, inputs: dict[str, Any]) -> list[Image]:
        ids, (start, end, _) = inputs["input_ids"].cpu().numpy(), self.marks
        first, last, size = np.argwhere(ids == start), np.argwhere(ids == end), self.tokens
        if len(first) != len(last) or not (last[:, 1] - first[:, 1] == size + 1).all():
            raise OptionError(
                f"an image of this model is {size} rows between the ids {start} and {end}: pass the ids of the "
                "model's own tokenizer, and truncate nothing"
            )
        return [one_image(row, place + 1 + np.arange(size)) for row, place in first.tolist()]

    def pixels(self, inputs: dict[str, Any]) -> Tensor:
        """The images that the spans name by path or address, read by the model's own `visual.encode`."""
        visual, (start, _, pad) = self.vision, self.marks
        paths = []
        for row, place in (inputs["input_ids"] == start).nonzero().tolist():
            span = inputs["input_ids"][row, place + 1 : place + 1 + self.tokens].tolist()
            paths.append(bytes(span[: span.index(pad)] if pad in span else span).decode("utf-8"))
        pixels: Tensor = type(visual).encode(_Reader(visual), paths)
        return pixels.to(visual.conv1.weight)

    def assembled(self, inputs: dict[str, Any], images: list[Image], encoded: list[EncodedImage]) -> Tensor:
        words, ids = self.module.transformer.wte, inputs["input_ids"]
        embeds = type(words).forward(words, ids)
        return rows_with(visual_rows(images, ids.shape), torch.cat([one.projected[0] for one in encoded]), embeds)

    def arguments(self, inputs: dict[str, Any], rows: Rows | None) -> dict[str, Any]:
        """Ids without the mark at which the model would read images itself."""
        ids, (start, end, pad) = inputs["input_ids"], self.marks
        if rows is not None:
            ids = ids.gather(1, rows.index).masked_fill(~rows.shown, pad)
        return {"input_ids": ids.masked_fill(ids == start, end), "position_ids": None}

    def features(self, embeds: Tensor, arguments: dict[str, Any], real: Tensor) -> Tensor:
        return embeds

    def install(self, give: Callable[..., Any]) -> list[Any]:
        return [self.module.transformer.wte.register_forward_hook(partial(_behind, give))]


def _behind(give: Callable[..., Any], module: Any, args: Any, output: Tensor) -> Any:
    return give(output)


class _Reader:
    """A tower that returns its input pixels, to read images as the model itself does."""

    def __init__(self, tower: Any) -> None:
        self._tower = tower

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tower, name)

    def __call__(self, pixels: Tensor) -> Tensor:
        return pixels
