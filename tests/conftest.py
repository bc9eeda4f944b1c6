"""Tiny hosts in memory: random weights, no files from a hub, no network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

torch.set_num_threads(1)
PATCHES = 16
IMAGE = 56


@pytest.fixture(scope="session")
def tower_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP tower of four blocks, 4 x 4 patches and a class token, saved to disk as LLaVA's loader wants it."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    folder = tmp_path_factory.mktemp("tower")
    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=IMAGE,
        patch_size=14,
    )
    tower = CLIPVisionModel(config)
    for parameter in tower.parameters():  # larger than the default, so that saliencies differ
        torch.nn.init.normal_(parameter, std=0.3)
    tower.save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": IMAGE}, crop_size={"height": IMAGE, "width": IMAGE}).save_pretrained(
        folder
    )
    return folder


def tiny_llava(tower: Path, family: str = "llama", seed: int = 0, **config: Any) -> Any:
    """A LLaVA of three layers with grouped-query attention and random weights, its tower loaded."""
    from llava.model.language_model import llava_llama, llava_mistral

    classes = {
        "llama": (llava_llama.LlavaConfig, llava_llama.LlavaLlamaForCausalLM),
        "mistral": (llava_mistral.LlavaMistralConfig, llava_mistral.LlavaMistralForCausalLM),
    }
    make_config, make_model = classes[family]
    shape = dict(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    )
    special = dict(
        max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False
    )
    vision = dict(
        mm_vision_tower=str(tower), mm_hidden_size=32, mm_projector_type="mlp2x_gelu", mm_vision_select_layer=-2
    )
    choices = dict(mm_vision_select_feature="patch", image_aspect_ratio="pad", use_cache=True)
    torch.manual_seed(seed)
    model = make_model(make_config(**{**shape, **special, **vision, **choices, **config}))
    for name, parameter in model.named_parameters():
        if (parameter.ndim > 1 or "newline" in name) and "vision_tower" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.get_vision_tower().load_model()
    return model.float().eval()


@pytest.fixture(scope="session")
def llava_model(tower_folder: Path) -> Any:
    """One tiny Llama LLaVA for the tests that leave it as they found it."""
    return tiny_llava(tower_folder)


@pytest.fixture
def prompt() -> SimpleNamespace:
    """A prompt with one picture: five ids before it, seven after."""
    torch.manual_seed(3)
    ids = torch.tensor([[1, 5, 6, 7, 8, -200, 9, 10, 11, 12, 13, 14, 15]])
    return SimpleNamespace(ids=ids, images=torch.randn(1, 3, IMAGE, IMAGE))
