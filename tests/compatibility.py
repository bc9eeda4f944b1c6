"""Which image-text-to-text types of the installed transformers a method works with: `make compatibility` builds a tiny
random model of every type from its configuration, tries one method of each kind, and writes docs/compatibility.md.

    python tests/compatibility.py                 all types; writes the page
    python tests/compatibility.py llava qwen3_vl  these types; prints their rows
"""

import argparse
import inspect
import itertools
import re
import sys
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as TYPES

from llava_consensus import attach
from llava_consensus.errors import ConsensusError
from llava_consensus.hosts import CROSS, takes_features

PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"
TORCH = torch.__version__.partition("+")[0]
KINDS = {  # of methods, with one of each
    "reads nothing": "divprune",
    "vision attention": "visionzip",
    "SCAP": "consensusdrop",
    "between layers": "fastv",
}
VOCABULARY, DEPTH, HEADS, EXPERTS, INNER_WIDTH = 1024, 4, 2, 4, 64


# ---- a small configuration

PLACEHOLDERS = (
    *("image_token_id", "image_token_index", "image_patch_id", "img_context_token_id"),
    *("media_placeholder_token_id", "im_patch_id"),
)
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
INDEXER = {"kv_heads": 1, "n_heads": 2, "heads": 2, "head_dim": 256, "budget": 256, "compress_ratio": 4}
TIMM = {
    "model_type": "timm_wrapper",
    "architecture": "vit_pe_core_large_patch14_336",
    "model_args": {
        **{"embed_dim": 32, "img_size": [56, 56], "depth": 3, "num_heads": 4, "global_pool": "", "init_values": 0.1},
        **{"use_post_transformer_norm": False, "ref_feat_shape": [4, 4]},
    },
}
GIVEN: dict[str, dict[str, Any]] = {  # that the default configuration of a type leaves out
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}},
    "gemma4_unified": {"vision_config": {"model_type": "gemma4_unified_vision"}},
    "perception_lm": {"vision_config": TIMM},
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}},
    **{kind: {"vision_start_token_id": 900} for kind in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")},
    "vision-encoder-decoder": {"decoder_start_token_id": 2, "pad_token_id": 0},
    "granite4_vision": {"downsample_rate": "2/4", "deepstack_layer_map": [[1, 0], [2, 2]]},
    "chameleon": {"vocabulary_map": {"<image>": 400, **{f"IMGIMG{chr(65 + word)}Z": 410 + word for word in range(10)}}},
    "emu3": {
        "vocabulary_map": {"<image>": 400, "<|extra_200|>": 401}
        | {f"<|visual token {word:06}|>": 410 + word for word in range(64)}
    },
}
FIXED: dict[str, dict[str, Any]] = {  # where sizes hang together in another way
    "aria": {"vision_config.image_size": 490, "vision_config.patch_size": 14},
    "gemma3": {"vision_config.image_size": 448, "vision_config.patch_size": 14},
    "pp_formulanet": {"vision_config.image_size": 384},
    "florence2": {"vision_config.embed_dim": [16, 32, 64, 128], "vision_config.depths": [1, 1, 2, 1]},
    "t5gemma2": {"encoder.vision_config.image_size": 448, "encoder.vision_config.patch_size": 14},
    "shieldgemma2": {"vision_config.image_size": 448, "vision_config.patch_size": 14},
    **{kind: {"text_config.rope_parameters": MROPE} for kind in ("glm4v", "glm46v", "glmga")},
    "glm4v_moe": {"text_config.rope_parameters": MROPE, "text_config.head_dim": 128},
    "molmo2": {"adapter_config.vision_feature_layer": [3, 1], "adapter_config.text_hidden_size": 256},
    "chameleon": {"vq_config.num_embeddings": 10, "vq_config.base_channels": 32},
    "emu3": {"vq_config.codebook_size": 64, "vq_config.base_channels": 32, "vq_config.hidden_size": 128},
    "apertus1p5": {
        **{"vision_config.codebook_size": 64, "vision_config.base_channels": 32, "audio_config.codebook_size": 64},
        **{"image_token_offset": 700, "audio_token_offset": 764},
    },
    "unlimited_ocr": {"vision_config.sam_config.downsample_channels": [512, 128]},
    "step3p7": {"text_config.sliding_window": 512},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "llama4": {"vision_config.intermediate_size": 384, "vision_config.vision_output_dim": 4096},
    "cohere_compass": {
        "text_config.rope_parameters": dict.fromkeys(
            ("full_attention", "sliding_attention"), MROPE | {"partial_rotary_factor": 1.0}
        )
    },
    "granite4_vision": {
        "spatial_target_layers": [2, 3, 3, 3],
        "vision_config.image_size": 336,
        "vision_config.patch_size": 14,
    },
    "llava_onevision": {"vision_config.image_size": 384},
    "gemma3n": {"vision_config.hidden_size": 2048, "text_config.num_kv_shared_layers": 0},
    "hunyuan_vl": {
        "text_config.head_dim": 64,
        "text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 8, 8, 8]},
    },
    "qwen3_omni_moe_thinker": {"text_config.head_dim": 128},
    "deepseek_ocr2": {
        "text_config.mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "text_config.num_experts_per_tok": 2,
        "vision_config.sam_config.downsample_channels": [512, 256],
    },
    "qwen2_5_omni_thinker": {
        "text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [32, 40, 40]}
    },
    "mllama": {
        **{"vision_config.intermediate_layers_indices": [0, 1, 2, 2, 3], "vision_config.vision_output_dim": 960},
        **{"vision_config.image_size": 56, "text_config.cross_attention_layers": [1, 3]},
    },
    "qwen4_exp": {f"text_config.indexer_{name}": value for name, value in INDEXER.items()},
}
WIDTHS = ("hidden_size", "embed_dim", "d_model", "width", "dim", "embed_dim_per_block")
HEAD_COUNTS = ("num_attention_heads", "num_heads", "attention_heads", "encoder_attention_heads", "nhead")
SIZE = re.compile("size|dim|width|channels|d_model|embed|features")
KEPT = re.compile(
    "image|patch|vocab|head|window|merge|kernel|stride|channels?_first|num_channels|in_channels|rank|chunk|conv"
    "|block_size|position"
)
INNER = re.compile("intermediate|ffn|mlp_dim|mlp_size")
LAYERS = re.compile("^(num_hidden_layers|num_layers|n_layers|depth|(en|de)coder_layers|layers|num_blocks)$")
EXPERT_COUNT = re.compile("^(num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_routed_experts)$")
TOKEN = re.compile("token|_(id|index)$")


