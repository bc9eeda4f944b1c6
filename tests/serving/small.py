"""Tiny random models as folders that vLLM and transformers both load, with tokenizer and processor, and pictures."""

import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import gated_delta
import hf_models
import numpy as np
import torch
import transformers
from hf_models import BOX, END, IMAGE, START, TAG, VIDEO
from PIL import Image

ENVIRONMENT = {  # one engine in this process, small, bound to this machine
    **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    **{"VLLM_HOST_IP": "127.0.0.1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
}
TEXT = dict(hf_models.TEXT, hidden_size=128)  # vLLM's attention on CPU wants heads of 32
LLAMA, QWEN2 = dict(TEXT, model_type="llama"), dict(TEXT, model_type="qwen2")
MARK = {"<image>": IMAGE}
CROP = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
CLIP = dict(
    patch_size=14, vision_feature_select_strategy="default", image_token="<image>", num_additional_image_tokens=1
)


def tokenizer(special: dict[str, int], **named: str) -> Any:
    """Words w0, w1, ... and these special tokens, by their ids; some of them have names."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    names = {number: f"w{number}" for number in range(512)} | {0: "<pad>", 1: "<s>", 2: "</s>", 511: "<unk>"}
    names |= {number: name for name, number in special.items()}
    inner = Tokenizer(models.WordLevel({name: number for number, name in names.items()}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **ends, extra_special_tokens=named)
    own.add_special_tokens({"additional_special_tokens": list(special)})
    # Qwen3.5's is made anew of what is saved, as one of bytes
    own.add_tokens([AddedToken(name, single_word=True) for name in inner.get_vocab() if name.startswith("w")])
    own.chat_template = (
        "{% for m in messages %}{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% else %} <image> "
        "{% endif %}{% endfor %}{% endfor %}"
    )
    return own


def llava(folder: Path) -> Any:
    model = hf_models.built("llava", **hf_models.LLAVA | {"text_config": LLAMA})
    pictures = transformers.CLIPImageProcessor(**CROP)
    return save(folder, model, transformers.LlavaProcessor(pictures, tokenizer(MARK), **CLIP))


def llava_next(folder: Path) -> Any:
    """LLaVA-NeXT with grids of up to 2 x 2 tiles."""
    model = hf_models.built("llava_next", **hf_models.NEXT | {"text_config": LLAMA})
    pictures = transformers.LlavaNextImageProcessor(**CROP, image_grid_pinpoints=hf_models.PINS)
    return save(folder, model, transformers.LlavaNextProcessor(pictures, tokenizer(MARK), **CLIP))


def llava_onevision(folder: Path) -> Any:
    """LLaVA-OneVision with grids of up to 4 x 4 tiles, of which the largest is resized."""
    pins = [[56 * a, 56 * b] for a in range(1, 5) for b in range(1, 5)]
    own = {"text_config": QWEN2, "image_grid_pinpoints": pins, "tie_word_embeddings": False}
    known = {name: value for name, value in hf_models.ONEVISION.items() if name != "vision_aspect_ratio"}
    model = hf_models.built("llava_onevision", **known | own)
    size = {"height": 56, "width": 56}
    pictures = transformers.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=pins)
    videos, words = transformers.LlavaOnevisionVideoProcessor(size=size), tokenizer({**MARK, "<video>": VIDEO})
    counts = dict(num_image_tokens=16, vision_feature_select_strategy="full")
    return save(folder, model, transformers.LlavaOnevisionProcessor(pictures, words, videos, **counts))


def qwen(kind: str, folder: Path) -> Any:
    sides = dict(hidden_size=128, out_hidden_size=128)
    text = dict(TEXT, head_dim=32, rope_parameters={**hf_models.MROPE, "mrope_section": [4, 6, 6]})
    if kind == "Qwen2_5_VL":
        patch, vision = 14, hf_models.QWEN2_5 | sides
        processors, clips = transformers.Qwen2_5_VLProcessor, transformers.Qwen2VLVideoProcessor
    else:
        patch, vision = 16, hf_models.QWEN3 | sides
        processors, clips = transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    if kind == "Qwen3_5":
        gated_delta.install()
        del vision["deepstack_visual_indexes"]
        text |= dict(linear_key_head_dim=128, linear_value_head_dim=128)
        text |= dict(linear_num_key_heads=2, linear_num_value_heads=4)
        text["layer_types"] = ["linear_attention", "full_attention"] * 2  # the first attention is not the last
        text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **hf_models.ALL)
    model = hf_models.ready(getattr(transformers, f"{kind}ForConditionalGeneration"), config)
    for weight in model.model.visual.parameters():  # else plain vLLM and plain transformers differ by 2e-4 already
        weight.data *= 0.5 if weight.ndim > 1 else 1
    size = {"shortest_edge": 8 * 8 * patch**2, "longest_edge": 12 * 12 * patch**2}
    pictures, videos = (one(patch_size=patch, size=size) for one in (transformers.Qwen2VLImageProcessor, clips))
    words = {"<|image_pad|>": IMAGE, "<|video_pad|>": VIDEO, "<|vision_start|>": START, "<|vision_end|>": END}
    return save(folder, model, processors(pictures, tokenizer(words), videos))


def internvl(folder: Path) -> Any:
    """InternVL with up to four tiles and the whole view."""
    model = hf_models.built("internvl", **hf_models.INTERNVL | {"text_config": QWEN2})
    size = {"height": 112, "width": 112}
    pictures = transformers.GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=4)
    videos = transformers.InternVLVideoProcessor(size=size)
    named = dict(context_image_token="<image>", video_token="<video>")
    named |= dict(start_image_token="<img>", end_image_token="</img>")
    words = tokenizer({**MARK, "<video>": VIDEO, "<img>": START, "</img>": END}, **named)
    return save(folder, model, transformers.InternVLProcessor(pictures, words, videos, image_seq_length=16))


def gemma4(folder: Path, **text: Any) -> Any:
    """Gemma 4 with 70 tokens of an image at most, per-layer embeddings, and layers that read keys of others."""
    sizes = dict(head_dim=32, global_head_dim=64, sliding_window=64, layer_types=hf_models.KINDS)
    sizes |= dict(hidden_size_per_layer_input=16, vocab_size_per_layer_input=512, num_kv_shared_layers=2)
    vision = dict(num_key_value_heads=4, head_dim=8, position_embedding_size=128, default_output_length=70)
    sides = dict(vision_config=hf_models.VISION | vision, audio_config=None)
    sides |= dict(text_config={**TEXT, "tie_word_embeddings": True, **sizes, **text})
    ids = dict(image_token_id=IMAGE, video_token_id=VIDEO, boi_token_id=START, eoi_token_id=END)
    ids |= dict(audio_token_id=TAG, boa_token_id=BOX, eoa_token_index=506)
    model = hf_models.built("gemma4", **sides, **ids)
    words = model.model.language_model.embed_tokens.weight.data
    words *= 0.3  # else a word is followed by itself
    words[IMAGE:] = 0  # and placeholders are said, which transformers takes for images
    named = {f"{name}_token": f"<{name}>" for name in ("image", "boi", "eoi", "audio", "boa", "eoa")}
    special = {**MARK, "<|video|>": VIDEO, "<boi>": START, "<eoi>": END, "<audio>": TAG, "<boa>": BOX, "<eoa>": 506}
    sounds, videos = transformers.Gemma4AudioFeatureExtractor(), transformers.Gemma4VideoProcessor()
    parts = sounds, transformers.Gemma4ImageProcessor(max_soft_tokens=70), tokenizer(special, **named), videos
    return save(folder, model, transformers.Gemma4Processor(*parts, image_seq_length=70))


def save(folder: Path, model: Any, processor: Any) -> Any:
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor


def quantise(folder: Path, model: Any) -> None:
    """Makes the language model's layers of a folder and of its model int8, as `compressed-tensors` has them: weights
    for each output, activations for each token.
    """
    from safetensors.torch import load_file, save_file

    layers = {f"{name.partition('layers.')[2]}.weight": layer for name, layer in model.named_modules()}
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if "language_model" in name and name.endswith("_proj.weight")]:
        layer, weight = layers[name.partition("layers.")[2]], weights[name]
        scale = weights[f"{name}_scale"] = weight.abs().amax(1, keepdim=True) / 127
        weights[name] = (weight / scale).round().to(torch.int8)
        layer.weight.data = weights[name] * scale
        layer.register_forward_pre_hook(lambda _, given: (in_steps(given[0]),))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    int8 = {"num_bits": 8, "type": "int", "symmetric": True}
    sides = {"weights": {**int8, "strategy": "channel", "dynamic": False}}
    sides |= {"input_activations": {**int8, "strategy": "token", "dynamic": True}}
    own = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    own |= {"config_groups": {"group_0": {"targets": ["Linear"], **sides}}}
    own |= {"ignore": ["lm_head", "re:.*vision.*", "re:.*projector.*"]}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": own}))


def in_steps(values: torch.Tensor) -> torch.Tensor:
    """Values as int8 has them, a scale for each row."""
    scale = values.abs().amax(-1, keepdim=True) / 127
    return (values / scale).round() * scale


FAMILIES = {
    "llava": llava,
    "llava_next": llava_next,
    "llava_onevision": llava_onevision,
    "qwen2_5_vl": partial(qwen, "Qwen2_5_VL"),
    "qwen3_vl": partial(qwen, "Qwen3VL"),
    "qwen3_5": partial(qwen, "Qwen3_5"),
    "internvl": internvl,
    "gemma4": gemma4,
}


def budget(family: str) -> int:
    """Tokens of an image, fewer than any has; of images of up to 17 tiles at least one for each tile."""
    return 20 if family == "llava_onevision" else 6


def placeholder(family: str, modality: str = "image") -> str:
    """What stands for an image in the words of a prompt."""
    return f"<|vision_start|> <|{modality}_pad|> <|vision_end|>" if "qwen" in family else f"<{modality}>"


def picture(number: int, size: tuple[int, int] = (70, 60)) -> Image.Image:
    rows = np.random.default_rng(number).integers(0, 255, (7, 6, 3), dtype=np.uint8)
    return Image.fromarray(rows).resize(size, Image.Resampling.BILINEAR)


def clip(number: int, frames: int, size: tuple[int, int] = (70, 60)) -> Any:
    """A video of noise in blocks: [frames, h, w, 3]."""
    return np.stack([np.asarray(picture(100 * number + frame, size)) for frame in range(frames)])


def ready() -> None:
    """Makes this process one in which engines are small. With VLLM_USE_V2_MODEL_RUNNER=1 and TRITON_INTERPRET=1 they
    have vLLM's second model runner, whose kernels run in Triton's interpreter (`pip install triton`).
    """
    os.environ.update(ENVIRONMENT)
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        from triton.backends import backends

        target = SimpleNamespace(get_current_target=lambda: SimpleNamespace(backend="cpu"))  # Qwen3.5's kernels ask
        driver = Mock(return_value=target, is_active=lambda: True)
        backends["cpu"] = SimpleNamespace(driver=driver)  # vLLM asks for one


def engine(folder: Path, **settings: Any) -> Any:
    ready()
    from vllm import LLM

    own = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8, "seed": 0}
    own |= {"gpu_memory_utilization": 0.05, "limit_mm_per_prompt": {"image": 3}}
    return LLM(str(folder), **own | settings)
