"""Checkpoint folders of the tiny models of `hf_models`, each with a processor of its real class and a tokenizer of
bytes, as a hub would hold them.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hf_models
import pytest
import transformers

from llava_consensus.evaluation import models
from llava_consensus.evaluation.models.hf import HfRunner
from llava_consensus.hosts import view_of

FAKE_IMAGE, UTTERANCE_END = "<fake_token_around_image>", "<end_of_utterance>"
MARKS = (
    "<image>",
    "<video>",
    "<start>",
    "<end>",
    "<global-img>",
    "<box>",
    FAKE_IMAGE,
    UTTERANCE_END,
)  # in the order of their ids
SPECIAL = dict(enumerate(("<pad>", "<s>", "</s>"))) | dict(enumerate(MARKS, hf_models.IMAGE))
SPECIAL |= {300 + 6 * row + column: f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6)}
NAMES = {
    **dict.fromkeys(("image_token", "context_image_token"), "<image>"),
    **dict.fromkeys(("start_image_token", "vision_start_token"), "<start>"),
    **dict.fromkeys(("end_image_token", "vision_end_token", "eoi_token"), "<end>"),
    **{"video_token": "<video>", "global_image_token": "<global-img>", "boi_token": "<box>"},
    **{"fake_image_token": FAKE_IMAGE, "end_of_utterance_token": UTTERANCE_END},
}
SIDE = {"height": 56, "width": 56}
CLIP = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}


def cropped(side: int) -> dict[str, Any]:
    """Images are resized and cropped to squares of so many pixels."""
    return {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}


CROP = cropped(56)
FILMING = find_spec("torchvision") is not None  # which video processors need
COUNTING = FILMING and find_spec("num2words") is not None
SMOLVLM = pytest.mark.skipif(not COUNTING, reason="SmolVLM's processor needs num2words and torchvision")
FILM = {"Qwen3VLVideoProcessor": {"size": {"shortest_edge": 64 * 32**2, "longest_edge": 128 * 32**2}}}


def tokenizer() -> Any:
    """A token for each byte, and the special ones where the models have them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    free = [place for place in range(512) if place not in SPECIAL]
    vocabulary = {text: place for place, text in SPECIAL.items()}
    vocabulary |= dict(zip(alphabet, free, strict=False))
    vocabulary |= {f"<unused {place}>": place for place in free[len(alphabet) :]}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL.values()])
    options = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>", padding_side="left")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, extra_special_tokens=NAMES, **options)


def template(image: str = "<image>", video: str = "<video>", begin: str = "") -> str:
    parts = f"{{% if part.type == 'image' %}}{image}{{% elif part.type == 'video' %}}{video}{{% else %}}"
    turns = "{% for turn in messages %}USER: {% for part in turn.content %}" + parts + "{{ part.text }}"
    return begin + turns + "{% endif %}{% endfor %}{% endfor %}\nASSISTANT:"


def _made(kind: str, image: str | None, words: dict[str, Any], video: str = "", **options: Any) -> Any:
    parts = {"tokenizer": tokenizer(), "image_processor": getattr(transformers, str(image))(**words)}
    processor_class = getattr(transformers, kind)
    if video and FILMING:
        parts["video_processor"] = getattr(transformers, video)(**{**words, **FILM.get(video, {})})
    elif video:  # the processor without its video side, which it would not be made without
        processor_class = type(kind, (processor_class,), {"check_argument_for_proper_class": lambda *_: None})
        parts["video_processor"] = None
    options.setdefault("chat_template", template())
    return processor_class(**parts, **options)


def _qwen(kind: str, patch: int) -> Any:
    token = (2 * patch) ** 2  # pixels
    words = {"patch_size": patch, "size": {"shortest_edge": 4 * token, "longest_edge": 16 * token}}
    wrapped = template("<start><image><end>", "<start><video><end>")
    videos = "Qwen2VLVideoProcessor" if patch == 14 else "Qwen3VLVideoProcessor"
    return _made(f"{kind}Processor", "Qwen2VLImageProcessor", words, videos, chat_template=wrapped)


