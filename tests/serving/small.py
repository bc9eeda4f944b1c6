"""Tiny random models as folders that vLLM and transformers both load, with tokenizer and processor, and pictures."""

import os
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
from PIL import Image

ENVIRONMENT = {  # one engine in this process, small, bound to this machine
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
TEXT = dict(hf_models.TEXT, hidden_size=128)  # vLLM's attention on CPU wants heads of 32


def tokenizer(special: dict[str, int]) -> Any:
    """Words w0, w1, ... and these special tokens, by their ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {number: f"w{number}" for number in range(512)} | {511: "<unk>"}
    names |= {number: name for name, number in special.items()}
    inner = Tokenizer(models.WordLevel({name: number for number, name in names.items()}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="w1", eos_token="w2", pad_token="w0"
    )
    own.add_special_tokens({"additional_special_tokens": list(special)})
    own.chat_template = (
        "{% for m in messages %}{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% else %} <image> "
        "{% endif %}{% endfor %}{% endfor %}"
    )
    return own


def llava(folder: Path) -> Any:
    """LLaVA 1.5."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers import LlavaForConditionalGeneration, LlavaProcessor

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**hf_models.SQUARE),
        text_config=LlamaConfig(**TEXT),
        image_token_index=hf_models.IMAGE,
        image_seq_length=16,
    )
    model = hf_models.ready(LlavaForConditionalGeneration, config)
    pictures = CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    processor = LlavaProcessor(
        pictures,
        tokenizer({"<image>": hf_models.IMAGE}),
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
    )
    return save(folder, model, processor)


def save(folder: Path, model: Any, processor: Any) -> Any:
    """Writes both and gives them back."""
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


FAMILIES = {"llava": llava}


def picture(number: int, size: tuple[int, int] = (70, 60)) -> Image.Image:
    """A picture of noise in blocks."""
    rows = np.random.default_rng(number).integers(0, 255, (7, 6, 3), dtype=np.uint8)
    return Image.fromarray(rows).resize(size, Image.Resampling.BILINEAR)


def engine(folder: Path, **settings: Any) -> Any:
    """A small engine of vLLM."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM

    settings = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "gpu_memory_utilization": 0.05,
        "limit_mm_per_prompt": {"image": 3},
        "seed": 0,
        **settings,
    }
    return LLM(str(folder), **settings)
