"""A double of Qwen-VL of 2023."""

import math
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PretrainedConfig
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .base import Greedy, Norm, answer, built, causal, rotate

SMALL = dict(image_size=112, patch_size=7, width=32, layers=3, heads=2, mlp_ratio=2, n_queries=64)  # the tower


class QWenConfig(PretrainedConfig):
    model_type = "qwen"

    def __init__(self, visual: Any = None, hidden_size: int = 256, num_hidden_layers: int = 3, **given: Any) -> None:
        self.vocab_size, self.hidden_size, self.num_hidden_layers = 1280, hidden_size, num_hidden_layers
        self.num_attention_heads, self.kv_channels, self.intermediate_size = 4, hidden_size // 4, 256
        self.seq_length, self.layer_norm_epsilon, self.rotary_emb_base = 2048, 1e-6, 10000
        self.visual = visual or {**SMALL, "output_dim": hidden_size, "image_start_id": 1260}
        super().__init__(**{"tie_word_embeddings": False, "pad_token_id": 1263, "eos_token_id": 2, **given})


class VisualAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.part = width, heads, width // heads
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, states: Tensor) -> Tensor:  # [n, P, width]
        length, pictures, _ = states.shape
        mixed = self.in_proj(states).view(length, pictures * self.num_heads, 3 * self.part).transpose(0, 1)
        query, key, value = mixed.split(self.part, -1)
        weights = (query / math.sqrt(self.part) @ key.transpose(1, 2)).softmax(-1)
        return self.out_proj((weights @ value).transpose(0, 1).reshape(states.shape))


class VisualBlock(nn.Module):
    def __init__(self, width: int, heads: int, ratio: float) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), VisualAttention(width, heads), nn.LayerNorm(width)
        inner = int(width * ratio)
        parts = {"c_fc": nn.Linear(width, inner), "gelu": nn.GELU(), "c_proj": nn.Linear(inner, width)}
        self.mlp = nn.Sequential(OrderedDict(parts))

    def forward(self, states: Tensor) -> Tensor:
        states = states + self.attn(self.ln_1(states))
        return states + self.mlp(self.ln_2(states))


class Resampler(nn.Module):
    def __init__(self, queries: int, patches: int, width: int, inside: int) -> None:
        super().__init__()
        self.num_queries = queries
        self.query = nn.Parameter(torch.zeros(queries, width))
        self.pos_embed, self.side = nn.Parameter(torch.zeros(queries, width)), round(patches**0.5)
        self.kv_proj, self.attn = nn.Linear(inside, width, bias=False), nn.MultiheadAttention(width, width // 128)
        self.ln_q, self.ln_kv = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, states: Tensor) -> Tensor:  # [P, n, inside] -> [P, queries, width]
        values = self.ln_kv(self.kv_proj(states)).transpose(0, 1)
        grid = self.pos_embed.T.unflatten(1, (round(self.num_queries**0.5), -1))[None]
        places = nn.functional.interpolate(grid, size=(self.side, self.side), mode="bicubic")[0].flatten(1).T
        query = (self.ln_q(self.query) + self.pos_embed)[:, None].expand(-1, len(states), -1)
        return self.attn(query, values + places[:, None], values)[0].transpose(0, 1)


