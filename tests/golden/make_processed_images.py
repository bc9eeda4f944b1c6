"""Writes processed_images.npz: what the processors of 21 families make of images of several sizes, at their defaults.

Needs torchvision. Only ids and small arrays are kept; `test_images.py` makes pixels of the same shapes. The number of
tokens of each image is counted in a prompt of its own.

    python tests/golden/make_processed_images.py
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

FILE = Path(__file__).with_name("processed_images.npz")
FIRST = 1000  # id of the placeholder; those of a family's other special tokens follow
SIZES = {"wide": (900, 400), "wider": (1400, 500), "small": (224, 300), "tall": (500, 1300), "square": (700, 600)}
PROMPTS = {  # images of each prompt; two in a row have no words between them
    "one": [["wide"]],
    "several": [["wide", "wider", "small"]],
    "batch": [["tall", "small"], ["square"]],
}
TEXTS = {"one": ["a {0} what?"], "several": ["a {0}{0} what {0} is"], "batch": ["{0} and {0} which?", "{0} is"]}
CELLS = 24  # of an edge of the pixels that are kept of Gemma 3


def tokenizer(specials: list[str], names: dict[str, str]) -> Any:
    """One of bytes and special tokens."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>"])}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    vocabulary |= {word: FIRST + number for number, word in enumerate(specials)}
    whole = Tokenizer(models.BPE(vocabulary, []))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in ["<pad>", "<s>", *specials]])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=whole,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
        extra_special_tokens=names,
    )


def processor(
    kind: str, specials: list[str], names: dict[str, str], image: str, video: str = "", **options: Any
) -> Any:
    """Of a family. `image` and `video` are classes; `image_options` and `video_options` are theirs."""
    given = options.pop("image_options", {})
    parts = {"tokenizer": tokenizer(specials, names), "image_processor": getattr(transformers, image)(**given)}
    if video:
        parts["video_processor"] = getattr(transformers, video)(**options.pop("video_options", {}))
    if kind == "Gemma4":
        parts["feature_extractor"] = transformers.Gemma4AudioFeatureExtractor()
    return getattr(transformers, f"{kind}Processor")(**parts, **options)


def square(side: int) -> dict[str, Any]:
    return {"size": {"height": side, "width": side}}


def tagged(longest: int, side: int) -> dict[str, Any]:
    return {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}


PINS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
ONE_PINS = [[384 * a, 384 * b] for a in range(1, 7) for b in range(1, 7)]
QWEN = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
QWEN_NAMES = dict(zip(("image_token", "video_token", "vision_start_token", "vision_end_token"), QWEN, strict=True))
VISION = "<|vision_start|><|image_pad|><|vision_end|>"
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
IDEFICS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TILES]
IDEFICS_NAMES = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
PIXTRAL = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
PIXTRAL_NAMES = dict(zip(("image_token", "image_break_token", "image_end_token"), PIXTRAL, strict=True))
COHERE = ["<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"]
GLM = [f"<|{name}|>" for name in ("image", "video")] + [
    f"<|{edge}_of_{name}|>" for name in ("image", "video") for edge in ("begin", "end")
]
MINICPM = ["<|image_pad|>", "<|video_pad|>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"]
MINICPM_NAMES = dict(
    zip(
        [
            *("image_token", "video_token", "image_start_token", "image_end_token", "slice_start_token"),
            *("slice_end_token", "image_id_start_token", "image_id_end_token"),
        ],
        MINICPM,
        strict=True,
    )
)
GEMMA4 = ["<|image|>", "<|video|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>"]
GEMMA4_NAMES = dict(
    zip(
        ["image_token", "video_token", "boi_token", "eoi_token", "audio_token", "boa_token", "eoa_token"],
        GEMMA4,
        strict=True,
    )
)
LLAMA4 = [
    *("<|patch|>", "<|image_start|>", "<|image_end|>", "<|image|>"),
    *("<|tile_x_separator|>", "<|tile_y_separator|>"),
]
LFM2 = ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"]
LFM2 += [f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)]


def qwen(kind: str, patch: int, least: int, most: int) -> Any:
    size = {"shortest_edge": least, "longest_edge": most}
    options = {"size": size, "patch_size": patch}
    video = "Qwen2VLVideoProcessor" if kind == "Qwen2_5_VL" else "Qwen3VLVideoProcessor"
    return processor(kind, QWEN, QWEN_NAMES, "Qwen2VLImageProcessor", video, image_options=options)


