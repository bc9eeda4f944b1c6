"""A double of the official Video-LLaVA."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from .base import LlavaLanguage, built, held, joined

FRAMES = 8


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.scale = heads, (width // heads) ** -0.5
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, states: Tensor) -> Tensor:
        query, key, value = (
            part(states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        weights = (query * self.scale @ key.transpose(-2, -1)).softmax(-1)
        return self.out_proj((weights @ value).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, config: Any, over_time: bool) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        self.layer_norm1, self.self_attn = nn.LayerNorm(width), Attention(width, heads)
        self.layer_norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.over_time = over_time
        if over_time:
            self.temporal_embedding = nn.Parameter(torch.zeros(1, FRAMES, width))
            self.temporal_layer_norm1, self.temporal_attn = nn.LayerNorm(width), Attention(width, heads)

    def forward(self, states: Tensor) -> tuple[Tensor]:
        if self.over_time:
            rows = states.unflatten(0, (-1, FRAMES)).transpose(1, 2).flatten(0, 1) + self.temporal_embedding
            rows = rows + self.temporal_attn(self.temporal_layer_norm1(rows))
            states = rows.unflatten(0, (-1, states.shape[1])).transpose(1, 2).flatten(0, 1)
        states = states + self.self_attn(self.layer_norm1(states))
        return (states + self.mlp(self.layer_norm2(states)),)


class VisionTransformer(nn.Module):
    def __init__(self, config: Any, over_time: bool) -> None:
        super().__init__()
        width, self.config = config.hidden_size, config
        self.embeddings, self.encoder, self.post_layernorm = nn.Module(), nn.Module(), nn.LayerNorm(width)
        self.embeddings.patch_embedding = nn.Conv2d(3, width, config.patch_size, config.patch_size)
        self.embeddings.class_embedding = nn.Parameter(torch.randn(width))
        count = (config.image_size // config.patch_size) ** 2 + 1
        self.embeddings.position_embedding = nn.Parameter(torch.zeros(count, width))
        self.encoder.layers = nn.ModuleList(Layer(config, over_time) for _ in range(config.num_hidden_layers))

    def forward(self, pixels: Tensor) -> list[Tensor]:
        """The states before the first block and behind every one."""
        patches = self.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
        first = self.embeddings.class_embedding.expand(len(patches), 1, -1)
        found = [torch.cat((first, patches), 1) + self.embeddings.position_embedding]
        for layer in self.encoder.layers:
            found.append(layer(found[-1])[0])
        return found


class Tower(nn.Module):
    def __init__(self, config: Any, over_time: bool) -> None:
        super().__init__()
        self.is_loaded, self.select_layer, self.select_feature = True, -2, "patch"
        self.num_patches = (config.image_size // config.patch_size) ** 2
        self.config = config
        self.kind = "video_tower" if over_time else "image_tower"
        setattr(self, f"{self.kind}_name", "LanguageBind")
        setattr(self, self.kind, VisionTransformer(config, over_time))

    @torch.no_grad()
    def forward(self, seen: Tensor) -> Tensor:
        """Pictures [B, 3, h, w] -> [B, N, D]; clips [B, 3, t, h, w] -> [B, t, 1 + N, D]."""
        transformer = getattr(self, self.kind)
        if self.kind == "image_tower":
            return transformer(seen)[self.select_layer][:, 1:]
        frames = seen.transpose(1, 2)
        return transformer(frames.flatten(0, 1))[self.select_layer].unflatten(0, frames.shape[:2])


class LlavaLlamaForCausalLM(LlavaLanguage, LlamaForCausalLM):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        vision = SimpleNamespace(**config.vision)
        self.model.image_tower, self.model.video_tower = Tower(vision, False), Tower(vision, True)
        self.model.mm_projector = nn.Sequential(
            nn.Linear(vision.hidden_size, config.hidden_size),
            nn.GELU(),
            nn.Linear(config.hidden_size, config.hidden_size),
        )

    def get_model(self) -> Any:
        return self.model

    def get_image_tower(self) -> Any:
        return self.model.image_tower

    def get_video_tower(self) -> Any:
        return self.model.video_tower

    def encode_images(self, images: Tensor) -> Tensor:
        return self.get_model().mm_projector(self.get_image_tower()(images))

    def encode_videos(self, videos: Tensor) -> Tensor:
        return self.get_model().mm_projector(self.get_video_tower()(videos))

    def prepare_inputs_labels_for_multimodal(
        self, input_ids: Any, position_ids: Any, attention_mask: Any, past_key_values: Any, labels: Any, images: Any
    ) -> Any:
        towers = self.get_image_tower(), self.get_video_tower()
        if towers == (None, None) or images is None or input_ids.shape[1] == 1:
            if past_key_values is not None and images is not None and input_ids.shape[1] == 1:
                missing = held(past_key_values) + 1 - attention_mask.shape[1]
                more = attention_mask.new_ones(len(attention_mask), missing)
                attention_mask = torch.cat((attention_mask, more), 1)
                position_ids = attention_mask.sum(1, keepdim=True) - 1
            return input_ids, position_ids, attention_mask, past_key_values, None, labels
        pictures = [place for place, image in enumerate(images) if image.ndim == 3]
        clips = [place for place, image in enumerate(images) if image.ndim == 4]
        found: dict[int, Any] = {}
        if pictures:
            found |= zip(pictures, self.encode_images(torch.stack([images[p] for p in pictures]))[:, None], strict=True)
        if clips:
            found |= zip(clips, self.encode_videos(torch.stack([images[p] for p in clips])), strict=True)
        features = (tile for place in range(len(images)) for tile in found[place])
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        marks = torch.full_like(input_ids, -100) if labels is None else labels
        rows, targets = [], []
        for ids, own, real in zip(input_ids, marks, mask.bool(), strict=True):
            row, target = joined(ids[real], own[real], features, self.get_model().embed_tokens)
            rows.append(row)
            targets.append(target)
        limit = getattr(self.config, "tokenizer_model_max_length", None)
        rows, targets = [row[:limit] for row in rows], [one[:limit] for one in targets]
        embeds = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        places = torch.arange(embeds.shape[1])
        real = places < torch.tensor([len(row) for row in rows])[:, None]
        marked = nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=-100)
        return (
            None,
            None if position_ids is None else (places * real).to(position_ids),
            None if attention_mask is None else real.to(attention_mask),
            past_key_values,
            embeds,
            None if labels is None else marked,
        )

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Any = None,
        labels: Any = None,
        use_cache: Any = None,
        output_attentions: Any = None,
        output_hidden_states: Any = None,
        images: Any = None,
        return_dict: Any = None,
    ) -> CausalLMOutputWithPast:
        if inputs_embeds is None:
            input_ids, position_ids, attention_mask, past_key_values, inputs_embeds, labels = (
                self.prepare_inputs_labels_for_multimodal(
                    input_ids, position_ids, attention_mask, past_key_values, labels, images
                )
            )
        return self.answered(
            labels,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
        )


def video_llava(seed: int = 0, size: int = 56) -> Any:
    sizes = dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=4, intermediate_size=64)
    config = LlamaConfig(
        vocab_size=1280,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
        mm_image_tower="LanguageBind/LanguageBind_Image",
        mm_video_tower="LanguageBind/LanguageBind_Video_merge",
        pad_token_id=0,
        eos_token_id=2,
        vision={**sizes, "image_size": size, "patch_size": 14, "num_frames": FRAMES},
    )
    return built(LlavaLlamaForCausalLM, config, seed)
