"""The files beside the weights of a converted checkpoint: configuration, settings of `generate`, and the processor with
the template of LLaVA's prompts.
"""

import ast
import json
from pathlib import Path
from typing import Any

from llava_consensus.evaluation.files import read_json
from llava_consensus.hosts.llava.checks import CONVERSATION

MEND = "Fetch the checkpoint again"
IMAGE = "<image>"
SQUARE, TILED = "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration"  # classes of LLaVA 1.5 and 1.6


def configuration(config: dict[str, Any], tower: dict[str, Any], image_id: int) -> dict[str, Any]:
    """The configuration of the whole model, from those of the language model and the tower.

    Args:
        image_id: of the word `<image>` in the tokenizer.
    """
    vision = dict(tower.get("vision_config", tower), model_type="clip_vision_model")
    patches = (vision["image_size"] // vision["patch_size"]) ** 2
    language = {
        name: value for name, value in config.items() if not name.startswith(("mm_", "image_", "tune_", "freeze_"))
    }
    tiled = {"image_grid_pinpoints": _pinpoints(config)} if _is_tiled(config) else {}
    text = language | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config["vocab_size"] + 1,
    }
    return {
        "architectures": [TILED if tiled else SQUARE],
        "model_type": "llava_next" if tiled else "llava",
        **tiled,
        "image_token_index": image_id,
        "image_seq_length": patches,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": config["mm_vision_select_layer"],
        "vision_feature_select_strategy": "default" if config["mm_vision_select_feature"] == "patch" else "full",
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "torch_dtype": config.get("torch_dtype", "float32"),
        "text_config": text,
        "vision_config": vision,
    }


def generation(source: Path) -> dict[str, Any]:
    """Settings of `generate`; none where the checkpoint has none."""
    file = source / "generation_config.json"
    settings: dict[str, Any] = read_json(file, MEND, dict) if file.is_file() else {}
    return settings


def _is_tiled(config: dict[str, Any]) -> bool:
    return config.get("image_aspect_ratio") == "anyres"


def _pinpoints(config: dict[str, Any]) -> list[list[int]]:
    """Grids as height and width, which the official package has as width and height, in a list or its text."""
    grids = config["image_grid_pinpoints"]
    return [[height, width] for width, height in (ast.literal_eval(grids) if isinstance(grids, str) else grids)]


def write_processor(source: Path, tower: Path, out: Path, config: dict[str, Any]) -> int:
    """Tokenizer with `<image>`, image processor that pads as LLaVA does, and the template of its prompts. Returns
    the id of `<image>`: the first that the tokenizer has free, which a model may have rows for already.
    """
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(source)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    settings = read_json(tower / "preprocessor_config.json", MEND, dict)
    keys = ("size", "crop_size", "image_mean", "image_std", "resample", "do_center_crop", "do_resize", "do_normalize")
    image_settings = {name: settings[name] for name in keys if name in settings}
    if _is_tiled(config):
        make_processor = transformers.LlavaNextProcessor
        images = transformers.LlavaNextImageProcessor(**image_settings, image_grid_pinpoints=_pinpoints(config))
    else:
        make_processor = transformers.LlavaProcessor
        pads = config.get("image_aspect_ratio") == "pad"
        images = transformers.LlavaImageProcessor(**image_settings, do_pad=pads)
    processor = make_processor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=read_json(tower / "config.json", MEND, dict).get("vision_config", {}).get("patch_size", 14),
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE,
        chat_template=chat_template(),
    )
    processor.save_pretrained(out)
    image_id: int = tokenizer.convert_tokens_to_ids(IMAGE)
    return image_id


# What LLaVA-1.5 is asked, with its words for each part in capitals: a user's pictures come first, then a new line.
TEMPLATE = """
{{ FRONT }}
{%- for message in messages -%}
{%- set pictures = message['content'] | selectattr('type', 'equalto', 'image') | list -%}
{%- set texts = message['content'] | selectattr('type', 'equalto', 'text') | map(attribute='text') | join -%}
{%- if message['role'] == 'user' -%}
{{ USER + ': ' + IMAGE * (pictures | length) + ('\\n' if pictures else '') + texts + AFTER_USER }}
{%- else -%}
{{ ASSISTANT + ': ' + texts + AFTER_ANSWER }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ ASSISTANT + ':' }}{%- endif -%}
"""


def chat_template() -> str:
    """The template of LLaVA-1.5's prompts for Hugging Face's processors, with the words of the official package."""
    from llava.conversation import conv_templates

    turns = conv_templates[CONVERSATION]
    words = {"AFTER_ANSWER": turns.sep2, "AFTER_USER": turns.sep, "FRONT": turns.system + turns.sep}
    words |= {"ASSISTANT": turns.roles[1], "USER": turns.roles[0], "IMAGE": IMAGE}
    template = TEMPLATE.strip()
    for name, text in words.items():  # longer names that hold shorter ones come first
        template = template.replace(name, json.dumps(text))
    return template