def small_config(kind: str) -> Any:
    """The default configuration of a type with few layers, heads, experts and words; images stay as large as they are.
    Widths that were equal stay equal, and multiples of them stay multiples.
    """
    config = CONFIG_MAPPING[kind](**GIVEN.get(kind, {}))
    values = config.to_dict()
    widths: dict[int, int] = {}
    for part in parts_of(values):
        width, heads = first(part, WIDTHS), first(part, HEAD_COUNTS)
        if width and heads:
            head = part.get("head_dim") if isinstance(part.get("head_dim"), int) else width // heads
            widths.setdefault(width, HEADS * (head or width // heads))
    names = itertools.count(VOCABULARY // 2)
    values = smaller(values, widths, defaultdict(lambda: next(names)))
    text = values.get("text_config") or {}
    vision = values.get("vision_config") or {}
    for name in ("out_hidden_size", *(["hidden_size"] if "embed_dim" in vision else [])):
        if name in vision and first(text, WIDTHS):  # the width of the language model, whatever the default is
            vision[name] = first(text, WIDTHS)
    if first(text, WIDTHS) and "hidden_size" in values:
        values["hidden_size"] = first(text, WIDTHS)
    for name, value in FIXED.get(kind, {}).items():
        *path, last = name.split(".")
        part = values
        for step in path:
            part = part[step]
        part[last] = value
    return type(config)(**values)


def even_side(part: dict[str, Any]) -> int:
    """The edge of images with an even number of patches, as projectors merge neighbours."""
    side, patch = (
        first({"": value[0] if isinstance(value, list) else value}, ("",))
        for value in (part.get("image_size"), part.get("patch_size"))
    )
    if not side or not patch or side // patch % 2 == 0:
        return side
    return patch * 32


def parts_of(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield config
    for value in config.values():
        if isinstance(value, dict) and not any(str(key).isdigit() for key in value):
            yield from parts_of(value)


def first(part: dict[str, Any], names: tuple[str, ...]) -> int:
    return next((part[name] for name in names if isinstance(part.get(name), int)), 0)


def smaller(part: dict[str, Any], widths: dict[int, int], words: Any) -> dict[str, Any]:  # noqa: C901
    """One part of a configuration, and the parts in it."""
    depth = next((value for name, value in part.items() if LAYERS.match(name) and isinstance(value, int)), 0)
    heads, found = first(part, HEAD_COUNTS), {}
    for name, value in part.items():
        if name in ("transformers_version", "torch_dtype", "dtype", "architectures", "id2label", "label2id"):
            continue
        if isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
            value = {key: one for key, one in value.items() if int(key) < DEPTH or "layer" not in name}
        elif isinstance(value, dict):
            value = smaller(value, widths, words) if "rope" not in name else value
        elif isinstance(value, list) and depth > DEPTH:
            value = of_layers(name, value, depth)
        elif value is None and name in PLACEHOLDERS:
            value = words[name]
        elif isinstance(value, bool) or not isinstance(value, int):
            pass
        elif name == "image_size" and "patch_size" in part:
            value = even_side(part)
        elif "vocab" in name and value > VOCABULARY:
            value = VOCABULARY
        elif TOKEN.search(name) and "num" not in name and "per" not in name and value >= VOCABULARY // 2:
            value = words[value]
        elif LAYERS.match(name):
            value = min(value, DEPTH)
        elif EXPERT_COUNT.match(name):
            value = min(value, EXPERTS)
        elif name in ("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk"):
            value = min(value, 2)
        elif name in ("n_group", "topk_group", "num_expert_group"):
            value = min(value, 1)
        elif name in HEAD_COUNTS:
            value = min(value, HEADS)
        elif "key_value_heads" in name or name in ("num_kv_heads", "num_global_key_value_heads"):
            value = HEADS if value >= heads else 1
        elif INNER.search(name) and value > 2 * INNER_WIDTH:
            value = INNER_WIDTH
        elif SIZE.search(name) and not KEPT.search(name):
            value = scaled(value, widths)
        found[name] = value
    return found


def scaled(size: int, widths: dict[int, int]) -> int:
    """A width, or a multiple of one, in the small model."""
    for width, new in sorted(widths.items(), reverse=True):
        if size % width == 0 and size // width <= 16:
            return size // width * new
    return size


def of_layers(name: str, value: list[Any], depth: int) -> list[Any]:
    """A list with an entry for each layer, or of layers, for DEPTH of them."""
    if len(value) == depth:
        return value[:DEPTH]
    indexed = re.search("layer|index|block", name) and not re.search("size|num", name)
    if indexed and value and all(isinstance(one, int) and 0 <= one < depth for one in value):
        return sorted({one * DEPTH // depth for one in value})
    return value


def small_model(kind: str) -> Any:
    """A model with random weights, on the kernel `sdpa` where it has that."""
    config = small_config(kind)
    for part in parts_of_config(config):
        part._experts_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, TYPES[kind])(config).eval()
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if re.search("attn_gate|mlp_gate|alpha_", name):  # of cross attention, which begin closed
            weight.data.fill_(0.5)
        elif weight.ndim > 1:
            weight.data.copy_(torch.randn(weight.shape, generator=generator) / max(weight[0].numel(), 1) ** 0.5)
        else:
            weight.data.nan_to_num_().clamp_(-2, 2)
    return model


def parts_of_config(config: Any) -> Iterator[Any]:
    yield config
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            yield from parts_of_config(getattr(config, name))


# ---- an image for it


class Prompt(NamedTuple):
    inputs: dict[str, Any]
    tokens: int  # of the image


def pixel_forms(base: Any) -> Iterator[dict[str, Tensor]]:  # noqa: C901
    """Pixels of one image in the forms that processors give; which a model takes is found by trying."""
    config = getattr(base.config, "vision_config", None) or base.config
    names = inspect.signature(base.get_image_features).parameters
    side, patch = edge(config, "image_size", 336), edge(config, "patch_size", 14)
    side = (getattr(config, "model_args", None) or {}).get("img_size", [side])[0]
    channels, time = getattr(config, "in_channels", 3), getattr(config, "temporal_patch_size", 1) or 1
    seed = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=seed).clamp(-1, 1)

    grid = torch.tensor([[1, 8, 12]])
    sides = {name: grid if name.endswith("thw") else grid[:, 1:] for name in names if "grid_" in name}
    if "image_merge_sizes" in names:
        sides["image_merge_sizes"] = torch.tensor([2])
    if sides:
        for steps in {time: 0, 2: 0, 1: 0}:
            yield {"pixel_values": noise(96, channels * steps * patch**2), **sides}
        yield {"pixel_values": noise(96, 3, patch, patch), **sides}
        yield {"pixel_values": noise(96, 3 * time, patch, patch), **sides}
        yield {"pixel_values": noise(1, 3, 8 * patch, 12 * patch), **sides}
        yield {"pixel_values": noise(24, 2 * patch, 2 * patch, 3), "image_grid_thw": torch.tensor([[1, 4, 6]])}
    if "image_token_pooling" in names:
        pooled = torch.arange((side // patch) ** 2 // 4 * 4).view(-1, 4)
        grids = {"image_token_pooling": pooled, "image_grids": torch.tensor([[pooled.shape[0], 1, 0, 0]])}
        yield {
            "pixel_values": noise(1, (side // patch) ** 2, 3 * patch**2),
            **grids,
            "image_num_crops": torch.tensor([1]),
        }
    if "spatial_shapes" in names:
        shapes = {"spatial_shapes": torch.tensor([[8, 12]]), "pixel_attention_mask": torch.ones(1, 96).long()}
        yield {"pixel_values": noise(1, 96, 3 * patch**2), **shapes}
    if "image_position_ids" in names:
        row, column = torch.meshgrid(torch.arange(6), torch.arange(9), indexing="ij")
        place = torch.stack((column.flatten(), row.flatten()), -1)[None]
        for edges in (patch, 3 * patch):
            yield {"pixel_values": noise(1, 54, 3 * edges**2), "image_position_ids": place}
    if "target_sizes" in names:
        yield {"pixel_values": noise(1, 3, patch, 96 * patch), "target_sizes": torch.tensor([[8, 12]])}
    sizes = {"image_sizes": torch.tensor([[side, side]])} if "image_sizes" in names else {}
    small = {"image_sizes": torch.tensor([[8 * patch, 12 * patch]])} if "image_sizes" in names else {}
    if sizes:
        yield {"pixel_values": noise(1, 3, 8 * patch, 12 * patch), **small}
        for tiles in (3, 5):
            yield {"pixel_values": noise(1, tiles, 3, side, side), "image_sizes": torch.tensor([[2 * side, side]])}
    if not sides and time > 1:
        yield {"pixel_values": noise(24, time, patch, patch, 3)}
    more = {}
    if "high_res_pixel_values" in names:
        more = {"high_res_pixel_values": noise(1, 3, 1024, 1024)}
    for given in (sizes, {}):
        yield {"pixel_values": noise(1, 3, side, side), **given, **more}
    yield {"pixel_values": noise(1, 1, 3, side, side)}
    if "pixel_attention_mask" in names:
        yield {"pixel_values": noise(1, 1, 3, side, side), "pixel_attention_mask": torch.ones(1, 1, side, side).bool()}
        yield {"pixel_values": noise(1, 2, 3, side, side), "pixel_attention_mask": torch.ones(1, 2).bool()}
    if "qformer_input_ids" in names:
        asked = {"qformer_input_ids": torch.tensor([[5, 6, 7]]), "qformer_attention_mask": torch.ones(1, 3).long()}
        yield {"pixel_values": noise(1, 3, side, side), **asked}
    patch = edge(base.config, "patch_size", patch)
    yield {"pixel_values": noise(1, 96, 3 * patch**2)}


def across(model: Any, batch: int = 1) -> dict[str, Tensor]:
    """Inputs of a model whose decoder reads images by cross attention, an image for each prompt."""
    config, seed = model.config, torch.Generator().manual_seed(3)
    vision = getattr(config, "vision_config", None) or config.encoder
    side, kind = edge(getattr(vision, "vision_config", vision), "image_size", 224), config.model_type
    ids = torch.arange(300, 300 + 8 * batch).view(batch, 8)
    if kind == "pix2struct":
        patches = torch.randn(batch, 96, 770, generator=seed)
        patches[..., :2] = torch.stack((torch.arange(96) // 12, torch.arange(96) % 12), -1) + 1
        return {"flattened_patches": patches, "attention_mask": torch.ones(batch, 96), "decoder_input_ids": ids}
    tiles = {"mllama": (1, 4), "idefics": (1,)}.get(kind, ())
    pixels = {"pixel_values": torch.randn(batch, *tiles, 3, side, side, generator=seed)}
    if kind in ("vision-encoder-decoder", "pp_formulanet"):
        return {**pixels, "decoder_input_ids": ids}
    if kind in ("florence2", "t5gemma2"):
        base = model.model if kind == "florence2" else model.model.encoder
        count = base.get_image_features(pixels["pixel_values"][:1]).pooler_output.shape[1]
        image = torch.full((batch, count), config.image_token_id)
        prompt = torch.cat((ids[:, :1], image, ids[:, 1:]), 1)
        pixels |= {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        return {**pixels, "decoder_input_ids": torch.full((batch, 1), 2)}
    if kind == "mllama":
        pixels |= {"aspect_ratio_ids": torch.full((batch, 1), 6), "aspect_ratio_mask": torch.ones(batch, 1, 4).long()}
        pixels["cross_attention_mask"] = torch.ones(batch, 8, 1, 4).long()
    if kind == "idefics":
        pixels["image_attention_mask"] = torch.ones(batch, 8, 1).long()
    return {**pixels, "input_ids": ids, "attention_mask": torch.ones_like(ids)}


def edge(config: Any, name: str, default: int) -> int:
    value = getattr(config, name, None) or default
    return int(value[0] if isinstance(value, (list, tuple)) else value)


def placeholder(config: Any) -> int:
    return next(int(getattr(config, name)) for name in PLACEHOLDERS if getattr(config, name, None) is not None)


def rows_of(output: Any) -> int:
    """How many rows of features an encoder gave."""
    value = output if isinstance(output, (Tensor, list, tuple)) else output.get("pooler_output")
    if value is None and output.get("deepstack_features"):
        _, value = output["deepstack_features"][0]
    if value is None:
        value = output.get("last_hidden_state")
    if isinstance(value, (list, tuple)):
        return sum(one.shape[:-1].numel() for one in value)
    return value.shape[:-1].numel()


def prompt_of(model: Any) -> Prompt:
    """A prompt with one image that the plain model reads."""
    if model.config.model_type in CROSS.types:
        inputs = across(model)
        with attach(model, "full") as attached:
            model(**inputs)
        return Prompt(inputs, sum(outcome.before for outcome in attached.outcomes))
    base = next((part for part in (getattr(model, "model", None), model) if hasattr(part, "get_image_features")), None)
    if base is None:
        raise LookupError("it has no get_image_features")
    failed = ""
    for pixels in pixel_forms(base):
        count = 0
        try:
            count = rows_of(base.get_image_features(**pixels))
            ids = torch.tensor([[1, 300, 301, 302, *[placeholder(model.config)] * count, 303, 304, 305, 306, 307]])
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels}
            types = (ids == placeholder(model.config)).int()
            for name in inspect.signature(type(model).forward).parameters:
                if name.endswith("token_type_ids"):
                    inputs[name] = types
            logits = model(**inputs).logits
            if logits.isfinite().all():
                return Prompt(inputs, count)
            failed += " / logits are not finite"
        except Exception as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            why = f"{type(error).__name__}: {str(error)[:90]} ({Path(line.filename).name}:{line.lineno})"
            failed = f" / the plain model fails with {count} tokens: {why}{failed}" if count else f"{failed} / {why}"
    raise LookupError(failed.removeprefix(" / "))


# ---- the page


class Row(NamedTuple):
    kind: str
    tokens: int  # of the image; 0 if there is no model
    cells: dict[str, str]  # by kind of method: `works`, or why not


def row(kind: str) -> Row:
    """What becomes of one method of each kind on a type."""
    model = None
    try:
        model = small_model(kind)
        prompt = prompt_of(model)
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {error}" if not isinstance(error, LookupError) else str(error)
        if model is not None and not takes_features(model):
            return Row(kind, 0, {name: tried(model, Prompt({}, 4), method) for name, method in KINDS.items()})
        return Row(kind, 0, dict.fromkeys(KINDS, "no tiny model: " + one_line(why)))
    return Row(kind, prompt.tokens, {name: tried(model, prompt, method) for name, method in KINDS.items()})


def tried(model: Any, prompt: Prompt, method: str) -> str:
    """`works` if a method leaves a quarter of the tokens, and the model answers with them and differently."""
    budget = max(prompt.tokens // 4, 1)
    try:
        with attach(model, method, tokens=budget) as attached:
            attached.detach()
        plain, words = model(**prompt.inputs).logits, answered(model, prompt)
        with attach(model, method, tokens=budget) as attached:
            logits = model(**prompt.inputs).logits
            answer = answered(model, prompt)
        after = sum(outcome.after for outcome in attached.outcomes)
        if after != budget:
            return f"wrong: {after} tokens were left, and the budget is {budget}"
        if not logits[:, -1].isfinite().all() or torch.equal(logits[:, -1], plain[:, -1]):
            return "wrong: the answer is that of all tokens"
        if answer.shape != words.shape:
            return "wrong: `generate` gave another number of words"
        if not torch.equal(model(**prompt.inputs).logits, plain):
            return "wrong: the model is not as before"
    except ConsensusError as error:
        return "refused: " + one_line(str(error).replace(type(model).__name__, "the model"))
    except Exception as error:
        return "error: " + one_line(f"{type(error).__name__}: {error}")
    return "works"


def answered(model: Any, prompt: Prompt) -> Tensor:
    given = {name: value.clone() for name, value in prompt.inputs.items()}  # BLIP writes to its ids
    given |= {} if model.config.model_type == "blip" else {"pad_token_id": 0}
    return model.generate(**given, max_new_tokens=2, min_new_tokens=2, do_sample=False)


def one_line(text: str) -> str:
    text = " ".join(text.split()).replace("|", "/")
    return text if len(text) < 220 else text[:217] + "..."


HEAD = """# Compatibility

Look up whether a method works with a model type of transformers. `make compatibility` builds a tiny random model of
every image-text-to-text type from its own configuration, tries one method of each kind, and writes this page.

{versions}. {counts}

A type without a tiny model is one whose default configuration could not be made small or given an image; the reason is
in the notes. That says nothing about its checkpoints.

{table}

## Notes

{notes}
"""


def page(rows: list[Row]) -> str:
    notes: list[str] = []
    lines = [["type", *(f"{name} (`{method}`)" for name, method in KINDS.items())], ["---"] * (len(KINDS) + 1)]
    for one in rows:
        cells = []
        for state in one.cells.values():
            if state not in ("works", *notes):
                notes.append(state)
            cells.append(state if state == "works" else f"{state.split(':')[0]} [{notes.index(state) + 1}]")
        lines.append([f"`{one.kind}`", *cells])
    return HEAD.format(
        versions=f"Last whole run: {date.today()}, transformers {transformers.__version__}, torch {TORCH}",
        counts=counted(rows),
        table="\n".join("| " + " | ".join(cells) + " |" for cells in lines),
        notes="\n".join(f"{number}. {state}" for number, state in enumerate(notes, 1)),
    )


def counted(rows: list[Row]) -> str:
    found = (f"{sum(one.cells[name] == 'works' for one in rows)} with a method of kind `{name}`" for name in KINDS)
    return f"Of {len(rows)} types {', '.join(found)} work."


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="try these types, and write no page")
    given = parser.parse_args().types
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    for kind in given or TYPES:
        rows.append(row(kind))
        print(kind, rows[-1].tokens, rows[-1].cells if given else list(map(short, rows[-1].cells.values())), flush=True)
    print(counted(rows))
    if not given:
        PAGE.write_text(page(rows), encoding="utf-8")
    sys.exit(any(state.startswith("wrong") for one in rows for state in one.cells.values()))


def short(state: str) -> str:
    return state.split(":")[0]


if __name__ == "__main__":
    main()
