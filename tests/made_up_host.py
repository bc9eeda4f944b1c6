"""A vision-language model that exists nowhere, to prove that nothing of LLaVA is left in what all models share: no
class token, a merger that makes one token of 2 x 2 patches, positions of three axes, queries, keys and values in one
projection, and an image whose two halves are runs of placeholders of their own. Random weights; nothing is loaded.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPooling, CausalLMOutputWithPast

from llava_consensus.hosts import FACTS, HostEntry
from llava_consensus.hosts.images import Call, Family, runs

SIDE, TOKENS = 8, 16  # patches in a row of the image; tokens of an image, one for 2 x 2 patches
WIDTH, HEADS, KEY_HEADS, HEAD = 32, 4, 2, 8  # of the language model
SIGHT = 24  # width of the tower, which has two heads
IMAGE = 60  # id of a placeholder
BETWEEN = 61  # id of the word between the halves of an image


def halves(call: Call) -> list[Any]:
    """The tiles of every image: two runs of placeholders with a word between them."""
    found = [length for _, _, length in runs(call)]
    return [found[place : place + 2] for place in range(0, len(found), 2)]


FAMILY = Family(halves, mapped=True)
ENTRY = HostEntry(
    FACTS, "hf", ("MadeUpModel",), "a model that exists nowhere", types=("made_up",), family="made_up_host:FAMILY"
)


def words(ids: list[int | str]) -> list[int]:
    """A prompt with the rows of every "image" in it."""
    image = [IMAGE] * (TOKENS // 2)
    return [word for one in ids for word in ([*image, BETWEEN, *image] if isinstance(one, str) else [one])]


class MadeUpConfig(PreTrainedConfig):
    model_type = "made_up"

    def __init__(self, **given: Any) -> None:
        self.image_token_id, self.vocab_size, self.hidden_size, self.num_hidden_layers = IMAGE, 64, WIDTH, 4
        self.num_attention_heads, self.num_key_value_heads, self.head_dim = HEADS, KEY_HEADS, HEAD
        super().__init__(**{"pad_token_id": 0, "eos_token_id": None, "tie_word_embeddings": False, **given})


def attend(module: nn.Module, kernel: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """States [R, S, H d] of a kernel of transformers."""
    interface = AttentionInterface().get_interface(kernel, None)
    states: Tensor = interface(module, query, key, value, mask, scaling=query.shape[-1] ** -0.5)[0]
    return states.flatten(2)


class SightBlock(nn.Module):
    """A block of the tower: one projection makes queries, keys and values."""

    is_causal = False

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(SIGHT), nn.Linear(SIGHT, 3 * SIGHT), nn.Linear(SIGHT, SIGHT)
        self.mlp = nn.Sequential(
            nn.LayerNorm(SIGHT), nn.Linear(SIGHT, 2 * SIGHT), nn.GELU(), nn.Linear(2 * SIGHT, SIGHT)
        )

    def forward(self, states: Tensor) -> Tensor:  # [T, n, D_v]
        query, key, value = self.qkv(self.norm(states)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        states = states + self.out(attend(self, "sdpa", query, key, value, None))
        return states + self.mlp(states)


class Sight(nn.Module):
    """The tower with its merger, for one half of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.places = nn.Linear(12, SIGHT), nn.Parameter(torch.empty(SIDE * SIDE // 2, SIGHT))
        self.blocks = nn.ModuleList(SightBlock() for _ in range(3))
        self.merger = nn.Linear(4 * SIGHT, WIDTH)
        grid = torch.arange(SIDE * SIDE // 2).view(SIDE // 4, 2, SIDE // 2, 2)
        self.members = grid.permute(0, 2, 1, 3).reshape(TOKENS // 2, 4)

    def forward(self, pixels: Tensor) -> Tensor:  # [T, 32, 12] -> [T, 8, D]
        states = self.patches(pixels) + self.places
        for block in self.blocks:
            states = block(states)
        return self.merger(states[:, self.members].flatten(2))


class Layer(nn.Module):
    """A layer of the language model: one projection makes queries, keys and values."""

    is_causal = True

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.num_key_value_groups = index, HEADS // KEY_HEADS
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * HEAD), nn.Linear(HEADS * HEAD, WIDTH)
        self.mlp = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(
        self, hidden_states: Tensor, attention_mask: Any, position_embeddings: Any, past_key_values: Any, kernel: str
    ) -> Tensor:
        rows = self.qkv(self.norm(hidden_states)).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        query, key, value = rows.split((HEADS, KEY_HEADS, KEY_HEADS), 1)
        query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.index)
        hidden_states = hidden_states + self.out(attend(self, kernel, query, key, value, attention_mask))
        return hidden_states + self.mlp(hidden_states)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, -1)
    return states * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


class Language(PreTrainedModel):
    """The inner language model."""

    config_class, _supports_sdpa = MadeUpConfig, True

    def __init__(self, config: MadeUpConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Layer(index) for index in range(4))
        self.last_norm = nn.RMSNorm(WIDTH)

    def forward(
        self,
        inputs_embeds: Tensor,
        attention_mask: Any,
        position_ids: Tensor,
        past_key_values: Any = None,
        use_cache: bool = True,
    ) -> BaseModelOutputWithPast:
        angle = position_ids[[0, 0, 1, 2]].permute(1, 2, 0).float() * 10.0 ** -torch.tensor([0.0, 1.0, 0.0, 0.0])
        angle = torch.cat((angle, angle), -1)  # each axis turns pairs of its own
        turns, states = (angle.cos(), angle.sin()), inputs_embeds
        mask = create_causal_mask(self.config, states, attention_mask, past_key_values)
        for layer in self.layers:
            states = layer(states, mask, turns, past_key_values, self.config._attn_implementation)
        return BaseModelOutputWithPast(last_hidden_state=self.last_norm(states), past_key_values=past_key_values)


class MadeUpBase(nn.Module):
    """Sight and language."""

    rope_deltas: Tensor | None = None  # from rows to positions

    def __init__(self, config: MadeUpConfig) -> None:
        super().__init__()
        self.config, self.sight, self.language = config, Sight(), Language(config)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.language.words

    def get_image_features(self, pixel_values: Tensor, **kwargs: Any) -> BaseModelOutputWithPooling:
        """Images [P, 64, 12]."""
        halves = self.sight(pixel_values.unflatten(1, (2, -1)).flatten(0, 1))
        return BaseModelOutputWithPooling(pooler_output=list(halves.unflatten(0, (-1, 2)).flatten(1, 2)))

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Any = None,
        pixel_values: Any = None,
        mm_encoder_outputs: Any = None,
    ) -> BaseModelOutputWithPast:
        encoded = (mm_encoder_outputs or {}).get("image")
        if pixel_values is not None:
            encoded = self.get_image_features(pixel_values)
        embeds = self.language.words(input_ids)
        if encoded is not None:
            here = (input_ids == IMAGE)[..., None].expand_as(embeds)
            embeds = embeds.masked_scatter(here, torch.cat(list(encoded.pooler_output)))
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        if not past:
            places = self.places(input_ids, attention_mask)
            self.rope_deltas = places.amax((0, 2))[:, None] + 1 - input_ids.shape[1]
        else:
            rows = past + torch.arange(input_ids.shape[1])
            places = (rows + self.rope_deltas).expand(3, len(input_ids), -1)
        return self.language(embeds, attention_mask, places, past_key_values)

    def places(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Time, row and column [3, R, S]; an image takes as many steps as it has rows of tokens."""
        found = torch.zeros(3, *ids.shape, dtype=torch.long)
        for row, own in enumerate(ids):
            now, cell = 0, 0
            for place, word in enumerate(own.tolist()):
                if mask is not None and not mask[row, place]:
                    continue
                steps = torch.tensor([0, cell // 4, cell % 4]) if word == IMAGE else torch.zeros(3, dtype=torch.long)
                found[:, row, place] = steps + now
                cell = cell + 1 if word == IMAGE else cell
                if word not in (IMAGE, BETWEEN):
                    now, cell = now + 1 + 4 * bool(cell), 0
        return found


class MadeUpModel(PreTrainedModel, GenerationMixin):
    """The model with a head of words."""

    config_class, base_model_prefix, main_input_name, _supports_sdpa = MadeUpConfig, "model", "input_ids", True
    input_modalities = ("image", "text")

    def __init__(self, seed: int = 0) -> None:
        super().__init__(MadeUpConfig(attn_implementation="sdpa"))
        self.model, self.lm_head = MadeUpBase(self.config), nn.Linear(WIDTH, 64, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=1.5 / math.sqrt(parameter.shape[-1]), generator=generator)
        self.eval()

    def get_decoder(self) -> Language:
        return self.model.language

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.language.words

    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return {name: value for name, value in inputs.items() if name not in ("position_ids", "use_cache")}

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Any = None,
        pixel_values: Any = None,
        mm_encoder_outputs: Any = None,
        logits_to_keep: int = 0,
        return_dict: bool = True,
    ) -> CausalLMOutputWithPast:
        past = DynamicCache(config=self.config) if past_key_values is None else past_key_values
        inner = self.model(input_ids, attention_mask, past, inputs_embeds, pixel_values, mm_encoder_outputs)
        states = inner.last_hidden_state[:, -logits_to_keep:] if logits_to_keep else inner.last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(states), past_key_values=inner.past_key_values)