# By model type: how its processor is made, and what stands for an image in a text.
PROCESSORS: dict[str, tuple[Callable[[], Any], str]] = {
    "llava_next": (
        lambda: processor(
            "LlavaNext",
            ["<image>"],
            {"image_token": "<image>"},
            "LlavaNextImageProcessor",
            image_options=dict(
                size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}, image_grid_pinpoints=PINS
            ),
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
        "<image>",
    ),
    "llava_onevision": (
        lambda: processor(
            "LlavaOnevision",
            ["<image>", "<video>"],
            {"image_token": "<image>", "video_token": "<video>"},
            "LlavaOnevisionImageProcessor",
            "LlavaOnevisionVideoProcessor",
            image_options=square(384) | {"image_grid_pinpoints": ONE_PINS},
            video_options=square(384),
            num_image_tokens=729,
            vision_feature_select_strategy="full",
            vision_aspect_ratio="anyres_max_9",
        ),
        "<image>",
    ),
    "internvl": (
        lambda: processor(
            "InternVL",
            ["<IMG_CONTEXT>", "<video>", "<img>", "</img>"],
            {
                "context_image_token": "<IMG_CONTEXT>",
                "video_token": "<video>",
                "start_image_token": "<img>",
                "end_image_token": "</img>",
            },
            "GotOcr2ImageProcessor",
            "InternVLVideoProcessor",
            image_options=square(448) | {"crop_to_patches": True, "min_patches": 1, "max_patches": 12},
            video_options=square(448),
            image_seq_length=256,
        ),
        "<IMG_CONTEXT>",
    ),
    "qwen2_5_vl": (lambda: qwen("Qwen2_5_VL", 14, 3136, 12845056), VISION),
    "qwen3_vl": (lambda: qwen("Qwen3VL", 16, 65536, 16777216), VISION),
    "qwen3_5": (lambda: qwen("Qwen3VL", 16, 65536, 16777216), VISION),
    "gemma3": (
        lambda: processor(
            "Gemma3",
            ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
            {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
            "Gemma3ImageProcessor",
            image_options=square(896),
            image_seq_length=256,
        ),
        "<start_of_image>",
    ),
    "smolvlm": (
        lambda: processor(
            "SmolVLM",
            IDEFICS,
            IDEFICS_NAMES,
            "SmolVLMImageProcessor",
            "SmolVLMVideoProcessor",
            image_options=tagged(2048, 512),
            video_options=tagged(2048, 512)
            | {"video_sampling": {"max_frames": 64, "fps": 1, "video_size": {"longest_edge": 512}}},
            image_seq_len=64,
        ),
        "<image>",
    ),
    "idefics3": (
        lambda: processor(
            "Idefics3",
            IDEFICS,
            IDEFICS_NAMES,
            "Idefics3ImageProcessor",
            image_options=tagged(1456, 364),
            image_seq_len=169,
        ),
        "<image>",
    ),
    "mistral3": (
        lambda: processor(
            "Pixtral",
            PIXTRAL,
            PIXTRAL_NAMES,
            "PixtralImageProcessor",
            image_options={"size": {"longest_edge": 1540}, "patch_size": 28},
            patch_size=14,
            spatial_merge_size=2,
            **PIXTRAL_NAMES,
        ),
        "[IMG]",
    ),
    "pixtral": (
        lambda: processor(
            "Pixtral",
            PIXTRAL,
            PIXTRAL_NAMES,
            "PixtralImageProcessor",
            image_options={"size": {"longest_edge": 1024}, "patch_size": 16},
            patch_size=16,
            spatial_merge_size=1,
            **PIXTRAL_NAMES,
        ),
        "[IMG]",
    ),
    "ovis2": (
        lambda: processor(
            "Ovis2",
            ["<IMG_ATOM>", "<image>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"],
            {"image_token": "<image>"},
            "Ovis2ImageProcessor",
            image_options=square(448) | {"crop_to_patches": True, "max_patches": 9},
            image_token="<image>",
            image_seq_length=256,
        ),
        "<image>",
    ),
    "cohere2_vision": (
        lambda: processor(
            "Cohere2Vision",
            COHERE,
            dict(zip(("image_token", "boi_token", "eoi_token", "img_line_break_token"), COHERE, strict=True)),
            "Cohere2VisionImageProcessor",
            image_options=square(512) | {"max_patches": 12, "crop_to_patches": True, "patch_size": 16},
        ),
        "<|IMG_PATCH|>",
    ),
    "aya_vision": (
        lambda: processor(
            "AyaVision",
            [*COHERE, "<image>", "TILE", "TILE_GLOBAL"],
            {},
            "GotOcr2ImageProcessor",
            image_options=square(364) | {"crop_to_patches": True, "max_patches": 12, "min_patches": 1},
            patch_size=28,
            img_size=364,
            image_token="<image>",
            start_of_img_token="<|START_OF_IMG|>",
            end_of_img_token="<|END_OF_IMG|>",
            img_patch_token="<|IMG_PATCH|>",
            img_line_break_token="<|IMG_LINE_BREAK|>",
            tile_token="TILE",
            tile_global_token="TILE_GLOBAL",
        ),
        "<image>",
    ),
    "glm4v": (
        lambda: processor(
            "Glm4v",
            GLM,
            {"image_token": "<|image|>", "video_token": "<|video|>"},
            "Glm4vImageProcessor",
            "Glm4vVideoProcessor",
        ),
        "<|begin_of_image|><|image|><|end_of_image|>",
    ),
    "gemma4": (
        lambda: processor("Gemma4", GEMMA4, GEMMA4_NAMES, "Gemma4ImageProcessor", "Gemma4VideoProcessor"),
        "<|image|>",
    ),
    "molmo2": (
        lambda: processor(
            "Molmo2",
            [
                *("<im_patch>", "<im_start>", "<im_end>", "<low_res_im_start>", "<im_col>"),
                *("<frame_start>", "<frame_end>", "<|image|>", "<|video|>"),
            ],
            {"image_token": "<|image|>", "video_token": "<|video|>"},
            "Molmo2ImageProcessor",
            "Molmo2VideoProcessor",
        ),
        "<|image|>",
    ),
    "llama4": (
        lambda: processor(
            "Llama4",
            LLAMA4,
            {"boi_token": "<|image_start|>", "eoi_token": "<|image_end|>", "image_token": "<|image|>"},
            "Llama4ImageProcessor",
            image_options=square(336) | {"max_patches": 16, "resize_to_max_canvas": False},
            patch_size=14,
            pixel_shuffle_ratio=0.5,
            fake_image_token="<|image|>",
            image_token="<|image|>",
            start_of_image_token="<|image_start|>",
            end_of_image_token="<|image_end|>",
            patch_token="<|patch|>",
            tile_x_separator_token="<|tile_x_separator|>",
            tile_y_separator_token="<|tile_y_separator|>",
        ),
        "<|image|>",
    ),
    "minicpmv4_6": (
        lambda: processor(
            "MiniCPMV4_6", MINICPM, MINICPM_NAMES, "MiniCPMV4_6ImageProcessor", "MiniCPMV4_6VideoProcessor"
        ),
        "<|image_pad|>",
    ),
    "lfm2_vl": (
        lambda: processor(
            "Lfm2Vl",
            LFM2,
            {
                "image_token": "<image>",
                "image_start_token": "<|image_start|>",
                "image_end_token": "<|image_end|>",
                "image_thumbnail": "<|img_thumbnail|>",
                "image_thumbnail_token": "<|img_thumbnail|>",
            },
            "Lfm2VlImageProcessor",
        ),
        "<image>",
    ),
    "kimi_k25": (
        lambda: processor(
            "Kimi_K25",
            [*QWEN, "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>"],
            {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
            "Kimi_K25ImageProcessor",
            "Kimi_K25VideoProcessor",
        ),
        "<|image_pad|>",
    ),
}


def image(size: tuple[int, int], seed: int) -> Image.Image:
    """A smooth one of this width and height."""
    small = np.random.default_rng(seed).integers(0, 255, (size[1] // 32, size[0] // 32, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BILINEAR)


def processed(kind: str) -> dict[str, np.ndarray]:
    """Arrays of each prompt of a family."""
    make, sign = PROCESSORS[kind]
    own, found = make(), {}
    shown = {name: image(size, seed) for seed, (name, size) in enumerate(SIZES.items())}
    options = {"images_kwargs": {"do_pan_and_scan": True}} if kind == "gemma3" else {}

    def run(texts: list[str], rows: list[list[str]]) -> dict[str, Any]:
        images = [[shown[name] for name in row] for row in rows]
        return dict(own(text=texts, images=images, return_tensors="pt", padding=True, **options))

    count = {name: int((run([sign], [[name]])["input_ids"] == FIRST).sum()) for name in SIZES}
    for prompt, rows in PROMPTS.items():
        given = run([text.format(sign) for text in TEXTS[prompt]], rows)
        total = int((given["input_ids"] == FIRST).sum())
        each = [count[name] for row in rows for name in row]
        if kind == "llava_onevision":  # several images of a prompt are not cut into tiles
            each = [count[name] if len(row) == 1 else 730 for row in rows for name in row]
        assert sum(each) == total, (kind, prompt, each, total)
        found[f"{prompt}/counts"] = np.array(each, dtype=np.uint16)
        for name, value in given.items():
            if name in ("attention_mask", "pixel_attention_mask") or name.endswith("token_type_ids"):
                continue
            if name.startswith("pixel_values"):
                found[f"{prompt}/{name}/shape"] = np.array(value.shape, dtype=np.int32)
                if value.ndim == 5:
                    real = (value != 0).flatten(2).any(2)
                    found[f"{prompt}/{name}/tiles"] = real.sum(1).numpy().astype(np.uint8)
                if kind == "gemma3":
                    small = torch.nn.functional.adaptive_avg_pool2d(value, CELLS)
                    found[f"{prompt}/{name}/cells"] = small.numpy().astype(np.float16)
            else:
                found[f"{prompt}/{name}"] = value.numpy().astype(np.int16 if int(value.max()) < 2**15 else np.int32)
    return found


def main() -> None:
    arrays = {f"{kind}/{name}": value for kind in PROCESSORS for name, value in processed(kind).items()}
    versions = json.dumps({"transformers": transformers.__version__})
    np.savez_compressed(FILE, versions=np.frombuffer(versions.encode(), dtype=np.uint8), **arrays)
    print(len(PROCESSORS), "families,", FILE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
