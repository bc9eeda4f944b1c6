"""A LLaVA checkpoint in the layout of Hugging Face, 1.5 or 1.6; transformers 5 has no conversion any more.

Tensors are read one at a time and written shard by shard. The Hugging Face layout has one word more, `<image>`, which
is never generated. The small files of the official checkpoint go along in a folder `official`, and so does a tower that
is a whole CLIP model, for methods that read the question by its text side.

A LoRA checkpoint and the model it was trained on become one checkpoint: PEFT merges the adapter, and weights that were
trained whole (`non_lora_trainables.bin`: the projector) replace those of the base.
"""

import ast
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llava_consensus.errors import DataError, missing_extra
from llava_consensus.evaluation.files import read_json, write_json
from llava_consensus.evaluation.models.llava import FLAG
from llava_consensus.evaluation.models.weights import (
    MEND,
    copy_small_files,
    new_folder,
    rewrite,
    tensors_of,
    weight_files,
    write_shards,
)
from llava_consensus.hosts.clip import without_unused_report
from llava_consensus.hosts.environment import load_pretrained
from llava_consensus.hosts.official_model import check_images

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NAMES = (  # how names of tensors begin in the official layout and in Hugging Face's; the first that fits
    ("model.mm_projector.0.", "multi_modal_projector.linear_1."),
    ("model.mm_projector.2.", "multi_modal_projector.linear_2."),
    ("model.vision_tower.vision_tower.", "vision_tower."),
    ("model.image_newline", "image_newline"),
    ("model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)
SIGHT = "vision_model."  # how names of the vision side of a CLIP model begin
OFFICIAL = "official"  # folder of the small files of the official checkpoint
IMAGE = "<image>"
SETTINGS, WHOLE = "adapter_config.json", "non_lora_trainables.bin"
ADAPTED = "base_model.model."  # of names as PEFT writes them
# Prompts of LLaVA-1.5 (`vicuna_v1` of the official package): images of a user come first, then a new line. vLLM gives
# a template the parts of a message only if it sees a loop over them.
TEMPLATE = Path(__file__).with_name("vicuna.jinja")
SQUARE, TILED = "LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration"  # classes of LLaVA 1.5 and 1.6


def convert(source: Path, out: Path) -> str:
    """Writes an official checkpoint in the layout of Hugging Face; returns a line about it."""
    if not (source / "config.json").is_file():
        raise DataError(f"{source}: no config.json in it, so it is no checkpoint")
    config = read_json(source / "config.json", MEND, dict)
    with new_folder(out, source) as fresh:
        tower = _tower(source, config)
        written = write_shards(_tensors(source, tower, bool(config.get(FLAG))), fresh)
        tower_config = read_json(tower / "config.json", MEND, dict)
        image_id = _write_processor(source, tower, fresh, config)
        write_json(fresh / "config.json", _configuration(config, tower_config, image_id))
        settings = source / "generation_config.json"
        generation = read_json(settings, MEND, dict) if settings.is_file() else {}
        write_json(fresh / "generation_config.json", generation | {"suppress_tokens": [image_id]})
        copy_small_files(source, fresh / OFFICIAL)
        copy_small_files(tower, fresh / OFFICIAL / tower.name)
        if "text_config" in tower_config:
            for path in weight_files(tower):
                shutil.copyfile(path, fresh / OFFICIAL / tower.name / path.name)
    return f"{written} tensors: {out}"


def _tower(source: Path, config: dict[str, Any]) -> Path:
    """The folder of a checkpoint's vision tower. DataError for a checkpoint that cannot be converted."""
    made_by = config.get("architectures", [])
    if not any(name.startswith("LlavaLlama") for name in made_by):
        raise DataError(f"{source}: made by {made_by}; only official LLaVA with a Llama model is converted")
    check_images(config)
    for name, known in (("mm_projector_type", "mlp2x_gelu"), ("mm_patch_merge_type", "spatial_unpad")):
        if config.get(name) != known and (name == "mm_projector_type" or _is_tiled(config)):
            raise DataError(f"{source}: {name}={config.get(name)!r} must be {known!r}, as in LLaVA 1.5 and 1.6")
    given = config.get("mm_vision_tower")
    name = Path(given).name if isinstance(given, str) else ""
    if name in ("", "..") or not (source / name / "config.json").is_file():
        raise DataError(f"{source}: its vision tower, mm_vision_tower={given!r}, is not in the same folder")
    return source / name


def _tensors(source: Path, tower: Path, own_tower: bool) -> Iterator[tuple[str, Tensor]]:
    """Tensors of language model, projector and tower under their new names, one at a time."""
    for path in weight_files(source):
        for name, values in tensors_of(path):
            if name in (EMBEDDING, HEAD):  # one word more, which is never read or generated
                values = torch.cat((values, values.new_zeros(1, values.shape[1])))
            before, after = next((pair for pair in NAMES if name.startswith(pair[0])), ("", ""))
            yield after + name.removeprefix(before), values
    for path in [] if own_tower else weight_files(tower):
        yield from ((f"vision_tower.{name}", values) for name, values in tensors_of(path, SIGHT))


def _is_tiled(config: dict[str, Any]) -> bool:
    return config.get("image_aspect_ratio") == "anyres"


def _grids(config: dict[str, Any]) -> list[list[int]]:
    """Grids as height and width, which the official package has as width and height, in a list or its text."""
    grids = config["image_grid_pinpoints"]
    return [[height, width] for width, height in (ast.literal_eval(grids) if isinstance(grids, str) else grids)]


def _configuration(config: dict[str, Any], tower: dict[str, Any], image_id: int) -> dict[str, Any]:
    """The configuration of the whole model, from those of the language model and the tower."""
    vision = dict(tower.get("vision_config", tower), model_type="clip_vision_model")
    words = config["vocab_size"] + 1
    language = {
        name: value for name, value in config.items() if not name.startswith(("mm_", "image_", "tune_", "freeze_"))
    }
    tiled = {"image_grid_pinpoints": _grids(config)} if _is_tiled(config) else {}
    return {
        "architectures": [TILED if tiled else SQUARE],
        "model_type": "llava_next" if tiled else "llava",
        **tiled,
        "image_token_index": image_id,
        "image_seq_length": (vision["image_size"] // vision["patch_size"]) ** 2,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": config["mm_vision_select_layer"],
        "vision_feature_select_strategy": "default" if config["mm_vision_select_feature"] == "patch" else "full",
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "torch_dtype": config.get("torch_dtype", "float32"),
        "text_config": language | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": words},
        "vision_config": vision,
    }


def _write_processor(source: Path, tower: Path, out: Path, config: dict[str, Any]) -> int:
    """Tokenizer with `<image>`, image processor and template of prompts. Returns the first free id, of `<image>`."""
    import transformers

    tokenizer = load_pretrained(transformers.PreTrainedTokenizerFast, source)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    settings = read_json(tower / "preprocessor_config.json", MEND, dict)
    keys = ("size", "crop_size", "image_mean", "image_std", "resample", "do_center_crop", "do_resize", "do_normalize")
    known = {name: settings[name] for name in keys if name in settings}
    if _is_tiled(config):
        make_processor = transformers.LlavaNextProcessor
        images = transformers.LlavaNextImageProcessor(**known, image_grid_pinpoints=_grids(config))
    else:
        make_processor = transformers.LlavaProcessor
        images = transformers.LlavaImageProcessor(**known, do_pad=config.get("image_aspect_ratio") == "pad")
    make_processor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=read_json(tower / "config.json", MEND, dict).get("vision_config", {}).get("patch_size", 14),
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=IMAGE,
        chat_template=TEMPLATE.read_text("utf-8").strip(),
    ).save_pretrained(out)
    image_id: int = tokenizer.convert_tokens_to_ids(IMAGE)
    return image_id


# ---- LoRA


def merge(lora: Path, base: Path, out: Path) -> str:
    """Writes the merged checkpoint, whole or not at all; returns a line about it."""
    if find_spec("peft") is None:
        raise missing_extra("LoRA checkpoints need peft", "eval")
    if not (lora / SETTINGS).is_file():
        raise DataError(f"{lora}: no {SETTINGS} in it, so it is no LoRA checkpoint")
    import transformers
    from peft import PeftModel

    kind = str(read_json(base / "config.json", MEND, dict).get("model_type"))
    # the class without a vision tower, which the adapter does not touch
    cls = transformers.MistralForCausalLM if "mistral" in kind else transformers.LlamaForCausalLM
    with new_folder(out, lora) as fresh:
        with without_unused_report():
            model = load_pretrained(cls, base, torch_dtype="auto")
        adapted = PeftModel.from_pretrained(model, lora)
        names = [f"{name}.weight" for name in adapted.targeted_module_names]
        state = adapted.merge_and_unload().state_dict()
        values = {name: state[name] for name in names}
        if (lora / WHOLE).is_file():
            values |= {name.removeprefix(ADAPTED): value for name, value in tensors_of(lora / WHOLE)}
        count = rewrite(base, fresh, values)
        copy_small_files(base, fresh)
        copy_small_files(lora, fresh)
        (fresh / SETTINGS).unlink()
    return f"{count} tensors, {len(names)} of them adapted: {out}"
