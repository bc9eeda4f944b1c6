"""Qwen-VL and Qwen-VL-Chat of 2023 (`QWenLMHeadModel`): a ViT without class token, 1024 patches, and a resampler, whose
256 queries each look at all patches. The language model reads the queries.

A query has no attention of its own in the tower: what a method reads of patches reaches it by the resampler's attention
R [256, 1024], so that the saliency of a query is R p, of patches with saliency p, its keys R k and its features R v.
Positions follow the rows of the cache, so reduced prompts are always numbered anew.

Attribute paths were checked against `modeling_qwen.py` in Immerso-AIIP-Ltd/Qwen-VL-Chat at e176543, a copy of the code
that the checkpoint carries; those of the tower against published copies of its `visual.py`.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from llava_consensus.errors import OptionError
from llava_consensus.hosts.base import Offer, Overlay, Tap, Tiles
from llava_consensus.hosts.remote import entrances
from llava_consensus.hosts.remote.entrances import RemoteModel, real_rows, rows_with
from llava_consensus.hosts.sequence import Assembled, RowKinds
from llava_consensus.hosts.towers import split_heads
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.tokens import Need


class QwenVLTower:
    """The blocks of the ViT, with the resampler after them; both keep their rows in front of the batch."""

    classes = 0
    members: Tensor | None = None
    offers = frozenset({Need.ATTENTION, Need.FEATURES})

    def __init__(self, visual: Any) -> None:
        self.visual, self.blocks = visual, list(visual.transformer.resblocks)
        self.feature_block = len(self.blocks) - 1
        self.tokens: int = visual.attn_pool.num_queries
        self.side = round(self.tokens**0.5)

    def encode(self, pixels: Tensor) -> Tensor:
        """Pictures through tower and resampler: [P, 3, h, w] -> [P, 256, D]."""
        return self.visual(pixels)

    def project(self, features: Tensor) -> Tensor:
        """Not offered: the resampler takes all patches at once."""
        raise NotImplementedError

    def scale(self, block: int) -> float:
        """One over the square root of the width of a head."""
        attention = self.blocks[block].attn
        return float((attention.embed_dim // attention.num_heads) ** -0.5)

    def taps(self, needs: frozenset[Need], features: int, attention: int) -> list[Tap]:
        """The projection of one block, the output of another, and what the resampler looks at."""
        heads, taps = self.blocks[attention].attn.num_heads, []

        def packed(output: Tensor) -> dict[str, Tensor]:
            query, key, _ = split_heads(output.transpose(0, 1), heads).chunk(3, -1)  # [P, H, n, 3 d], head by head
            return {"query": query, "key": key}

        if Need.ATTENTION in needs:
            taps.append(Tap(self.blocks[attention].attn.in_proj, packed))
        if Need.FEATURES in needs:
            taps.append(Tap(self.blocks[features], lambda output: {"features": output.transpose(0, 1)}))
        if taps:
            taps.append(Tap(self.visual.attn_pool.attn, lambda output: {"pooling": output[1]}))
        return taps


class QwenDecoder:
    """The language model: queries, keys and values in one projection, positions by place in the cache. Its angles are
    those of prompts within `seq_length`; longer ones are stretched by the model, which the probe leaves out.
    """

    kernel, cache_axis, follows_length, embedding_scale = "eager", 1, False, 1.0

    def __init__(self, module: Any) -> None:
        self.module: Any = module
        self.layers = module.h
        self.reach: int = module.config.seq_length

    def norm(self, hidden: Tensor) -> Tensor:
        """The norm after the last layer."""
        return self.module.ln_f(hidden)

    def normed(self, layer: int, hidden: Tensor) -> Tensor:
        """States as the attention of a layer reads them."""
        return self.layers[layer].ln_1(hidden)

    def query(self, layer: int, normed: Tensor) -> Tensor:
        """Queries before rotation: [R, L, D] -> [R, H, L, d]."""
        return self._projected(layer, normed)[0]

    def key(self, layer: int, normed: Tensor) -> Tensor:
        """Keys before rotation: [R, S, D] -> [R, H, S, d]."""
        return self._projected(layer, normed)[1]

    def scale(self, layer: int) -> float:
        """One over the square root of the width of a head."""
        return float(self.layers[layer].attn.head_dim ** -0.5)

    def rotary(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, S, d] for positions [R, S]."""
        cos, sin = (angles[0, :, 0].to(hidden.device) for angles in self.module.rotary_emb(positions.shape[1]))
        return cos[positions], sin[positions]

    def _projected(self, layer: int, normed: Tensor) -> tuple[Tensor, ...]:
        attention = self.layers[layer].attn
        parts = attention.c_attn(normed).split(attention.split_size, dim=2)
        return tuple(split_heads(part, attention.num_heads) for part in parts)