class VisionTransformer(nn.Module):
    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        given = SimpleNamespace(**sizes)
        self.size, self.output_dim, patches = (
            given.image_size,
            given.output_dim,
            (given.image_size // given.patch_size) ** 2,
        )
        self.conv1 = nn.Conv2d(3, given.width, given.patch_size, given.patch_size, bias=False)
        self.positional_embedding, self.ln_pre = (
            nn.Parameter(torch.zeros(patches, given.width)),
            nn.LayerNorm(given.width),
        )
        self.transformer = nn.Module()
        blocks = (VisualBlock(given.width, given.heads, given.mlp_ratio) for _ in range(given.layers))
        self.transformer.resblocks = nn.ModuleList(blocks)
        self.attn_pool = Resampler(given.n_queries, patches, given.output_dim, given.width)
        self.ln_post, self.proj = (
            nn.LayerNorm(given.output_dim),
            nn.Parameter(torch.zeros(given.output_dim, given.output_dim)),
        )

    def image_transform(self, image: Image.Image) -> Tensor:
        mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
        values = numpy.array(image.resize((self.size, self.size), Image.Resampling.BICUBIC), dtype=numpy.float32)
        return (torch.from_numpy(values).permute(2, 0, 1) / 255 - mean) / std

    def encode(self, paths: list[str]) -> Tensor:
        images = [self.image_transform(Image.open(path).convert("RGB")) for path in paths]
        return self(torch.stack(images))

    def forward(self, pixels: Tensor) -> Tensor:
        states = self.conv1(pixels.to(self.conv1.weight)).flatten(2).transpose(1, 2)
        states = self.ln_pre(states + self.positional_embedding).transpose(0, 1)
        for block in self.transformer.resblocks:
            states = block(states)
        return self.ln_post(self.attn_pool(states.transpose(0, 1))) @ self.proj


class QWenAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.split_size, self.num_heads = config.hidden_size, config.num_attention_heads
        self.head_dim = self.split_size // self.num_heads
        self.c_attn, self.c_proj = (
            nn.Linear(self.split_size, 3 * self.split_size),
            nn.Linear(self.split_size, self.split_size, bias=False),
        )

    def forward(self, states: Tensor, turns: Any, past: Any, mask: Tensor | None) -> Any:
        parts = [one.unflatten(-1, (self.num_heads, -1)) for one in self.c_attn(states).split(self.split_size, 2)]
        query, key = (rotate(one, *(turn[:, -states.shape[1] :] for turn in turns)) for one in parts[:2])
        value = parts[2]
        if past is not None:
            key, value = torch.cat((past[0], key), 1), torch.cat((past[1], value), 1)
        logits = query.transpose(1, 2) @ key.permute(0, 2, 3, 1) / math.sqrt(self.head_dim)
        weights = nn.functional.softmax(logits if mask is None else logits + mask, -1)
        return self.c_proj((weights.to(value) @ value.transpose(1, 2)).transpose(1, 2).flatten(2)), (key, value)


class QWenBlock(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size // 2
        self.ln_1, self.attn, self.ln_2 = Norm(width), QWenAttention(config), Norm(width)
        self.mlp = nn.Module()
        self.mlp.w1, self.mlp.w2 = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.mlp.c_proj = nn.Linear(inner, width, bias=False)

    def forward(
        self, states: Tensor, rotary_pos_emb: Any, layer_past: Any = None, attention_mask: Tensor | None = None
    ) -> Any:
        attended, present = self.attn(self.ln_1(states), rotary_pos_emb, layer_past, attention_mask)
        states = states + attended
        normed = self.ln_2(states)
        return states + self.mlp.c_proj(self.mlp.w1(normed) * silu(self.mlp.w2(normed))), present


class Rotary(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, length: int, offset: int = 0, ntk_alpha: float = 1.0) -> list[Tensor]:
        steps = torch.arange(length).float()
        angles = torch.outer(steps, 10000.0 ** -(torch.arange(0, self.width, 2).float() / self.width))
        angles = torch.cat((angles, angles), -1)[None, :, None]
        return [angles.cos(), angles.sin()]


class QWenModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.wte = config, nn.Embedding(config.vocab_size, config.hidden_size)
        self.drop, self.rotary_emb = nn.Dropout(0.0), Rotary(config.kv_channels)
        self.h = nn.ModuleList(QWenBlock(config) for _ in range(config.num_hidden_layers))
        self.ln_f, self.visual = Norm(config.hidden_size), VisionTransformer(**self._visual(config))

    @staticmethod
    def _visual(config: Any) -> dict[str, Any]:
        return {name: value for name, value in config.visual.items() if name != "image_start_id"}

    def forward(
        self, input_ids: Any = None, past_key_values: Any = None, attention_mask: Any = None, inputs_embeds: Any = None
    ) -> BaseModelOutputWithPast:
        start, images = self.config.visual["image_start_id"], None
        if past_key_values is None and torch.any(input_ids == start):
            spans = [
                (row, a, a + 1 + int((input_ids[row, a:] == start + 1).nonzero()[0]))
                for row, a in (input_ids == start).nonzero().tolist()
            ]
            names = [input_ids[row, a + 1 : b - 1].tolist() for row, a, b in spans]
            images = self.visual.encode([bytes(name[: name.index(start + 2)]).decode("utf-8") for name in names])
        states = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        past = past_key_values or [None] * len(self.h)
        before = 0 if past[0] is None else past[0][0].shape[1]
        mask = None
        if attention_mask is not None:  # of one new row, only the padding of the cache
            mask = causal(attention_mask, states.shape[1], before)
        turns, states = self.rotary_emb(before + states.shape[1]), self.drop(states).clone()
        for number, (row, a, b) in enumerate(spans if images is not None else ()):
            states[row][a + 1 : b - 1] = images[number]
        presents: Any = ()
        for block, layer_past in zip(self.h, past, strict=True):
            states, present = block(states, turns, layer_past, mask)
            presents += (present,)
        return BaseModelOutputWithPast(last_hidden_state=self.ln_f(states), past_key_values=presents)


class QWenLMHeadModel(Greedy):
    config_class = QWenConfig
    base_model_prefix = "transformer"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.transformer = QWenModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        pass

    def get_input_embeddings(self) -> Any:
        return self.transformer.wte

    def prepare_inputs_for_generation(self, input_ids: Tensor, past_key_values: Any = None, **kwargs: Any) -> Any:
        kept = {name: kwargs.get(name) for name in ("attention_mask", "use_cache")}
        return {
            "input_ids": input_ids[:, -1:] if past_key_values else input_ids,
            "past_key_values": past_key_values,
            **kept,
        }

    def forward(
        self,
        input_ids: Any = None,
        past_key_values: Any = None,
        attention_mask: Any = None,
        token_type_ids: Any = None,
        position_ids: Any = None,
        inputs_embeds: Any = None,
        labels: Any = None,
        use_cache: Any = None,
        output_attentions: Any = None,
        output_hidden_states: Any = None,
        return_dict: Any = None,
    ) -> CausalLMOutputWithPast:
        inner = self.transformer(input_ids, past_key_values, attention_mask, inputs_embeds)
        return answer(self.lm_head(inner.last_hidden_state), labels, inner.past_key_values)


def qwen_vl(seed: int = 0, **sizes: Any) -> Any:
    return built(QWenLMHeadModel, QWenConfig(**sizes), seed)
