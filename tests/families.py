"""Families of transformers beside those of hf_models: tiny random models shaped like the real ones, and
images for them as their processors would make them.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hf_models import double, padded
from torch import Tensor

IMAGE, VIDEO, START, END = 190, 191, 192, 193
TEXT = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
TEXT |= dict(vocab_size=200, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2)
IDS = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
GLM_IDS = dict(
    **dict(image_token_id=IMAGE, image_start_token_id=START, image_end_token_id=END),
    **dict(video_token_id=VIDEO, video_start_token_id=194, video_end_token_id=195),
)
SIGLIP = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
MROPE = dict(rope_theta=1e4, rope_type="default", mrope_section=[2, 3, 3])
INTERLEAVED = dict(MROPE, partial_rotary_factor=0.25, mrope_section=[2, 1, 1], mrope_interleaved=True)
LINEAR = dict(
    **dict(num_hidden_layers=8, head_dim=32, linear_key_head_dim=16, linear_value_head_dim=16),
    **dict(linear_num_key_heads=2, linear_num_value_heads=4, rope_parameters=INTERLEAVED),
)
EXPERTS = dict(moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
TOWER = dict(depth=3, hidden_size=32, num_heads=4, intermediate_size=48, out_hidden_size=64)
QWEN_TOWER, GLM_TOWER = dict(TOWER, num_position_embeddings=64), dict(TOWER, patch_size=14, image_size=112)
GRIDS = ((4, 6), (8, 4))  # patches of the two images


@dataclass(frozen=True)
class Family:
    """A family under test, of a `model_type`, with two images of different sizes."""

    kind: str
    config: dict[str, Any]  # arguments of its configuration
    pixels: Callable[[list[int]], dict[str, Any]]  # what a processor gives of these images, by their numbers
    rows: tuple[int, int]  # visual tokens of each image
    tower: bool = True  # methods read the tower
    cuts: bool = True  # methods between decoder layers work
    axes: int = 1  # of positions; several can only be kept
    timm: bool = False  # its tower is one of timm


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.5


def squares(height: int, width: int) -> Tensor:
    """Patches of which each token of an image is made, four in a square."""
    return torch.arange(height * width).view(height // 2, 2, width // 2, 2).permute(0, 2, 1, 3).reshape(-1, 4)


def by_grid(*values: int) -> Callable[[list[int]], dict[str, Any]]:
    """Rows of patches, one image after the other, with their grids."""

    def pixels(which: list[int]) -> dict[str, Any]:
        parts = [noise(GRIDS[one][0] * GRIDS[one][1], *values, seed=one) for one in which]
        return {"pixel_values": torch.cat(parts), "image_grid_thw": torch.tensor([[1, *GRIDS[one]] for one in which])}

    return pixels


GEMMA_GRIDS = ((6, 9), (9, 9))


def gemma4_pixels(which: list[int]) -> dict[str, Any]:
    room = 90  # patches; what is over is padding
    place = torch.full((len(which), room, 2), -1)
    for number, one in enumerate(which):
        height, width = GEMMA_GRIDS[one]
        row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        place[number, : height * width] = torch.stack((column.flatten(), row.flatten()), -1)
    pixels = torch.stack([noise(room, 3 * 16 * 16, seed=one).clamp(0, 1) for one in which])
    return {"pixel_values": pixels, "image_position_ids": place}


GEMMA4 = dict(
    text_config=dict(
        **dict(TEXT, head_dim=16, sliding_window=256, num_hidden_layers=6, hidden_size_per_layer_input=8),
        **dict(vocab_size_per_layer_input=200, num_kv_shared_layers=0, use_bidirectional_attention="vision"),
    ),
    vision_config=dict(SIGLIP, num_key_value_heads=4, head_dim=8, position_embedding_size=64),
    audio_config=None,
    **dict(image_token_id=IMAGE, video_token_id=VIDEO, boi_token_id=START, eoi_token_id=END),
    **dict(audio_token_id=194, boa_token_id=195, eoa_token_index=196),
)
SHARED = dict(num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 3)
SHARED |= dict(use_bidirectional_attention=None)  # so that transformers may leave masks out
NANO_TEXT = dict(
    **TEXT | dict(num_hidden_layers=5, intermediate_size=[96] * 5, max_position_embeddings=2048),
    **dict(head_dim=16, hidden_size_per_layer_input=8, vocab_size_per_layer_input=190, altup_num_inputs=2),
    **dict(num_kv_shared_layers=0, laurel_rank=4, activation_sparsity_pattern=[0.0] * 5, sliding_window=1024),
    **dict(final_logit_softcapping=30.0, layer_types=["sliding_attention"] * 4 + ["full_attention"]),
)
NANO_TOWER = dict(architecture="mobilenetv5_300m_enc", hidden_size=2048, vocab_size=4, vocab_offset=186)
NANO_TOWER |= dict(do_pooling=False)
NANO_AUDIO = dict(vocab_size=4, vocab_offset=195, hidden_size=32, sscp_conv_channel_size=[8, 4])
NANO_AUDIO |= dict(conf_num_attention_heads=4, conf_num_hidden_layers=1)
GEMMA3N = dict(
    text_config=NANO_TEXT,
    vision_config=NANO_TOWER,
    audio_config=NANO_AUDIO,
    **dict(vision_soft_tokens_per_image=256, image_token_id=IMAGE, audio_token_id=196),
    **dict(boi_token_id=188, eoi_token_id=191),
)
MOLMO2 = dict(
    text_config=TEXT | dict(head_dim=16, additional_vocab_size=16, vocab_size=184),
    vision_config=dict(
        **dict(SIGLIP, num_key_value_heads=4, head_dim=8, image_size=[56, 56], patch_size=14),
        num_position_embeddings=16,
    ),
    adapter_config=dict(
        **dict(vision_feature_layer=[-1, 1], hidden_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8),
        **dict(intermediate_size=48, text_hidden_size=64),
    ),
    **dict(image_start_token_id=START, image_end_token_id=END, low_res_image_start_token_id=194),
    **dict(image_patch_id=IMAGE, frame_start_token_id=195, frame_end_token_id=196),
)


def molmo2_pixels(which: list[int]) -> dict[str, Any]:
    """Of the first image an overview alone, of the second one and a grid of two crops."""
    crops, pools = [], []
    for one in which:
        first = 16 * sum(map(len, crops))
        pools.append(squares(4, 4) + first)
        if one:
            sides = torch.arange(16, 48).view(2, 4, 4) + first
            wide = torch.cat((sides[0], sides[1]), 1)
            pools.append(wide.view(2, 2, 4, 2).permute(0, 2, 1, 3).reshape(-1, 4))
        crops.append(noise(3 if one else 1, 16, 14 * 14 * 3, seed=one))
    return {
        "pixel_values": torch.cat(crops),
        "image_token_pooling": torch.cat(pools),
        "image_grids": torch.tensor([[2, 2, 2, 4] if one else [2, 2, 0, 0] for one in which]),
        "image_num_crops": torch.tensor([len(one) for one in crops]),
    }


MINICPM = dict(
    text_config=TEXT | LINEAR | {"model_type": "qwen3_5_text"},
    vision_config=dict(SIGLIP, image_size=64, insert_layer_id=1, patch_size=14),
    **dict(insert_layer_id=1, image_size=64, patch_size=14, image_token_id=IMAGE, video_token_id=VIDEO),
)


def minicpm_pixels(which: list[int]) -> dict[str, Any]:
    grids = [((8, 12), (16, 8))[one] for one in which]
    parts = [noise(1, 3, 14, height * width * 14, seed=one) for one, (height, width) in zip(which, grids, strict=True)]
    return {"pixel_values": torch.cat(parts, -1), "target_sizes": torch.tensor(grids, dtype=torch.int32)}


MIXED = ["conv", "conv", "full_attention", "conv", "full_attention"]
LFM2 = dict(
    text_config=TEXT | dict(num_hidden_layers=5, layer_types=MIXED, model_type="lfm2"),
    vision_config=dict(SIGLIP, patch_size=16, num_patches=16, model_type="siglip2_vision_model", vision_use_head=False),
    **dict(image_token_id=IMAGE, projector_hidden_size=48),
)


def lfm2_pixels(which: list[int]) -> dict[str, Any]:
    mask = torch.stack([(torch.arange(40) < GRIDS[one][0] * GRIDS[one][1]).long() for one in which])
    pixels = torch.stack([noise(40, 768, seed=one) for one in which])
    shapes = torch.tensor([GRIDS[one] for one in which])
    return {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask}


def tiles(*counts: int, side: int = 56) -> Callable[[list[int]], dict[str, Any]]:
    """Square tiles, so many of each of the two pictures."""
    return lambda which: {"pixel_values": torch.cat([noise(counts[one], 3, side, side, seed=one) for one in which])}


LLAMA4 = dict(
    text_config=dict(
        **dict(TEXT, intermediate_size_mlp=96, head_dim=16, num_local_experts=2, attention_chunk_size=128),
        **dict(moe_layers=[1, 3], interleave_moe_layer_step=2),
    ),
    vision_config=SIGLIP
    | dict(image_size=56, patch_size=14, vision_output_dim=48, projector_input_dim=48, projector_output_dim=48)
    | dict(intermediate_size=128),
    **dict(image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END),
)
PALIGEMMA = dict(
    text_config=dict(TEXT, head_dim=16, model_type="gemma"),
    vision_config=dict(SIGLIP, image_size=56, patch_size=14, projection_dim=64, vision_use_head=False),
    **dict(image_token_index=IMAGE, projection_dim=64, hidden_size=64),
)
KIMI = dict(
    text_config=TEXT
    | dict(kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, v_head_dim=16, qk_nope_head_dim=16, n_routed_experts=4)
    | dict(n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32, num_key_value_heads=4)
    | dict(first_k_dense_replace=1, model_type="deepseek_v3"),
    vision_config=dict(SIGLIP, patch_size=14, pos_emb_height=8, pos_emb_width=8),
    projection_hidden_size=32,
    **IDS,
)
TIMM = dict(
    **dict(embed_dim=32, img_size=[56, 56], depth=3, num_heads=4, global_pool="", use_post_transformer_norm=False),
    **dict(init_values=0.1, ref_feat_shape=[4, 4]),
)
PERCEPTION = dict(
    text_config=dict(TEXT, model_type="llama"),
    vision_config=dict(
        **dict(architecture="vit_pe_core_large_patch14_336", model_args=TIMM, model_type="timm_wrapper"),
        **dict(do_pooling=False, hidden_size=32),
    ),
    **dict(projector_pooling_ratio=2, image_token_id=IMAGE, video_token_id=VIDEO),
)


def perception_pixels(which: list[int]) -> dict[str, Any]:
    return {"pixel_values": tiles(1, 3)(which)["pixel_values"][None]}


FORMER = dict(
    **dict(hidden_size=64, num_attention_heads=1, intermediate_size=48, encoder_hidden_size=64),
    **dict(num_hidden_layers=1, cross_attention_frequency=1),
)
MULTIPLIERS = dict(attention_multiplier=0.25, embedding_multiplier=2.0, residual_multiplier=0.5)
GRANITE = dict(
    text_config=TEXT | MULTIPLIERS | dict(num_hidden_layers=6),
    vision_config=SIGLIP
    | dict(hidden_size=64, image_size=56, patch_size=14, vision_use_head=False, model_type="siglip_vision_model"),
    qformer_config=FORMER,
    **dict(image_token_index=IMAGE, image_grid_pinpoints=[[56, 112], [112, 56], [112, 112]]),
    **dict(deepstack_layer_map=[[1, 0], [2, 2]], spatial_vision_layer=-1, spatial_target_layers=[3, 4, 4, 5]),
    **dict(use_image_newline_parameter=True, vision_feature_select_strategy="full", downsample_rate="2/4"),
    image_seq_length=4,
)


def granite_pixels(which: list[int]) -> dict[str, Any]:
    sizes = [((100, 60), (56, 90))[one] for one in which]
    pixels = torch.stack([noise(5, 3, 56, 56, seed=one) for one in which])
    return {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}


def video_llama_pixels(which: list[int]) -> dict[str, Any]:
    return {**by_grid(3 * 14 * 14)(which), "image_merge_sizes": torch.tensor([2] * len(which))}


QWEN = by_grid(3 * 2 * 16 * 16)
QWEN3_5 = dict(text_config=TEXT | LINEAR, vision_config=QWEN_TOWER, **IDS)
QWEN3_5_MOE = QWEN3_5 | {"text_config": TEXT | LINEAR | EXPERTS}
GLM_OCR = dict(text_config=dict(TEXT, rope_parameters=MROPE), vision_config=GLM_TOWER, **GLM_IDS)
PADDLE = dict(
    text_config=dict(TEXT, head_dim=16, rope_parameters=MROPE),
    vision_config=dict(SIGLIP, image_size=56, patch_size=14),
    **IDS,
)
VIDEO_LLAMA = dict(
    text_config=dict(TEXT, model_type="qwen2"),
    vision_config=dict(SIGLIP, patch_size=14),
    **dict(image_token_id=IMAGE, video_token_id=VIDEO),
)
FAMILIES: dict[str, Family] = {
    "qwen3_5": Family("qwen3_5", QWEN3_5, QWEN, (6, 8), cuts=False, axes=3),
    "qwen3_5_moe": Family("qwen3_5_moe", QWEN3_5_MOE, QWEN, (6, 8), cuts=False, axes=3),
    "gemma4": Family("gemma4", GEMMA4, gemma4_pixels, (6, 9)),
    "gemma3n": Family("gemma3n", GEMMA3N, tiles(1, 1, side=64), (256, 256), tower=False, cuts=False, timm=True),
    "molmo2": Family("molmo2", MOLMO2, molmo2_pixels, (4, 12)),
    "minicpmv4_6": Family("minicpmv4_6", MINICPM, minicpm_pixels, (6, 8), cuts=False),
    "lfm2_vl": Family("lfm2_vl", LFM2, lfm2_pixels, (6, 8), cuts=False),
    "llama4": Family("llama4", LLAMA4, tiles(1, 3), (4, 12)),
    "paligemma": Family("paligemma", PALIGEMMA, tiles(1, 1), (16, 16)),
    "kimi_k25": Family("kimi_k25", KIMI, by_grid(3, 14, 14), (6, 8)),
    "glm_ocr": Family("glm_ocr", GLM_OCR, by_grid(3 * 2 * 14 * 14), (6, 8), axes=3),
    "perception_lm": Family("perception_lm", PERCEPTION, perception_pixels, (4, 12), timm=True),
    "granite4_vision": Family("granite4_vision", GRANITE, granite_pixels, (16, 14), cuts=False),
    "paddleocr_vl": Family("paddleocr_vl", PADDLE, by_grid(3, 14, 14), (6, 8), axes=3),
    "video_llama_3": Family("video_llama_3", VIDEO_LLAMA, video_llama_pixels, (6, 8)),
    "gemma4 shared": Family("gemma4", GEMMA4 | {"text_config": GEMMA4["text_config"] | SHARED}, gemma4_pixels, (6, 9)),
}


def build(family: Family) -> Any:
    """A model with weights large enough that every part is seen in its answers."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    config = CONFIG_MAPPING[family.kind](**copy.deepcopy(family.config))
    config._experts_implementation = "eager"  # grouped_mm has no float64
    torch.manual_seed(0)
    return filled(AutoModelForImageTextToText.from_config(config).to(torch.float64).eval())  # of complex angles too


