"""A double of InternVL-Chat of 2023."""

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CLIPImageProcessor, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from .base import LlavaLanguage, Norm, built, held, joined

TOWER = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "intermediate_size": 64,
    "image_size": 56,
    "patch_size": 14,
}
LANGUAGE: dict[str, Any] = {
    "vocab_size": 1280,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 2,
}


class InternAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.scale, self.qk_normalization = heads, (width // heads) ** -0.5, True
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.q_norm, self.k_norm = Norm(width), Norm(width)

    def forward(self, states: Tensor) -> Tensor:
        query, key, value = self.qkv(states).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = (
            norm(part.transpose(1, 2).flatten(2)).view_as(part.transpose(1, 2)).transpose(1, 2)
            for norm, part in ((self.q_norm, query), (self.k_norm, key))
        )
        weights = (query * self.scale @ key.transpose(-2, -1)).softmax(-1)
        return self.proj((weights @ value).transpose(1, 2).flatten(2))


class InternVisionEncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn, self.norm1, self.norm2 = InternAttention(width, heads), Norm(width), Norm(width)
        parts = {"fc1": nn.Linear(width, 2 * width), "act": nn.GELU(), "fc2": nn.Linear(2 * width, width)}
        self.mlp = nn.Sequential(OrderedDict(parts))
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
        layers = (InternVisionEncoderLayer(width, config.num_attention_heads) for _ in range(config.num_hidden_layers))
        self.encoder.layers = nn.ModuleList(layers)

    def forward(self, pixels: Tensor) -> list[Tensor]:
        """The states before the first block and behind every one."""
        patches = self.embeddings.patch_embedding(pixels)
        own = self.embeddings.position_embedding
        grid = own[:, 1:].transpose(1, 2).unflatten(2, (self.patches, self.patches))
        grid = nn.functional.interpolate(grid, size=patches.shape[2:], mode="bicubic")
        states = patches.flatten(2).transpose(1, 2) + grid.flatten(2).transpose(1, 2)
        states = torch.cat((self.embeddings.class_embedding.expand(len(pixels), -1, -1) + own[:, :1], states), 1)
        found = [states]
        for layer in self.encoder.layers:
            found.append(layer(found[-1]))
        return found


class InternVisionTower(nn.Module):
    def __init__(self, config: Any, shown: int) -> None:
        super().__init__()
        self.vision_tower, self.select_layer, self.select_feature = InternVisionModel(config), -4, "patch"
        self.is_loaded, self.vision_tower_name = True, "intern_vit_6b"
        self.image_processor = CLIPImageProcessor(crop_size=shown, size=shown)

    @property
    def config(self) -> Any:
        return self.vision_tower.config

    @property
    def num_patches(self) -> int:
        return (self.config.image_size // self.config.patch_size) ** 2

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return self.vision_tower(images)[self.select_layer][:, 1:]


class LlavaLlamaForCausalLM(LlavaLanguage, LlamaForCausalLM):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        vision = SimpleNamespace(**config.vision)
        self.model.vision_tower = InternVisionTower(vision, config.shown)
        width = config.hidden_size
        self.model.mm_projector = nn.Sequential(
            nn.Linear(vision.hidden_size, width), nn.GELU(), nn.Linear(width, width)
        )

    def get_model(self) -> Any:
        return self.model

    def get_vision_tower(self) -> Any:
        return self.model.vision_tower

    def encode_images(self, images: Tensor) -> Tensor:
        return self.get_model().mm_projector(self.get_vision_tower()(images))

    def prepare_inputs_labels_for_multimodal(
        self, input_ids: Any, attention_mask: Any, past_key_values: Any, labels: Any, images: Any
    ) -> Any:
        if self.get_vision_tower() is None or images is None or input_ids.shape[1] == 1:
            if past_key_values is not None and images is not None and input_ids.shape[1] == 1:
                size = (len(attention_mask), held(past_key_values) + 1)
                attention_mask = torch.ones(size, dtype=attention_mask.dtype)
            return input_ids, attention_mask, past_key_values, None, labels
        features, embed = iter(self.encode_images(images)), self.get_model().embed_tokens
        marks = torch.full_like(input_ids, -100) if labels is None else labels
        rows, targets = zip(*(joined(*row, features, embed) for row in zip(input_ids, marks, strict=True)), strict=True)
        if len({len(row) for row in rows}) > 1:
            raise NotImplementedError("rows of several lengths")
        embeds = torch.stack(rows)
        if attention_mask is not None:
            more = embeds.shape[1] - input_ids.shape[1]
            attention_mask = torch.cat((attention_mask.new_ones(len(rows), more), attention_mask), 1)
        return None, attention_mask, past_key_values, embeds, None if labels is None else torch.stack(targets)

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Any = None,
        labels: Any = None,
        use_cache: Any = None,
        output_attentions: Any = None,
        output_hidden_states: Any = None,
        images: Any = None,
        return_dict: Any = None,
    ) -> CausalLMOutputWithPast:
        input_ids, attention_mask, past_key_values, inputs_embeds, labels = self.prepare_inputs_labels_for_multimodal(
            input_ids, attention_mask, past_key_values, labels, images
        )
        return self.answered(
            labels,
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
        )


def internvl_chat(seed: int = 0, shown: int = 112, **vision: Any) -> Any:
    given = {"mm_vision_tower": "intern_vit_6b", "vision": {**TOWER, **vision}, "shown": shown}
    config = LlamaConfig(**LANGUAGE, **given)
    return built(LlavaLlamaForCausalLM, config, seed)
