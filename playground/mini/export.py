"""Write the trained parts as a LLaVA checkpoint in the official layout, readable on transformers 4.37 and 5.

The configuration files are spelled out rather than saved by a library, so that they do not depend on its version.
The language model is stored in half precision, as LLaVA's is, and the tower in single, as LLaVA runs it. Every file is
written beside its place and moved there, so that a reader never meets half a file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save as to_safetensors
from torch import nn
from transformers import CLIPVisionModel, PreTrainedModel

from playground.mini import tokenizer
from playground.mini.scenes import PATCH, UNITS

TOWER_PATH = "checkpoints/llava-mini/vision_tower"


def _language_json(model: PreTrainedModel, tower_width: int) -> dict:
    config = model.config
    shape = {key: getattr(config, key) for key in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id",
        "pad_token_id")}  # fmt: skip
    theta = (
        getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
    )  # before and since transformers 5
    return {
        "architectures": ["LlavaLlamaForCausalLM"], "model_type": "llava_llama", **shape,
        "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "rope_theta": theta,
        "rope_scaling": None,
        "tie_word_embeddings": True, "use_cache": True, "torch_dtype": "float32", "initializer_range": 0.02,
        "pretraining_tp": 1,
        "mm_vision_tower": TOWER_PATH, "mm_hidden_size": tower_width, "mm_projector_type": "mlp2x_gelu",
        "mm_vision_select_layer": -2, "mm_vision_select_feature": "patch", "mm_use_im_start_end": False,
        "mm_use_im_patch_token": False, "image_aspect_ratio": "pad", "use_mm_proj": True, "tune_mm_mlp_adapter": False,
        "freeze_mm_mlp_adapter": False, "mm_patch_merge_type": "flat",
    }  # fmt: skip


def _tower_json(clip: CLIPVisionModel) -> dict:
    config = clip.config
    shape = {key: getattr(config, key) for key in (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size",
        "projection_dim", "hidden_act", "layer_norm_eps")}  # fmt: skip
    return {"architectures": ["CLIPVisionModel"], "model_type": "clip_vision_model", "num_channels": 3,
            "attention_dropout": 0.0, "torch_dtype": "float32", **shape}  # fmt: skip


def _processor_json() -> dict:
    return {"image_processor_type": "CLIPImageProcessor", "feature_extractor_type": "CLIPFeatureExtractor",
            "do_resize": True, "size": {"shortest_edge": UNITS}, "resample": 3, "do_center_crop": True,
            "crop_size": {"height": UNITS, "width": UNITS}, "do_rescale": True, "rescale_factor": 1 / 255,
            "do_normalize": True, "do_convert_rgb": True, "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711]}  # fmt: skip


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    os.replace(part, path)


def _json(path: Path, value: dict) -> None:
    put(path, (json.dumps(value, indent=2) + "\n").encode())


def _weights(state: dict[str, torch.Tensor], kind: torch.dtype) -> bytes:
    return to_safetensors(
        {k: v.detach().to(kind).cpu().contiguous() for k, v in state.items()}, metadata={"format": "pt"}
    )


def export(model: PreTrainedModel, projector: nn.Sequential, clip: CLIPVisionModel, folder: Path) -> None:
    """Write the checkpoint; `projector` is Linear, GELU, Linear."""
    assert clip.config.patch_size == PATCH
    export_tower(clip, folder)
    export_language(model, projector, folder, clip.config.hidden_size)


def export_tower(clip: CLIPVisionModel, folder: Path) -> None:
    """Write the tower and its picture processor under `vision_tower`."""
    tower = {("" if k.startswith("vision_model.") else "vision_model.") + k: v for k, v in clip.state_dict().items()
             if not k.endswith("position_ids")}  # fmt: skip
    put(folder / "vision_tower" / "model.safetensors", _weights(tower, torch.float32))
    _json(folder / "vision_tower" / "config.json", _tower_json(clip))
    _json(folder / "vision_tower" / "preprocessor_config.json", _processor_json())


def export_language(model: PreTrainedModel, projector: nn.Sequential, folder: Path, tower_width: int) -> None:
    """Write the language model with its projector, the configuration and the tokenizer."""
    language = {k: v for k, v in model.state_dict().items() if k.startswith("model.") and "mm_projector" not in k}
    language |= {f"model.mm_projector.{k}": v for k, v in projector.state_dict().items()}
    put(folder / "model.safetensors", _weights(language, torch.float16))
    _json(folder / "config.json", _language_json(model, tower_width))
    _json(
        folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "do_sample": False}
    )
    tokenizer.save(folder)
