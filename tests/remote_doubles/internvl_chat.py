"""A double of InternVL-Chat of 2023."""

from types import SimpleNamespace
from typing import Any

import torch
from llava.model.llava_arch import LlavaMetaForCausalLM
from torch import Tensor, nn
from torch.nn.functional import interpolate, scaled_dot_product_attention
from transformers import CLIPImageProcessor, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.clip.modeling_clip import CLIPMLP

from .base import Greedy, Norm, answer, built

SHOWN = 112  # pixels of a side of an image; the tower was first trained for half as many
SIZES = dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=6, intermediate_size=64)
TOWER = SimpleNamespace(**SIZES, hidden_act="gelu", image_size=56, patch_size=14)


class InternAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.scale, self.qk_normalization = heads, (width // heads) ** -0.5, True
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.q_norm, self.k_norm = Norm(width), Norm(width)

    def forward(self, states: Tensor) -> Tensor:
        query, key, value = self.qkv(states).chunk(3, -1)
        parts = (self.q_norm(query), self.k_norm(key), value)
        heads = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        return self.proj(scaled_dot_product_attention(*heads, scale=self.scale).transpose(1, 2).flatten(2))


class InternVisionEncoderLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.attn, self.mlp = InternAttention(width, config.num_attention_heads), CLIPMLP(config)
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.ls1, self.ls2 = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))

    def forward(self, states: Tensor) -> Tensor:
        states = states + self.attn(self.norm1(states)) * self.ls1
        return states + self.mlp(self.norm2(states)) * self.ls2


class InternVisionModel(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, self.config, self.patches = config.hidden_size, config, config.image_size // config.patch_size
        self.embeddings, self.encoder = nn.Module(), nn.Module()
        self.embeddings.patch_embedding = nn.Conv2d(3, width, config.patch_size, config.patch_size)
        self.embeddings.class_embedding = nn.Parameter(torch.zeros(1, 1, width))
        self.embeddings.position_embedding = nn.Parameter(torch.zeros(1, self.patches**2 + 1, width))
        layers = (InternVisionEncoderLayer(config) for _ in range(config.num_hidden_layers))
        self.encoder.layers = nn.ModuleList(layers)

    def forward(self, pixels: Tensor) -> list[Tensor]:
        """The states before the first block and behind every one."""
        patches = self.embeddings.patch_embedding(pixels)
        own = self.embeddings.position_embedding
        grid = own[:, 1:].transpose(1, 2).unflatten(2, (self.patches, self.patches))
        grid = interpolate(grid, size=patches.shape[2:], mode="bicubic")
        states = (patches + grid).flatten(2).transpose(1, 2)
        states = torch.cat((self.embeddings.class_embedding.expand(len(pixels), -1, -1) + own[:, :1], states), 1)
        found = [states]
        for layer in self.encoder.layers:
            found.append(layer(found[-1]))
        return found


class InternVisionTower(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.vision_tower, self.select_layer, self.select_feature = InternVisionModel(config), -4, "patch"
        self.config, self.is_loaded, self.vision_tower_name = config, True, "intern_vit_6b"
        self.image_processor = CLIPImageProcessor(crop_size=SHOWN, size=SHOWN)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return self.vision_tower(images)[self.select_layer][:, 1:]


class LlavaLlamaForCausalLM(Greedy, LlamaForCausalLM):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        inside, width = TOWER.hidden_size, config.hidden_size
        self.model.vision_tower = InternVisionTower(TOWER)
        self.model.mm_projector = nn.Sequential(nn.Linear(inside, width), nn.GELU(), nn.Linear(width, width))

    def get_model(self) -> Any:
        return self.model

    def get_vision_tower(self) -> Any:
        return self.model.vision_tower

    def encode_images(self, images: Tensor) -> Tensor:
        return self.get_model().mm_projector(self.get_vision_tower()(images))

    def prepare_inputs_labels_for_multimodal(
        self, input_ids: Any, attention_mask: Any, past_key_values: Any, labels: Any, images: Any
    ) -> Any:
        """Official LLaVA's function for prompts of equal lengths; behind them, all rows of the cache are unmasked."""
        if images is not None and input_ids.shape[1] == 1 and past_key_values is not None:
            attention_mask = attention_mask.new_ones(len(input_ids), past_key_values.get_seq_length() + 1)
        official = LlavaMetaForCausalLM.prepare_inputs_labels_for_multimodal
        given = (None, attention_mask, past_key_values, labels, images)
        ids, _, mask, cache, embeds, labels = official(self, input_ids, *given)
        return ids, mask, cache, embeds, labels

    def prepare_inputs_for_generation(self, input_ids: Any, past_key_values: Any = None, **given: Any) -> Any:
        ids = input_ids[:, -1:] if past_key_values else input_ids
        rest = {"attention_mask": given["attention_mask"], "images": given.get("images")}
        return {"input_ids": ids, "past_key_values": past_key_values, "use_cache": True, **rest}

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Any = None,
        labels: Any = None,
        use_cache: Any = None,
        images: Any = None,
        return_dict: Any = None,
    ) -> CausalLMOutputWithPast:
        given = (input_ids, attention_mask, past_key_values, labels, images)
        ids, mask, cache, embeds, labels = self.prepare_inputs_labels_for_multimodal(*given)
        rows = {"input_ids": ids, "attention_mask": mask, "past_key_values": cache, "inputs_embeds": embeds}
        inner = self.model(**rows, use_cache=True)
        return answer(self.lm_head(inner[0]), labels, inner.past_key_values)


def internvl_chat() -> Any:
    sizes = dict(hidden_size=64, num_attention_heads=4, num_hidden_layers=3, intermediate_size=96, vocab_size=1280)
    rest = dict(pad_token_id=0, eos_token_id=2, tie_word_embeddings=False, mm_vision_tower="intern_vit_6b")
    return built(LlavaLlamaForCausalLM, LlamaConfig(**sizes, **rest))