def _pixtral(side: int) -> Any:
    """Of a model with so many patches in a row of a token's square."""
    marks = {"image_token": "<image>", "image_break_token": "<global-img>", "image_end_token": "<end>"}
    words = {"size": {"longest_edge": 56 * side}, "patch_size": 14 * side}
    kind = "PixtralProcessor", "PixtralImageProcessor"
    return _made(*kind, words, patch_size=14, spatial_merge_size=side, **marks)


def _split(kind: str, video: str = "") -> Any:
    words = {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 112}}
    return _made(f"{kind}Processor", f"{kind}ImageProcessor", words, video, image_seq_len=16)


def _tiled(kind: str, video: str = "") -> Any:
    words = {**CROP, "image_grid_pinpoints": hf_models.PINS}
    return _made(f"{kind}Processor", "LlavaNextImageProcessor", words, video, **CLIP)


def _onevision() -> Any:
    words = {"size": SIDE, "image_grid_pinpoints": hf_models.ONEVISION_PINS}
    options = dict(num_image_tokens=16, vision_feature_select_strategy="full", vision_aspect_ratio="anyres_max_2")
    kind = "LlavaOnevision"
    return _made(f"{kind}Processor", f"{kind}ImageProcessor", words, f"{kind}VideoProcessor", **options)


def _whole(kind: str, image: str, video: str = "", **options: Any) -> Any:
    """Of a model of square tiles."""
    words = {"size": {"height": 112, "width": 112}, **({"max_patches": 6} if video else {})}
    return _made(f"{kind}Processor", f"{image}ImageProcessor", words, video, image_seq_length=16, **options)


def video_llava(side: int = 56) -> Any:
    """The processor of a Video-LLaVA for images of so many pixels."""
    names = "VideoLlavaProcessor", "VideoLlavaImageProcessor"
    return _made(*names, cropped(side), "VideoLlavaVideoProcessor", **CLIP)


PROCESSORS: dict[str, Callable[[], Any]] = {
    "llava": lambda: _made("LlavaProcessor", "CLIPImageProcessor", CROP, **CLIP),
    "llava_next": lambda: _tiled("LlavaNext"),
    "llava_next_video": lambda: _tiled("LlavaNextVideo", "LlavaNextVideoVideoProcessor"),
    "llava_onevision": _onevision,
    "video_llava": video_llava,
    "qwen2_vl": lambda: _qwen("Qwen2VL", 14),
    "qwen2_5_vl": lambda: _qwen("Qwen2_5_VL", 14),
    "qwen3_vl": lambda: _qwen("Qwen3VL", 16),
    "internvl": lambda: _whole("InternVL", "GotOcr2", "InternVLVideoProcessor"),
    "smolvlm": lambda: _split("SmolVLM", "SmolVLMVideoProcessor"),
    "idefics3": lambda: _split("Idefics3"),
    "gemma3": lambda: _whole("Gemma3", "Gemma3", chat_template=template("<box>", begin="<s>")),
    "mistral_3": lambda: _pixtral(2),
    "pixtral": lambda: _pixtral(1),
}
CLIPS = ("llava_next_video", "llava_onevision", "video_llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
WITH_VIDEOS = (*CLIPS, "internvl", "smolvlm")
PIXTRAL = pytest.mark.skipif(not FILMING, reason="Pixtral's processor needs torchvision")
NEEDS = {"smolvlm": SMOLVLM, "mistral_3": PIXTRAL, "pixtral": PIXTRAL}
FAMILIES = [pytest.param(name, marks=NEEDS.get(name, ())) for name in PROCESSORS]


def checkpoint(name: str, folder: Path) -> Path:
    """The folder of a tiny model with its processor."""
    model = hf_models.CASES[name].build()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    PROCESSORS[name]().save_pretrained(folder)
    return folder


def host_of(name: str, folder: Path) -> Any:
    """A tiny model in the harness: from its folder, or where its processor cannot be loaded without torchvision, from
    memory.
    """
    if FILMING or name not in WITH_VIDEOS:
        return models.load(str(checkpoint(name, folder)), models.Loading("cpu", "float32"))
    model = hf_models.CASES[name].build()
    model.generation_config.eos_token_id = None
    host = HfRunner(view_of(model), PROCESSORS[name]())
    host.check_prompts()
    return host
