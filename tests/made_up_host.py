"""A vision-language model that exists nowhere, and its host, to prove that nothing of LLaVA is left in what all hosts
share: no class token, a merger that makes one token of 2 x 2 patches, positions of three axes, queries, keys and values
in one projection, and placeholders that stand for whole pictures. Random weights; nothing is loaded.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from llava_consensus.hosts.base import Tap
from llava_consensus.hosts.old_attachment import Attachment
from llava_consensus.hosts.sequence import Assembled, RowKinds, pad_left
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.tokens import Need

SIDE, TOKENS = 8, 16  # patches in a row of the picture; tokens of a picture, one for 2 x 2 patches
WIDTH, HEADS, KEY_HEADS, HEAD = 32, 4, 2, 8  # of the language model
SIGHT = 24  # width of the tower, which has two heads
IMAGE = -1  # id of a picture
AXES = 3  # time, row, column


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, -1)
    return states * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


class SightBlock(nn.Module):
    """A block of the tower: one projection makes queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(SIGHT), nn.Linear(SIGHT, 3 * SIGHT), nn.Linear(SIGHT, SIGHT)
        self.mlp = nn.Sequential(
            nn.LayerNorm(SIGHT), nn.Linear(SIGHT, 2 * SIGHT), nn.GELU(), nn.Linear(2 * SIGHT, SIGHT)
        )

    def forward(self, states: Tensor) -> Tensor:  # [T, n, D_v]
        query, key, value = self.qkv(self.norm(states)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        states = states + self.out(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return states + self.mlp(states)


class Sight(nn.Module):
    """The tower, with its merger."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.places = nn.Linear(12, SIGHT), nn.Parameter(torch.empty(SIDE * SIDE, SIGHT))
        self.blocks = nn.ModuleList(SightBlock() for _ in range(3))
        self.merger = nn.Linear(4 * SIGHT, WIDTH)
        grid = torch.arange(SIDE * SIDE).view(SIDE // 2, 2, SIDE // 2, 2)
        self.members = grid.permute(0, 2, 1, 3).reshape(TOKENS, 4)

    def forward(self, pixels: Tensor) -> Tensor:  # [T, 64, 12] -> [T, 16, D]
        states = self.patches(pixels) + self.places
        for block in self.blocks:
            states = block(states)
        return self.merger(states[:, self.members].flatten(2))


class Cache:
    """Keys and values, layer by layer, each with a length of its own."""

    def __init__(self) -> None:
        self.layers: list[Any] = []

    def get_seq_length(self, layer: int = 0) -> int:
        return self.layers[layer].keys.shape[2] if len(self.layers) > layer else 0

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if len(self.layers) == layer:
            self.layers.append(CacheLayer(key, value))
        else:
            old = self.layers[layer]
            self.layers[layer] = CacheLayer(torch.cat((old.keys, key), 2), torch.cat((old.values, value), 2))
        return self.layers[layer]


class CacheLayer(NamedTuple):
    keys: Tensor
    values: Tensor


class Layer(nn.Module):
    """A layer of the language model: one projection makes queries, keys and values."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * HEAD), nn.Linear(HEADS * HEAD, WIDTH)
        self.mlp = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))

    def split(self, states: Tensor) -> tuple[Tensor, ...]:
        """Projected rows [R, S, ...] as queries, keys and values [R, heads, S, d]."""
        return states.unflatten(-1, (-1, HEAD)).transpose(1, 2).split((HEADS, KEY_HEADS, KEY_HEADS), 1)

    def forward(
        self,
        hidden: Tensor,
        *,
        places: Tensor,
        turns: tuple[Tensor, Tensor],
        mask: Tensor | None,
        past_key_values: Cache,
    ) -> Tensor:
        query, key, value = self.split(self.qkv(self.norm(hidden)))
        query, key = rotate(query, *turns), rotate(key, *turns)
        key, value = past_key_values.update(self.index, key, value)
        plain = mask is None and hidden.shape[1] > 1
        out = scaled_dot_product_attention(query, key, value, mask, is_causal=plain, enable_gqa=True)
        hidden = hidden + self.out(out.transpose(1, 2).flatten(2))
        return hidden + self.mlp(hidden)


