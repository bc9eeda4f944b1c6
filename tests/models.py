"""Tiny models in memory with random weights, shared by the tests."""

import json
from pathlib import Path
from typing import Any

import torch

PATCHES = 16
IMAGE = 56
LENGTH = 24  # of the tiny text tower


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


def write_text_side(folder: Path) -> int:
    """CLIP's byte vocabulary without merges; its size."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(code) for code in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    special = {"bos_token": words[-2], "eos_token": words[-1], "unk_token": words[-1], "pad_token": words[-1]}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CLIPTokenizer", **special}))
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    return len(words)


def write_clip(folder: Path, vision: dict[str, Any]) -> Any:
    """A whole CLIP model with random weights, its tokenizer beside it."""
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    folder.mkdir(parents=True, exist_ok=True)
    words = write_text_side(folder)
    ends = dict(bos_token_id=words - 2, eos_token_id=words - 1, pad_token_id=words - 1)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, projection_dim=24)
    text = CLIPTextConfig(vocab_size=words, max_position_embeddings=LENGTH, **sizes, **ends)
    sight = CLIPVisionConfig(**{**vision, "projection_dim": 24})
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=sight.to_dict(), projection_dim=24)).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return model