def filled(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        values = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        if weight.ndim >= 2:
            weight.data.copy_(values * (1.2 / max(weight[0].numel(), 1) ** 0.5))
        else:
            own = weight.data.double().nan_to_num().clamp(-2, 2).round()
            weight.data.copy_(values * 0.05 + own)
    for buffer in model.buffers():
        if buffer.is_floating_point() and not torch.isfinite(buffer).all():
            buffer.zero_()
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    return model


def prompts(model: Any, family: Family, *shown: list[int]) -> dict[str, Any]:
    """Left-padded prompts with these images, text after each, and everything a processor would give."""
    rows = []
    for number, pictures in enumerate(shown):
        row = [1, *range(10, 12 + number)]
        for one in pictures:
            row += [IMAGE] * family.rows[one] + [20 + one, 21 + one, 22 + number]
        rows.append([*row, *range(30, 35)])
    found = padded(rows)
    types = (found["input_ids"] == IMAGE).long()
    taken = inspect.signature(type(model).forward).parameters
    for name in ("mm_token_type_ids", "moe_mm_token_type_ids", "token_type_ids"):
        if name in taken:
            found[name] = torch.zeros_like(types) if family.kind == "paligemma" else types
    pixels = family.pixels([one for pictures in shown for one in pictures])
    return found | double(pixels)
