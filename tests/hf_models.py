"""Tiny models of transformers in memory, random weights, and prompts for them as their processors would make them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

TEXT = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
TEXT |= dict(vocab_size=512, max_position_embeddings=4096, tie_word_embeddings=False)
TEXT |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=None)
KINDS = ["sliding_attention", "full_attention"] * 2  # of its layers, where they are of two
VISION = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4)
SQUARE = dict(**VISION, image_size=56, patch_size=14)
IMAGE, VIDEO, START, END, TAG, BOX = 500, 501, 502, 503, 504, 505


class Picture(NamedTuple):
    """An image or clip: its place in a prompt, and what the processor gives with it."""

    ids: list[int]
    pixels: dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A host under test, of a `model_type` and the arguments of its configuration."""

    kind: str
    config: dict[str, Any]
    picture: Callable[[int], Picture]  # the n-th image; sizes differ if the model has several
    attention: str  # module of the block that is read, in the model without its head
    tokens: int = 5  # a budget below every image
    square: int = 4  # a budget for smaller images
    clips: tuple[int, ...] = ()  # which images are videos
    tile_budget: str = "global"

    def build(self) -> Any:
        return built(self.kind, **self.config)

    def inputs(self, *numbers: int) -> dict[str, Any]:
        """A prompt about images of these numbers, or about the first: words in front, between and behind."""
        return prompts([1, 5, *(part for one in numbers or (0,) for part in (6, self.picture(one))), 7, 8, 9])


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ready(kind: Any, config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = kind(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 or "newline" in name or "position" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def built(kind: str, **config: Any) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    return ready(AutoModelForImageTextToText.from_config, CONFIG_MAPPING[kind](**config))


def padded(rows: list[list[int]], pad: int = 0, left: bool = True) -> dict[str, Tensor]:
    """Ids of prompts of any lengths, and their mask."""
    parts = [([pad] * (max(map(len, rows)) - len(row)), row) for row in rows]
    ids = torch.tensor([padding + row if left else row + padding for padding, row in parts])
    sizes = [([0] * len(padding), [1] * len(row)) for padding, row in parts]
    return {"input_ids": ids, "attention_mask": torch.tensor([a + b if left else b + a for a, b in sizes])}


def prompts(*rows: list[Any]) -> dict[str, Any]:
    """Left-padded prompts of ids and images, with everything a processor would give."""
    ids = [[word for part in row for word in (part.ids if isinstance(part, Picture) else [part])] for row in rows]
    found: dict[str, Any] = padded(ids)
    words = found["input_ids"]
    pictures = [part for row in rows for part in row if isinstance(part, Picture)]
    for name in sorted({name for one in pictures for name in one.pixels}):
        parts = [one.pixels[name] for one in pictures if name in one.pixels]
        if parts[0].ndim == 5 and name == "pixel_values":  # tiles, padded to the most of them
            most = max(one.shape[1] for one in parts)
            parts = [torch.nn.functional.pad(one, (0,) * 6 + (0, most - one.shape[1])) for one in parts]
        found[name] = torch.cat(parts)
    if any("grid" in name for name in found):
        found["mm_token_type_ids"] = (words == IMAGE).int() + 2 * (words == VIDEO).int()
        if "video_grid_thw" in found and not (words == VIDEO).any():  # GLM-4V has one placeholder
            found["mm_token_type_ids"] *= 2
    if (words == BOX).any():
        found["token_type_ids"] = (words == IMAGE).int()
    return found


def double(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


def rows_read(model: Any, inputs: dict[str, Any]) -> int:
    """Rows that the first decoder layer is given of prompts."""
    rows: list[int] = []
    decoder = model.get_decoder()
    layer = (decoder if hasattr(decoder, "layers") else decoder.model).layers[0]
    with layer.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append((args[0] if args else kwargs["hidden_states"]).shape[1]), with_kwargs=True
    ):
        model(**inputs)
    return rows[-1]  # behind those of a probe


def decoder_given(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Arguments that the decoder of a model is given of prompts, behind the hooks of a method."""
    seen: dict[str, Any] = {}
    with model.get_decoder().register_forward_pre_hook(lambda _, args, given: seen.update(given), with_kwargs=True):
        model(**inputs)
    return seen


CLIP = dict(SQUARE, model_type="clip_vision_model")
LLAMA = dict(TEXT, model_type="llama")


def vip_llava() -> Any:
    """A type that is not in the package's table of families."""
    sides = dict(vision_config=CLIP, text_config=LLAMA)
    return built("vipllava", **sides, image_token_index=IMAGE, vision_feature_layers=[-1, -2])


def video_llava(size: int) -> Any:
    return built("video_llava", **VIDEO_LLAVA | {"vision_config": dict(CLIP, image_size=size)})


def square(number: int) -> Picture:
    return Picture([IMAGE] * 16, {"pixel_values": noise(1, 3, 56, 56, seed=number)})


PINS = [[56, 112], [112, 56], [112, 112]]
MROPE = {"rope_type": "default", "rope_theta": 10000.0}
ALL = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
GLM = dict(image_token_id=IMAGE, video_token_id=VIDEO, image_start_token_id=START, image_end_token_id=END)


def of_grid(number: int, size: tuple[int, int], count: int, rows: int, columns: int) -> Picture:
    """An image of so many tiles, of which all but the first lie in a grid with a newline behind each row."""
    pixels = noise(1, count, 3, 56, 56, seed=number)
    return Picture([IMAGE] * (16 + rows * (columns + 1)), {"pixel_values": pixels, "image_sizes": torch.tensor([size])})


def tiled(number: int) -> Picture:
    """Images of five tiles whole, of five with columns unpadded, of three in a row, and whole again."""
    whole = (112, 112), 5, 8, 8
    return of_grid(number, *[whole, ((112, 60), 5, 8, 4), ((40, 100), 3, 4, 8), whole][number])


def frames(rows: int) -> Callable[[int], Picture]:
    """Clips of four frames that have so many rows together."""
    return lambda number: Picture([VIDEO] * rows, {"pixel_values_videos": noise(1, 4, 3, 56, 56, seed=number)})


def onevision(number: int) -> Picture:
    """One tile and a half, resized from 2 x 2 tiles, a row, and 3 x 3 tiles resized."""
    sizes = ((112, 112), 5, 5, 5), ((112, 56), 3, 8, 4), ((56, 112), 3, 4, 8), ((168, 168), 10, 5, 5)
    return of_grid(number, *sizes[number])


def grid(patch: int) -> Callable[[int], Picture]:
    def picture(number: int) -> Picture:
        height, width = [(8, 12), (12, 8), (4, 8), (8, 8)][number]
        pixels = noise(height * width, 6 * patch**2, seed=number)
        ids = [START] + [IMAGE] * (height * width // 4) + [END]
        return Picture(ids, {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])})

    return picture


def film(patch: int, apart: bool) -> Callable[[int], Picture]:
    """Clips of temporal patches, in one run or each in a run of its own."""

    def clip(number: int) -> Picture:
        time, height, width = [(2, 8, 8), (3, 4, 8), (2, 4, 8), (2, 8, 8)][number]
        pixels = noise(time * height * width, 6 * patch**2, seed=number)
        one = [VIDEO] * (height * width // 4)
        ids = [word for step in range(time) for word in (20 + step, START, *one, END)] if apart else one * time
        return Picture(ids, {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[time, height, width]])})

    return clip


def scenes(number: int) -> Picture:
    """Clips whose temporal patches have times behind them, and the placeholder of pictures."""
    clip = film(14, True)(number)
    return Picture([IMAGE if word == VIDEO else word for word in clip.ids], clip.pixels)


def boxed(number: int) -> Picture:
    return Picture([BOX, *[IMAGE] * 16, END], {"pixel_values": noise(1, 3, 112, 112, seed=number)})


def of_tiles(ids: Callable[[int], list[int]], together: bool = False) -> Callable[[int], Picture]:
    """Images of three, two, four and three tiles, and the ids for so many; `together` are those of one prompt."""

    def picture(number: int) -> Picture:
        count = [3, 2, 4, 3][number]
        shape = (1, count) if together else (count,)
        return Picture(ids(count), {"pixel_values": noise(*shape, 3, 112, 112, seed=number)})

    return picture


TILE = [IMAGE] * 16


def tagged(count: int, *start: int) -> list[int]:
    """Tiles but the last with a tag of their own each, behind a start."""
    return [word for tile in range(count - 1) for word in (*start, 30 + tile, *TILE)]


run = of_tiles(lambda count: [START, *TILE * count, END])
# the whole view is last, behind a tag
split = of_tiles(lambda count: [*tagged(count, START), START, TAG, *TILE, START], together=True)
tags = of_tiles(lambda count: [START, *tagged(count), TAG, *TILE, END])
breaks = of_tiles(lambda count: [START, *[*TILE, TAG] * count, END])
# the whole view, and tiles with a word between them
columns = of_tiles(lambda count: [START, *TILE, 506, *[*TILE, 507] * (count - 2), *TILE, END])


def broken(side: int) -> Callable[[int], Picture]:
    """Images of several sizes, padded to the largest, with a break after each row of tokens of so many pixels."""

    def picture(number: int) -> Picture:
        rows, columns = [(3, 4), (4, 3), (2, 4), (4, 4)][number]
        ids = [word for row in range(rows) for word in (*[IMAGE] * columns, TAG if row < rows - 1 else END)]
        pixels = torch.zeros(1, 3, 4 * side, 4 * side)
        pixels[:, :, : side * rows, : side * columns] = noise(1, 3, side * rows, side * columns, seed=number)
        return Picture(ids, {"pixel_values": pixels, "image_sizes": torch.tensor([[side * rows, side * columns]])})

    return picture


# ---- configurations

FINE = dict(VISION, image_size=112, patch_size=14)
SIGLIP = dict(model_type="siglip_vision_model", vision_use_head=False)
LLAVA = dict(vision_config=CLIP, text_config=LLAMA, image_token_index=IMAGE, image_seq_length=16)
NEXT = dict(vision_config=CLIP, text_config=LLAMA, image_token_index=IMAGE, image_grid_pinpoints=PINS)
NEXT_VIDEO = NEXT | {"video_token_index": VIDEO}
VIDEO_LLAVA = dict(vision_config=CLIP, text_config=LLAMA, image_token_index=IMAGE, video_token_index=VIDEO)
QWEN2_TEXT = dict(TEXT, model_type="qwen2")
LAST_LAYER = dict(vision_feature_layer=-1, vision_feature_select_strategy="full")
ONEVISION_PINS = [[56 * height, 56 * width] for height in range(1, 4) for width in range(1, 4)]
ONEVISION = VIDEO_LLAVA | LAST_LAYER | dict(vision_config=SQUARE | SIGLIP, text_config=QWEN2_TEXT)
ONEVISION |= dict(image_grid_pinpoints=ONEVISION_PINS, vision_aspect_ratio="anyres_max_2")
QWEN_TOWER = dict(depth=4, hidden_size=32, intermediate_size=48, num_heads=4, in_channels=3, out_hidden_size=64)
QWEN_TOWER |= dict(spatial_merge_size=2, temporal_patch_size=2)
QWEN_TEXT = dict(TEXT, rope_parameters={**MROPE, "mrope_section": [2, 3, 3]})
QWEN2 = dict(QWEN_TOWER, patch_size=14, embed_dim=32, hidden_size=64, mlp_ratio=2)
QWEN2_5 = dict(QWEN_TOWER, patch_size=14, window_size=56, fullatt_block_indexes=[1, 3])
QWEN3 = dict(QWEN_TOWER, patch_size=16, num_position_embeddings=64, deepstack_visual_indexes=[0, 1, 2])
QWEN3_TEXT = dict(TEXT, head_dim=16, rope_parameters={**MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True})
QWEN2_VL = dict(text_config=QWEN_TEXT, vision_config=QWEN2, **ALL)
QWEN2_5_VL = dict(text_config=QWEN_TEXT, vision_config=QWEN2_5, **ALL)
QWEN3_VL = dict(text_config=QWEN3_TEXT, vision_config=QWEN3, **ALL)
QWEN3_EXPERTS = dict(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
GLM_TEXT = dict(TEXT, rope_parameters={**MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5})
GLM_EXPERTS = dict(moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1)
GLM_EXPERTS |= dict(n_group=1, topk_group=1)
GLM_TOWER = dict(depth=4, hidden_size=32, intermediate_size=48, num_heads=4, out_hidden_size=64, image_size=112)
GLM4V = dict(text_config=GLM_TEXT, vision_config=GLM_TOWER, **GLM)
SMOLVLM = dict(vision_config=FINE, text_config=LLAMA, image_token_id=IMAGE, scale_factor=2, pad_token_id=0)
AYA_TEXT = dict(TEXT, model_type="cohere2", head_dim=16, sliding_window=4096, layer_types=KINDS)
AYA = dict(vision_config=FINE | SIGLIP, text_config=AYA_TEXT, image_token_id=IMAGE)
AYA |= dict(downsample_factor=2, alignment_intermediate_size=48)
PIXTRAL_TOWER = dict(VISION, model_type="pixtral", image_size=168, patch_size=14)
MISTRAL = dict(TEXT, model_type="mistral", head_dim=16, sliding_window=None)
PIXTRAL = dict(vision_config=PIXTRAL_TOWER, text_config=MISTRAL, image_token_index=IMAGE)
INTERNVL_TOWER = dict(VISION, image_size=[112, 112], patch_size=[14, 14], use_qk_norm=True)
INTERNVL = dict(vision_config=INTERNVL_TOWER, text_config=QWEN2_TEXT, image_token_id=IMAGE)
INTERNVL |= dict(image_seq_length=16, tie_word_embeddings=False)
GEMMA3_TEXT = dict(TEXT, model_type="gemma3_text", head_dim=16, query_pre_attn_scalar=32, layer_types=KINDS)
GEMMA3 = dict(vision_config=FINE | SIGLIP, text_config=GEMMA3_TEXT, image_token_index=IMAGE)
GEMMA3 |= dict(mm_tokens_per_image=16, tie_word_embeddings=False)
OVIS2_TOWER, INDICATORS = dict(FINE, hidden_stride=2, vocab_size=45), [START, 506, 507, 508, END]
OVIS2 = dict(vision_config=OVIS2_TOWER, text_config=QWEN2_TEXT, image_token_id=IMAGE, tie_word_embeddings=False)
OVIS2 |= dict(visual_indicator_token_ids=INDICATORS, hidden_size=TEXT["hidden_size"], vocab_size=TEXT["vocab_size"])

TILES = 20  # a budget with a token for each of the 17 tiles that an image can have, below every image
VIDEOS = (0, 1, 2, 3)
TOWER_BLOCK = "tower.encoder.layers.2.self_attn"
CLIP_BLOCK, LAST = f"vision_{TOWER_BLOCK}", "vision_tower.encoder.layers.3.self_attn"
IDEFICS_BLOCK, QWEN_BLOCK = "vision_model.encoder.layers.3.self_attn", "visual.blocks.3.attn"
PIXTRAL_BLOCK = "vision_tower.transformer.layers.3.attention"


def over(kind: str) -> dict[str, Any]:
    return LLAVA | {"vision_config": dict(SQUARE, model_type=kind)}


CASES: dict[str, Case] = {
    "llava": Case("llava", LLAVA, square, CLIP_BLOCK),
    "llava dinov2": Case("llava", over("dinov2"), square, "vision_tower.encoder.layer.2.attention"),
    "llava vit": Case("llava", over("vit"), square, "vision_tower.layers.2.attention"),
    "llava_next": Case("llava_next", NEXT, tiled, CLIP_BLOCK, 10, 20),
    "qwen2_5_vl": Case("qwen2_5_vl", QWEN2_5_VL, grid(14), QWEN_BLOCK),
    "qwen2_5_vl video": Case("qwen2_5_vl", QWEN2_5_VL, film(14, False), QWEN_BLOCK, clips=VIDEOS),
    "qwen2_vl": Case("qwen2_vl", QWEN2_VL, grid(14), QWEN_BLOCK),
    "qwen2_vl video": Case("qwen2_vl", QWEN2_VL, film(14, False), QWEN_BLOCK, clips=VIDEOS),
    "qwen3_vl": Case("qwen3_vl", QWEN3_VL, grid(16), QWEN_BLOCK),
    "qwen3_vl video": Case("qwen3_vl", QWEN3_VL, film(16, True), QWEN_BLOCK, clips=VIDEOS),
    "qwen3_vl_moe": Case("qwen3_vl_moe", QWEN3_VL | {"text_config": QWEN3_TEXT | QWEN3_EXPERTS}, grid(16), QWEN_BLOCK),
    "glm4v": Case("glm4v", GLM4V, grid(14), QWEN_BLOCK),
    "glm4v video": Case("glm4v", GLM4V, scenes, QWEN_BLOCK, clips=VIDEOS),
    "glm4v_moe": Case("glm4v_moe", GLM4V | {"text_config": GLM_TEXT | GLM_EXPERTS}, grid(14), QWEN_BLOCK),
    "internvl": Case("internvl", INTERNVL, run, "vision_tower.encoder.layer.3.attention", TILES, TILES),
    "smolvlm": Case("smolvlm", SMOLVLM, split, IDEFICS_BLOCK, TILES, TILES),
    "idefics3": Case("idefics3", SMOLVLM, split, IDEFICS_BLOCK, TILES, TILES),
    "llava_onevision": Case("llava_onevision", ONEVISION, onevision, LAST, 12, 40),
    "llava_onevision video": Case("llava_onevision", ONEVISION, frames(17), LAST, 12, 12, VIDEOS),
    "llava_next_video": Case("llava_next_video", NEXT_VIDEO, tiled, CLIP_BLOCK, 10, 20),
    "llava_next_video video": Case("llava_next_video", NEXT_VIDEO, frames(16), CLIP_BLOCK, 10, 12, VIDEOS),
    "gemma3": Case("gemma3", GEMMA3, boxed, LAST),
    "aya_vision": Case("aya_vision", AYA, tags, LAST, TILES, TILES),
    "cohere2_vision": Case("cohere2_vision", AYA, breaks, LAST, TILES, TILES),
    "ovis2": Case("ovis2", OVIS2, columns, "vision_tower.transformer.encoder.layers.3.attention", TILES, TILES),
    "mistral_3": Case("mistral3", PIXTRAL | {"spatial_merge_size": 2}, broken(28), PIXTRAL_BLOCK),
    "pixtral": Case("llava", PIXTRAL | LAST_LAYER, broken(14), PIXTRAL_BLOCK),
    "video_llava": Case("video_llava", VIDEO_LLAVA, square, f"image_{TOWER_BLOCK}"),
    "video_llava video": Case("video_llava", VIDEO_LLAVA, frames(4 * 17), f"video_{TOWER_BLOCK}", 10, 8, VIDEOS),
}
