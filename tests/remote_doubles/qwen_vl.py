"""A double of Qwen-VL of 2023."""

from collections import OrderedDict
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import interpolate, scaled_dot_product_attention, silu
from transformers import PretrainedConfig
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .base import Greedy, Norm, angles, answer, built, causal, rotate

TOWER = dict(image_size=112, patch_size=7, width=32, layers=3, heads=2, mlp_ratio=2, n_queries=64)


class QWenConfig(PretrainedConfig):
    model_type = "qwen"

    def __init__(self, visual: Any = None, hidden_size: int = 256, num_hidden_layers: int = 3, **given: Any) -> None:
        self.vocab_size, self.hidden_size, self.num_hidden_layers = 1280, hidden_size, num_hidden_layers
        self.num_attention_heads, self.kv_channels, self.intermediate_size = 4, hidden_size // 4, 256
        self.seq_length, self.layer_norm_epsilon, self.rotary_emb_base = 2048, 1e-6, 10000
        self.visual = visual or {**TOWER, "output_dim": hidden_size, "image_start_id": 1260}
        super().__init__(**{"tie_word_embeddings": False, "pad_token_id": 1263, "eos_token_id": 2, **given})


class VisualAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = width, heads
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, states: Tensor) -> Tensor:  # [n, P, width]
        heads = self.in_proj(states).unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0, 3)  # [P, H, n, 3 d]
        mixed = scaled_dot_product_attention(*heads.chunk(3, -1))
        return self.out_proj(mixed.permute(2, 0, 1, 3).flatten(2))


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
        self.num_queries, self.side = queries, round(patches**0.5)
        self.query, self.pos_embed = (nn.Parameter(torch.zeros(queries, width)) for _ in range(2))
        self.kv_proj, self.attn = nn.Linear(inside, width, bias=False), nn.MultiheadAttention(width, width // 128)
        self.ln_q, self.ln_kv = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, states: Tensor) -> Tensor:  # [P, n, inside] -> [P, queries, width]
        values = self.ln_kv(self.kv_proj(states)).transpose(0, 1)
        grid = self.pos_embed.T.unflatten(1, (round(self.num_queries**0.5), -1))[None]
        places = interpolate(grid, size=(self.side, self.side), mode="bicubic")[0].flatten(1).T
        query = (self.ln_q(self.query) + self.pos_embed)[:, None].expand(-1, len(states), -1)
        return self.attn(query, values + places[:, None], values)[0].transpose(0, 1)


class VisionTransformer(nn.Module):
    def __init__(self, given: Any) -> None:
        super().__init__()
        width, out, self.size = given.width, given.output_dim, given.image_size
        patches = (given.image_size // given.patch_size) ** 2
        self.conv1 = nn.Conv2d(3, width, given.patch_size, given.patch_size, bias=False)
        self.positional_embedding = nn.Parameter(torch.zeros(patches, width))
        self.ln_pre, self.transformer = nn.LayerNorm(width), nn.Module()
        blocks = (VisualBlock(width, given.heads, given.mlp_ratio) for _ in range(given.layers))
        self.transformer.resblocks = nn.ModuleList(blocks)
        self.attn_pool, self.ln_post = Resampler(given.n_queries, patches, out, width), nn.LayerNorm(out)
        self.proj = nn.Parameter(torch.zeros(out, out))

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
        width, self.num_heads = config.hidden_size, config.num_attention_heads
        self.split_size = width
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)

    def forward(self, states: Tensor, turns: Any, past: Any, mask: Tensor) -> Any:
        parts = [one.unflatten(-1, (self.num_heads, -1)) for one in self.c_attn(states).split(self.split_size, 2)]
        query, key = (rotate(one, *(turn[:, -states.shape[1] :] for turn in turns)) for one in parts[:2])
        value = parts[2]
        if past is not None:
            key, value = torch.cat((past[0], key), 1), torch.cat((past[1], value), 1)
        mixed = scaled_dot_product_attention(*(one.transpose(1, 2) for one in (query, key, value)), mask)
        return self.c_proj(mixed.transpose(1, 2).flatten(2)), (key, value)


class QWenBlock(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size // 2
        self.ln_1, self.attn, self.ln_2 = Norm(width), QWenAttention(config), Norm(width)
        parts = {"w1": (width, inner), "w2": (width, inner), "c_proj": (inner, width)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*sizes, bias=False) for name, sizes in parts.items()})

    def forward(self, states: Tensor, turns: Any, past: Any, mask: Tensor) -> Any:
        attended, present = self.attn(self.ln_1(states), turns, past, mask)
        states = states + attended
        normed = self.ln_2(states)
        return states + self.mlp.c_proj(self.mlp.w1(normed) * silu(self.mlp.w2(normed))), present


def turns_of(width: int, length: int) -> list[Tensor]:
    """Cosines and sines [1, length, 1, width]."""
    frequencies = 10000.0 ** -(torch.arange(0, width, 2).float() / width)
    return [one[None, :, None] for one in angles(torch.arange(length).float(), frequencies)]


class QWenModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.wte = config, nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb, self.ln_f = partial(turns_of, config.kv_channels), Norm(config.hidden_size)
        self.h = nn.ModuleList(QWenBlock(config) for _ in range(config.num_hidden_layers))
        self.visual = VisionTransformer(SimpleNamespace(**config.visual))

    def forward(self, input_ids: Any, past_key_values: Any = None, attention_mask: Any = None) -> Any:
        start, spans, images = self.config.visual["image_start_id"], [], []
        if past_key_values is None and torch.any(input_ids == start):
            spans = [
                (row, a, a + 1 + int((input_ids[row, a:] == start + 1).nonzero()[0]))
                for row, a in (input_ids == start).nonzero().tolist()
            ]
            names = [input_ids[row, a + 1 : b - 1].tolist() for row, a, b in spans]
            images = self.visual.encode([bytes(name[: name.index(start + 2)]).decode("utf-8") for name in names])
        states = self.wte(input_ids).clone()
        for (row, a, b), image in zip(spans, images, strict=True):
            states[row][a + 1 : b - 1] = image
        past = past_key_values or [None] * len(self.h)
        before = 0 if past[0] is None else past[0][0].shape[1]
        size = before + states.shape[1]
        mask = torch.ones(len(states), size) if attention_mask is None else attention_mask
        added, turns, presents = causal(mask, states.shape[1], before), self.rotary_emb(size), ()
        for block, layer_past in zip(self.h, past, strict=True):
            states, present = block(states, turns, layer_past, added)
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

    def prepare_inputs_for_generation(self, input_ids: Tensor, past_key_values: Any = None, **given: Any) -> Any:
        ids = input_ids[:, -1:] if past_key_values else input_ids
        kept = {name: given.get(name) for name in ("attention_mask", "use_cache")}
        return {"input_ids": ids, "past_key_values": past_key_values, **kept}

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
        return_dict: Any = None,
    ) -> CausalLMOutputWithPast:
        inner = self.transformer(input_ids, past_key_values, attention_mask)
        return answer(self.lm_head(inner.last_hidden_state), labels, inner.past_key_values)


def qwen_vl() -> Any:
    return built(QWenLMHeadModel, QWenConfig())
