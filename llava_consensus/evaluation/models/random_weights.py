"""Models of a published size with random weights: for measuring times, memory and FLOPs without a checkpoint.

    plan("llava-1.5-7b", Loading(dtype="float16")).runner()

A plan knows the size of its weights before any of them is allocated. They are drawn by the model's own initialisation,
straight in the type and on the device that are measured.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import transformers

from llava_consensus.errors import OptionError, missing_extra, unknown_name
from llava_consensus.evaluation.models.hf import HfRunner
from llava_consensus.evaluation.models.loading import Loading
from llava_consensus.hosts import view_of
from llava_consensus.hosts.facts import check_version

BEFORE, AFTER = 35, 15  # rows of text around the image, 50 as in the paper's efficiency tables
IMAGE_ID, WORD = 31999, "word"  # in every vocabulary below
_IMAGE_PARTS = "{% for part in messages[0].content if part.type == 'image' %}<image>{% endfor %}"
PROMPT = f"{WORD} " * BEFORE + _IMAGE_PARTS + f" {WORD}" * AFTER  # a chat template


CHAT = (  # another, of all that is said
    "{% for message in messages %}{% if message.content is string %}{{ message.content + ' ' }}{% else %}"
    "{% for part in message.content %}{{ '<image> ' if part.type == 'image' else part.text + ' ' }}{% endfor %}"
    "{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Size:
    """A published size; `family` begins the names of transformers' classes, `tokens` is of a square image."""

    family: str
    vision: Mapping[str, Any]
    text: Mapping[str, Any]
    processor: Callable[[], transformers.ProcessorMixin]
    tokens: int = 576


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of numbered words, for prompts of the right length without meaning."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    special = {"<pad>": 0, "<image>": IMAGE_ID, "<video>": IMAGE_ID - 1}
    vocabulary = {f"w{number}": number for number in range(1, IMAGE_ID - 1) if number != 1000}
    words = Tokenizer(models.WordLevel({WORD: 1000, **vocabulary, **special}, unk_token=WORD))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    names = {"image_token": "<image>", "video_token": "<video>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", padding_side="left", extra_special_tokens=names
    )


def _processor(
    kind: str, images: str, pixels: Mapping[str, Any], videos: str = "", **options: Any
) -> transformers.ProcessorMixin:
    """A processor whose prompts have fixed numbers of words before and after their images, for any question."""
    parts = {"tokenizer": tokenizer(), "image_processor": getattr(transformers, images)(**pixels)}
    if videos and find_spec("torchvision") is None:
        raise missing_extra(f"{kind} needs torchvision", "processors")
    if videos:
        parts["video_processor"] = getattr(transformers, videos)()
    return getattr(transformers, kind)(**parts, chat_template=PROMPT, **options)


def _llava(
    text: Mapping[str, Any], family: str = "Llava", tokens: int = 576, width: int = 1024, layers: int = 24
) -> Size:
    """A size with the tower of LLaVA-1.5, CLIP ViT-L/14 for images of 336 pixels, or a smaller one of its kind."""
    blocks = dict(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers)
    vision = {"model_type": "clip_vision_model", **blocks, "image_size": 336, "patch_size": 14}
    vision["num_attention_heads"] = width // 64
    pixels = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    images = "CLIPImageProcessor" if family == "Llava" else f"{family}ImageProcessor"
    counting: dict[str, Any] = dict(
        patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    processor = partial(_processor, f"{family}Processor", images, pixels, **counting)
    return Size(family, vision, text, processor, tokens)


def _llama(**sizes: int) -> dict[str, Any]:
    """A Llama of Vicuna's length; of the size of the 7B, which is the default of its configuration."""
    return {"model_type": "llama", "max_position_embeddings": 4096, **sizes}


_LLAMA_100M = _llama(hidden_size=640, intermediate_size=1664, num_hidden_layers=16, num_attention_heads=10)
_TINY_LLAMA = _llama(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_key_value_heads=4)
_LLAMA_13B = _llama(hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40)
_QWEN_TEXT = dict(
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    max_position_embeddings=128000,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
)

# config.json of liuhaotian/llava-v1.5-7b, llava-v1.5-13b, llava-v1.6-vicuna-7b and Qwen/Qwen2.5-VL-7B-Instruct. Two are
# no published models, for machines that hold nothing larger: 1B is the tower of LLaVA-1.5 before TinyLlama-1.1B; 0.1B
# has the proportions of the 7B, a tower with a twentieth of the prefill's FLOPs.
SIZES = {
    "llava-1.5-0.1b": _llava(_LLAMA_100M, width=192, layers=7),
    "llava-1.5-1b": _llava(_TINY_LLAMA),
    "llava-1.5-7b": _llava(_llama()),
    "llava-1.5-13b": _llava(_LLAMA_13B),
    "llava-next-7b": _llava(_llama(), "LlavaNext", 2928),
    "qwen2.5-vl-7b": Size(
        "Qwen2_5_VL",
        {"hidden_size": 1280},
        _QWEN_TEXT,
        partial(_processor, "Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", {}, "Qwen2VLVideoProcessor"),
    ),
}


@dataclass(frozen=True)
class RandomModel:
    """A model of a size, on the device "meta" until `runner` is called."""

    size: Size
    model: transformers.PreTrainedModel
    device: str
    host_options: Mapping[str, str]

    @property
    def weight_bytes(self) -> int:
        return sum(weight.numel() * weight.itemsize for weight in self.model.parameters())

    @property
    def cache_bytes(self) -> int:
        text = self.model.config.get_text_config()
        width = text.hidden_size // text.num_attention_heads
        numbers = 2 * text.num_hidden_layers * text.num_key_value_heads * width
        return numbers * (BEFORE + self.size.tokens + AFTER) * self.model.dtype.itemsize

    def runner(self) -> HfRunner:
        """Allocates the weights and draws them, always the same ones."""
        processor = self.size.processor()
        torch.manual_seed(0)
        model = self.model.to_empty(device=self.device)
        model.init_weights()
        return HfRunner(view_of(model.eval(), self.host_options), processor)


def plan(name: str, loading: Loading, host_options: Mapping[str, str] | None = None) -> RandomModel:
    """A model of a size in `SIZES` that is not allocated yet; by default float16 on CUDA, float32 elsewhere."""
    if name not in SIZES:
        raise unknown_name("shape", name, SIZES)
    if loading.bits or loading.device_map:
        raise OptionError(f"shape={name!r}: random weights are neither quantised nor spread. Leave bits and map out")
    check_version(transformers.__version__)
    size, device = SIZES[name], loading.resolved().device
    automatic = "float16" if device.startswith("cuda") else "float32"
    dtype = getattr(torch, automatic if loading.dtype == "auto" else loading.dtype)
    kernel = {} if loading.attention == "auto" else {"attn_implementation": loading.attention}
    config = getattr(transformers, f"{size.family}Config")(
        vision_config=dict(size.vision), text_config=dict(size.text), image_token_id=IMAGE_ID
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{size.family}ForConditionalGeneration")._from_config(
            config, dtype=dtype, **kernel
        )
    return RandomModel(size, model, device, host_options or {})
