"""A double of CogVLM-chat."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import PretrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaMLP

from .base import Greedy, Norm, angles, answer, built, causal, pixels_of, rotate

TOWER = dict(image_size=112, patch_size=14, hidden_size=32, num_heads=4, num_hidden_layers=3, intermediate_size=48)


class CogVLMConfig(PretrainedConfig):
    model_type = "cogvlm"

    def __init__(self, vision_config: Any = None, **given: Any) -> None:
        self.vocab_size, self.hidden_size, self.intermediate_size, self.num_hidden_layers = 1280, 64, 96, 3
        self.num_attention_heads, self.max_position_embeddings, self.template_version = 4, 2048, "chat"
        self.hidden_act, self.mlp_bias, self.vision_config = "silu", False, vision_config or TOWER
        ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        super().__init__(**{"tie_word_embeddings": False, **ends, **given})


class Attention(nn.Module):
    def __init__(self, given: Any) -> None:
        super().__init__()
        self.num_heads, self.scale = given.num_heads, (given.hidden_size // given.num_heads) ** -0.5
        self.query_key_value = nn.Linear(given.hidden_size, 3 * given.hidden_size)
        self.dense = nn.Linear(given.hidden_size, given.hidden_size)

    def forward(self, states: Tensor) -> Tensor:
        mixed = self.query_key_value(states).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = scaled_dot_product_attention(*mixed, scale=self.scale)
        return self.dense(out.transpose(1, 2).flatten(2))


class TransformerLayer(nn.Module):
    def __init__(self, given: Any) -> None:
        super().__init__()
        width, inner = given.hidden_size, given.intermediate_size
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(given)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, states: Tensor) -> Tensor:
        states = states + self.input_layernorm(self.attention(states))
        return states + self.post_attention_layernorm(self.mlp(states))


class EVA2CLIPModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        given, width = SimpleNamespace(**config.vision_config), config.hidden_size
        self.patch_embedding = nn.Conv2d(3, given.hidden_size, given.patch_size, given.patch_size)
        rows = (given.image_size // given.patch_size) ** 2 + 1  # with the class token
        self.position_embedding = nn.Parameter(torch.zeros(rows, given.hidden_size))
        self.transformer = nn.Module()
        self.transformer.layers = nn.ModuleList(TransformerLayer(given) for _ in range(given.num_hidden_layers))
        joint = nn.Linear(given.hidden_size, width, bias=False)
        self.linear_proj = nn.Sequential(joint, nn.LayerNorm(width), nn.GELU(), LlamaMLP(config))
        self.boi, self.eoi = (nn.Parameter(torch.zeros(1, 1, width)) for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch_embedding(images).flatten(2).transpose(1, 2)
        states = pad(patches, (0, 0, 1, 0)) + self.position_embedding
        for layer in self.transformer.layers:
            states = layer(states)
        states = self.linear_proj(states[:, 1:])
        return torch.cat((self.boi.expand(len(states), -1, -1), states, self.eoi.expand(len(states), -1, -1)), 1)


def experts(types: Tensor) -> Tensor:
    """Rows of an image that are followed by another one, [R, S]."""
    return (types == 1) & pad(types == 1, (0, 1))[:, 1:]


def build_position_ids(types: Tensor, mask: Tensor) -> Tensor:
    """All patches of an image share a position; padding takes none."""
    real = mask.bool()[:, -types.shape[1] :]
    visual = (types == 1) & real
    patch = visual & pad(visual, (1, 0))[:, :-1] & pad(visual, (0, 1))[:, 1:]
    steps = (real & ~patch) | (patch & ~pad(patch, (1, 0))[:, :-1])
    steps[:, 0] = False
    return steps.long().cumsum(1)


class VisionExpertAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads, self.head_dim = config.num_attention_heads, width // config.num_attention_heads
        self.rotary_emb = nn.Module()
        self.rotary_emb.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, self.head_dim, 2) / self.head_dim))
        for name, size in (("query_key_value", 3 * width), ("dense", width)):
            for kind in ("vision", "language"):
                setattr(self, f"{kind}_expert_{name}", nn.Linear(width, size, bias=False))

    def forward(self, states: Tensor, types: Tensor, positions: Tensor, mask: Tensor, past: Any) -> Any:
        visual = experts(types)[..., None]
        kinds = (self.vision_expert_query_key_value(states), self.language_expert_query_key_value(states))
        mixed = torch.where(visual, *kinds)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in mixed.chunk(3, -1))
        turns = angles(positions[:, None], self.rotary_emb.inv_freq)
        query, key = rotate(query, *turns), rotate(key, *turns)
        if past is not None:
            key, value = torch.cat((past[0], key), 2), torch.cat((past[1], value), 2)
        out = scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2)
        out = torch.where(visual, self.vision_expert_dense(out), self.language_expert_dense(out))
        return out, (key, value)


class CogVLMDecoderLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = VisionExpertAttention(config), nn.Module()
        self.mlp.language_mlp, self.mlp.vision_mlp = LlamaMLP(config), LlamaMLP(config)
        self.input_layernorm, self.post_attention_layernorm = Norm(config.hidden_size), Norm(config.hidden_size)

    def forward(self, states: Tensor, types: Tensor, positions: Tensor, mask: Tensor, past: Any) -> Any:
        attended, present = self.self_attn(self.input_layernorm(states), types, positions, mask, past)
        states = states + attended
        normed = self.post_attention_layernorm(states)
        mixed = torch.where(experts(types)[..., None], self.mlp.vision_mlp(normed), self.mlp.language_mlp(normed))
        return states + mixed, present


class CogVLMModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.embed_tokens = config, nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(CogVLMDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm, self.vision = Norm(config.hidden_size), EVA2CLIPModel(config)

    def encode_images(self, images: list[list[Tensor]]) -> Tensor:
        return self.vision(torch.stack([image for row in images for image in row]))

    def forward(self, input_ids: Tensor, images: Any, types: Any, mask: Any, positions: Any, past: Any) -> Any:
        states = self.embed_tokens(input_ids)
        types = torch.zeros_like(input_ids) if types is None else types
        if past is None and images and any(len(row) for row in images):
            assert len(input_ids) == len(images)
            features = self.encode_images(images).flatten(0, 1)
            states = states.index_put([types == 1], features.to(states))
        elif past is None:
            assert not (types == 1).any()
        before = 0 if past is None else past[0][0].shape[2]
        mask = torch.ones(len(states), before + states.shape[1]) if mask is None else mask
        positions = build_position_ids(types, mask) if positions is None else positions
        added, presents = causal(mask, states.shape[1], before).to(states), ()
        for layer, layer_past in zip(self.layers, past or [None] * len(self.layers), strict=True):
            states, present = layer(states, types, positions, added, layer_past)
            presents += (present,)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(states), past_key_values=presents)


WORDS = {
    "base": "{}",
    "chat": " [INST] {} [/INST] ",
    "chat_old": "Question: {} Answer:",
    "vqa": "Question: {} Short answer:",
}


class CogVLMForCausalLM(Greedy):
    config_class = CogVLMConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = CogVLMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Any = None,
        images: Any = None,
        token_type_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Any = None,
        use_cache: Any = None,
        return_dict: Any = None,
        labels: Any = None,
    ) -> CausalLMOutputWithPast:
        assert input_ids is not None and inputs_embeds is None
        inner = self.model(input_ids, images, token_type_ids, attention_mask, position_ids, past_key_values)
        return answer(self.lm_head(inner.last_hidden_state), labels, inner.past_key_values)

    def prepare_inputs_for_generation(self, input_ids: Any, token_type_ids: Any, **given: Any) -> Any:
        rest = {name: given.get(name) for name in ("images", "past_key_values", "attention_mask")}
        mask = torch.ones_like(input_ids) if rest["attention_mask"] is None else rest["attention_mask"]
        positions = build_position_ids(token_type_ids, mask)
        rows = {"input_ids": input_ids, "token_type_ids": token_type_ids, "position_ids": positions}
        return {name: row[:, -1:] if rest["past_key_values"] else row for name, row in rows.items()} | rest

    def build_conversation_input_ids(
        self, tokenizer: Any, *, query: str, history: Any = None, images: Any = None, template_version: Any = None
    ) -> dict[str, Any]:
        given = self.config.vision_config
        text = WORDS[template_version or self.config.template_version].format(query)
        words = tokenizer.encode(text, add_special_tokens=False)
        rows = 0 if images is None else (given["image_size"] // given["patch_size"]) ** 2 + 2
        ids = [self.config.bos_token_id, *[self.config.pad_token_id] * rows, *words]
        types = [0, *[1] * rows, *[0] * len(words)]
        pixels = None if images is None else [pixels_of(images[0], given["image_size"])]
        found = {"input_ids": ids, "token_type_ids": types, "attention_mask": [1] * len(ids)}
        return {**{name: torch.tensor(value) for name, value in found.items()}, "images": pixels}


def cogvlm() -> Any:
    return built(CogVLMForCausalLM, CogVLMConfig())