class Language(nn.Module):
    """The inner language model."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Layer(index) for index in range(4))
        self.last_norm = nn.RMSNorm(WIDTH)

    def turns(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [R, S, d]; each axis [R, S, 3] turns pairs of its own."""
        axis = torch.tensor([0, 0, 1, 2])
        angle = places[..., axis].float() * 10.0 ** -torch.tensor([0.0, 1.0, 0.0, 0.0])
        angle = torch.cat((angle, angle), -1)
        return angle.cos(), angle.sin()

    def forward(self, embeds: Tensor, places: Tensor, attention_mask: Tensor, past_key_values: Cache) -> Tensor:
        turns, mask = self.turns(places), causal(attention_mask, embeds.shape[1])
        for layer in self.layers:
            embeds = layer(embeds, places=places, turns=turns, mask=mask, past_key_values=past_key_values)
        return self.last_norm(embeds)


def causal(real: Tensor, new: int) -> Tensor:
    """[R, columns] -> [R, 1, new, columns]: what the last `new` rows see; padding sees itself."""
    place = torch.arange(real.shape[1])
    row = place[real.shape[1] - new :, None]
    return (((place <= row) & real[:, None].bool()) | (place == row))[:, None]


class MadeUpModel(nn.Module):
    """Sight, language, and a head of words."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.sight, self.language, self.head = Sight(), Language(), nn.Linear(WIDTH, 64, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=1.5 / math.sqrt(parameter.shape[-1]), generator=generator)

    def assemble(self, ids: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings, places and mask of prompts [R, L], left-padded with 0, each picture in place of its id."""
        return self.place(ids, self.sight(pixels))

    def place(self, ids: Tensor, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same with pictures [P, 16, D] that went through the tower."""
        seen, rows = iter(pictures), []
        for row in ids:
            parts, places, now = [], [], 0
            for word in row[row != 0].tolist():
                if word == IMAGE:
                    parts.append(next(seen))
                    cell = torch.arange(TOKENS)
                    places.append(torch.stack((cell * 0, cell // 4, cell % 4), -1) + now)
                    now += 4
                else:
                    parts.append(self.language.words(torch.tensor([word])))
                    places.append(torch.full((1, AXES), now))
                    now += 1
            rows.append((torch.cat(parts), torch.cat(places)))
        width = max(len(one) for one, _ in rows)
        pad = nn.functional.pad
        embeds = torch.stack([pad(one, (0, 0, width - len(one), 0)) for one, _ in rows])
        places = torch.stack([pad(own, (0, 0, width - len(own), 0)) for _, own in rows])
        mask = torch.stack([torch.arange(width) >= width - len(one) for one, _ in rows])
        return embeds, places, mask

    def forward(self, ids: Tensor, pixels: Tensor | None = None, past: Any = None) -> tuple[Tensor, Any]:
        """Logits [R, S, words] and what the next step must be given."""
        if past is None:
            embeds, places, mask = self.assemble(ids, torch.empty(0, SIDE * SIDE, 12) if pixels is None else pixels)
            cache, following = Cache(), places.amax((1, 2)) + 1
        else:
            cache, following, mask = past
            embeds, places = self.language.words(ids), following[:, None, None].expand(-1, ids.shape[1], AXES)
            mask, following = torch.cat((mask, torch.ones_like(ids, dtype=torch.bool)), 1), following + 1
        states = self.language(embeds, places, attention_mask=mask, past_key_values=cache)
        return self.head(states), (cache, following, mask)

    @torch.no_grad()
    def generate(self, ids: Tensor, pixels: Tensor, count: int = 5) -> Tensor:
        """The next `count` words of every prompt, greedily: [R, count]."""
        logits, past = self(ids, pixels)
        said = [logits[:, -1:].argmax(-1)]
        while len(said) < count:
            logits, past = self(said[-1], past=past)
            said.append(logits[:, -1:].argmax(-1))
        return torch.cat(said, 1)


class MadeUpTower:
    tokens, side, classes, feature_block = TOKENS, SIDE // 2, 0, 2
    offers = frozenset({Need.ATTENTION, Need.FEATURES})

    def __init__(self, module: MadeUpModel) -> None:
        self.module, self.blocks, self.members = module, list(module.sight.blocks), module.sight.members

    def encode(self, pixels: Tensor) -> Tensor:
        encoded: Tensor = self.module.sight(pixels)
        return encoded

    def project(self, features: Tensor) -> Tensor:
        raise NotImplementedError("the merger takes four patches at a time")

    def scale(self, block: int) -> float:
        return float((SIGHT // 2) ** -0.5)

    def taps(self, needs: frozenset[Need], features: int, attention: int) -> list[Tap]:
        def fused(output: Tensor) -> dict[str, Tensor]:
            query, key, _ = output.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            return {"query": query, "key": key}

        found = [Tap(self.blocks[attention].qkv, fused)] if Need.ATTENTION in needs else []
        if Need.FEATURES in needs:
            found.append(Tap(self.blocks[features], lambda output: {"features": output}))
        return found


class MadeUpDecoder:
    kernel, reach, follows_length, embedding_scale = "sdpa", 4096, False, 1.0

    def __init__(self, module: MadeUpModel) -> None:
        self.module: Any = module.language
        self.layers: Any = module.language.layers

    def norm(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.module.last_norm(hidden)
        return normed

    def normed(self, layer: int, hidden: Tensor) -> Tensor:
        normed: Tensor = self.layers[layer].norm(hidden)
        return normed

    def query(self, layer: int, normed: Tensor) -> Tensor:
        query: Tensor = self.layers[layer].split(self.layers[layer].qkv(normed))[0]
        return query

    def key(self, layer: int, normed: Tensor) -> Tensor:
        key: Tensor = self.layers[layer].split(self.layers[layer].qkv(normed))[1]
        return key

    def scale(self, layer: int) -> float:
        return float(HEAD**-0.5)

    def rotary(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.module.turns(positions)
        return cos, sin

    def positions(self, given: dict[str, Any], rows: int, outer: Any) -> Tensor:
        places: Tensor = given["places"]
        return places

    def taps(self, layer: int) -> list[Tap]:
        own = self.layers[layer]
        return [Tap(own.qkv, lambda output: dict(zip(("query", "key"), own.split(output)[:2], strict=True)))]

    def arguments(self, hidden: Tensor, positions: Tensor, mask: Tensor | None) -> dict[str, Any]:
        return {"places": positions, "turns": self.module.turns(positions), "mask": mask}

    def tables(self) -> list[nn.Module]:
        return []


class MadeUp:
    """The host: see `attachment.Model`."""

    most_tiles = 1

    def __init__(self, module: MadeUpModel) -> None:
        self.module: Any = module

    @property
    def tower(self) -> MadeUpTower:
        return MadeUpTower(self.module)

    @property
    def decoder(self) -> MadeUpDecoder:
        return MadeUpDecoder(self.module)

    def clip_text(self) -> None:
        return None

    def of(self, module: Any) -> "MadeUp":
        return MadeUp(module)

    def check(self, method: Any) -> None:
        """Any method will do."""

    def entrances(self, attachment: Attachment) -> dict[str, Callable[..., Any]]:
        return {"assemble": partial(assemble, attachment)}


def assemble(attachment: Attachment, ids: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Takes the place of the model's own `assemble`: same arguments, same results."""
    module, call = attachment.here.module, attachment.current()
    tiles = attachment.encode(pixels, [1] * len(pixels)) if len(pixels) else []
    projected = [one.projected for one in tiles]
    embeds, places, mask = module.place(ids, torch.cat(projected) if projected else torch.empty(0, TOKENS, WIDTH))
    layout = attachment.layout(kinds(ids, mask))
    if attachment.cuts is not None or not layout.reduced():
        attachment.arm(call, layout, embeds, tiles)
        return embeds, places, mask
    out = attachment.reduce(call, Assembled(embeds, mask, places), layout, tiles, ids.abs().sum(1))
    out = pad_left(out)
    return out.embeds, out.positions, out.real


def kinds(ids: Tensor, mask: Tensor) -> RowKinds:
    """What every row is: left-padded prompts in which each picture takes 16 rows."""
    picture = torch.full(mask.shape, -1)
    token, number = picture.clone(), 0
    for row, words in enumerate(ids):
        at = int(mask.shape[1] - mask[row].sum())
        for word in words[words != 0].tolist():
            if word == IMAGE:
                picture[row, at : at + TOKENS], token[row, at : at + TOKENS] = number, torch.arange(TOKENS)
                number += 1
            at += TOKENS if word == IMAGE else 1
    return RowKinds(mask, picture, torch.where(picture >= 0, 0, -1), token)


def attach(module: MadeUpModel, name: str, tokens: int, merged: int | None = None, **options: Any) -> Attachment:
    """A method on the model; positions are kept, since renumbering three axes has no meaning."""
    return Attachment(MadeUp(module), make(name, **options), Budget(tokens, merged))
