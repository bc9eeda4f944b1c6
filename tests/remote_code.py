"""The authors' own code of models that carry their code, where a folder outside this repository holds it: small models
with the configuration and the weights of the doubles, so that the same tests run on both.

`REMOTE_CODE` names the folder. Without it no test needs any of this. For LLaVA's pins alone, as the code is of 2023.
In the folder lie `qwen_vl/` (the Python files of Qwen-VL, as in github.com/x1ngzai/Qwen-VL-Chat-Int4 at 1cd721a, and
an empty `__init__.py`), `internvl_chat/llava/` (`internvl_chat_llava/llava` of github.com/OpenGVLab/InternVL at
2410d1d) and `site/` (what they import beside torch and transformers: torchvision, timm 0.9.16, peft 0.10.0, requests,
matplotlib).
"""

import importlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers
from remote_doubles.base import built
from remote_doubles.internvl_chat import LANGUAGE, TOWER
from remote_doubles.qwen_vl import SMALL

FOLDER = Path(os.environ["REMOTE_CODE"]).resolve() if os.environ.get("REMOTE_CODE") else None


def held(name: str) -> bool:
    """Whether the code of a model lies in the folder."""
    return FOLDER is not None and (FOLDER / name).is_dir()


def _module(name: str, folder: str = ".") -> Any:
    """A module of the folder. What else it imports may lie in `site` beside it."""
    assert FOLDER is not None
    place, beside = str(FOLDER / folder), str(FOLDER / "site")
    if place not in sys.path:
        sys.path.insert(0, place)
    if beside not in sys.path:
        sys.path.append(beside)
    return importlib.import_module(name)


def qwen_vl(seed: int = 0, visual: Any = None, hidden_size: int = 256, num_hidden_layers: int = 3) -> Any:
    """Qwen-VL's `QWenLMHeadModel`."""
    modeling = _module("qwen_vl.modeling_qwen")
    config = _module("qwen_vl.configuration_qwen").QWenConfig(
        vocab_size=1280,
        hidden_size=hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        kv_channels=hidden_size // 4,
        intermediate_size=256,
        seq_length=2048,
        visual=visual or {**SMALL, "output_dim": hidden_size, "image_start_id": 1260},
        fp32=True,
        use_flash_attn=False,
        pad_token_id=1263,
        eos_token_id=2,
    )
    return built(modeling.QWenLMHeadModel, config, seed)


def internvl_chat(seed: int = 0, shown: int = 112, **vision: Any) -> Any:
    """`LlavaLlamaForCausalLM` of internvl_chat_llava, which is named `llava` as the official package is."""
    llava = _module("llava.model.language_model.llava_llama", "internvl_chat")
    assert FOLDER is not None and str(FOLDER) in str(llava.__file__), (
        "another package named llava was imported before: put REMOTE_CODE's internvl_chat first in PYTHONPATH"
    )
    encoder = importlib.import_module("llava.model.multimodal_encoder.clip_encoder")
    with tempfile.TemporaryDirectory() as name:  # the tower is read from a checkpoint, whose kind its name says
        folder = Path(name) / "intern_vit_6b"
        sizes = {**TOWER, **vision, "qkv_bias": False, "qk_normalization": True, "drop_path_rate": 0.0}
        encoder.InternVisionModel(encoder.InternVisionConfig(**sizes)).save_pretrained(folder)
        config = llava.LlavaConfig(
            **LANGUAGE,
            mm_vision_tower=str(folder),
            mm_hidden_size=TOWER["hidden_size"],
            mm_projector_type="mlp2x_gelu",
            mm_vision_select_layer=-4,
        )

        def made(config: Any) -> Any:
            model = llava.LlavaLlamaForCausalLM(config)
            model.get_vision_tower().load_model()
            return model

        model = built(made, config, seed)
    model.get_vision_tower().image_processor = transformers.CLIPImageProcessor(crop_size=shown, size=shown)
    return model