class QwenVLChat(RemoteModel):
    """A view of a `QWenLMHeadModel`."""

    offer = Offer(QwenVLTower.offers)
    inlet = "transformer.wte.forward"

    @cached_property
    def tower(self) -> QwenVLTower:
        """The vision side."""
        return QwenVLTower(self.module.transformer.visual)

    @cached_property
    def decoder(self) -> QwenDecoder:
        """The language side."""
        return QwenDecoder(self.module.transformer)

    @property
    def marks(self) -> tuple[int, int, int]:
        """Ids of the start of a picture, of its end, and of what fills its rows up."""
        start: int = self.module.config.visual["image_start_id"]
        return start, start + 1, start + 2

    def check(self, method: Method) -> None:
        """Raises OptionError for what this model cannot do."""
        super().check(method)
        if method.positions != "renumber":
            raise OptionError(
                f"positions={method.positions}: Qwen-VL numbers its rows by their place in the cache. Take renumber"
            )

    @staticmethod
    def give(attachment: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
        """The assembled prompts in place of the embeddings of their ids."""
        words = attachment.here.module.transformer.wte
        features = entrances.taken(attachment)
        return (plain or type(words).forward.__get__(words))(*args, **kwargs) if features is None else features

    def kinds(self, inputs: dict[str, Any]) -> RowKinds | None:
        """Every span between the marks of a picture is one."""
        ids, (start, end, _) = inputs["input_ids"].cpu(), self.marks
        rows, first = (ids == start).nonzero().T
        last = (ids == end).nonzero()[:, 1]
        if not len(rows):
            return None
        size, token = self.tower.tokens, torch.full_like(ids, -1)
        if len(first) != len(last) or not bool((last - first == size + 1).all()):
            raise OptionError(
                f"a picture of this model is {size} rows between the ids {start} and {end}: pass the ids of the "
                "model's own tokenizer, and truncate nothing"
            )
        picture, places = token.clone(), first[:, None] + 1 + torch.arange(size)
        picture[rows[:, None], places] = torch.arange(len(rows))[:, None].expand_as(places)
        token[rows[:, None], places] = torch.arange(size).expand_as(places)
        tile = torch.where(picture >= 0, 0, -1)
        return RowKinds(real_rows(inputs).cpu(), picture, tile, token, entrances.answer_rows(inputs))

    def pixels(self, inputs: dict[str, Any]) -> Tensor:
        """The pictures that the spans name by path or address, read by the model's own `visual.encode`."""
        visual, (start, _, pad) = self.module.transformer.visual, self.marks
        paths = []
        for row, place in (inputs["input_ids"] == start).nonzero().tolist():
            span = inputs["input_ids"][row, place + 1 : place + 1 + self.tower.tokens].tolist()
            paths.append(bytes(span[: span.index(pad)] if pad in span else span).decode("utf-8"))
        return type(visual).encode(_Reader(visual), paths).to(visual.conv1.weight)

    def assembled(self, inputs: dict[str, Any], kinds: RowKinds, tiles: list[Tiles]) -> Assembled:
        """Words, and queries in the rows of the spans."""
        words = self.module.transformer.wte
        embeds = type(words).forward(words, inputs["input_ids"])
        embeds = rows_with(kinds.picture >= 0, torch.cat([tile.projected.flatten(0, 1) for tile in tiles]), embeds)
        real = kinds.real.to(embeds.device)
        positions = torch.arange(real.shape[1], device=embeds.device).expand(real.shape)
        return Assembled(embeds, real, positions, entrances.word_channels(inputs, self.marks[2]))

    def features(self, out: Assembled) -> Tensor:
        """The whole prompts."""
        return out.embeds

    def arguments(self, inputs: dict[str, Any], out: Assembled) -> dict[str, Any]:
        """Ids without the mark at which the model would read pictures itself."""
        arguments, (start, end, _) = entrances.word_arguments(out), self.marks
        ids = arguments["input_ids"]
        return {**arguments, "input_ids": ids.masked_fill(ids == start, end), "position_ids": None}


class _Reader(Overlay):
    """A tower that gives the pixels it is handed, to read pictures as the model itself does."""

    def __call__(self, pixels: Tensor) -> Tensor:
        return pixels
