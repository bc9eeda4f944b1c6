"""Hosts: the families of vision-language models that a method can be attached to. HOSTS is the list of ours; an
installed package adds its own under the entry point `llava_consensus.hosts` (docs/adding.md). A host's packages are
imported when it is used.
"""

import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from llava_consensus.entry_points import load_place, load_registered, registered
from llava_consensus.errors import OptionError
from llava_consensus.hosts.environment import LAYOUTS, SIDES

INNER = ("get_base_model", "module")  # attributes by which PEFT and parallel wrappers hold the model


class HostEntry(NamedTuple):
    """A host: one family of models."""

    view: str  # the class of its views of a model, as `module:class`: `FACTS`, or one for a model's custom code
    kind: str  # how the evaluation loads it (`KINDS` there), or a module of another package with `check` and `load`
    classes: tuple[str, ...]  # model classes it adapts
    line: str  # about it
    types: tuple[str, ...] = ()  # `model_type` of the classes' configurations
    options: Mapping[str, tuple[str, ...]] = MappingProxyType({})  # its options: the values of each, the default first
    clips: bool = False  # whether it accepts a video as one clip, and not as images
    towers: tuple[str, ...] = ()  # where its classes are another host's too: words, one of which its towers' names have
    remote: bool = False  # whether code is run that the user must trust
    lacks: tuple[str, ...] = ()  # of a derived family, parts derived that the usual checkpoint lacks
    family: str = ""  # how its processor writes images (`images.Family`), as `module:name`, if we have no entry for it
    answer_version: int = 1  # raised by hand where the same model and method come to answer otherwise

    @property
    def defaults(self) -> dict[str, str]:
        return {name: values[0] for name, values in self.options.items()}


OURS = "llava_consensus.hosts"
GROUP = "llava_consensus.hosts"  # entry points of other packages, each a `HostEntry`

FACTS = f"{OURS}.facts:Facts"  # of all models of transformers


# Parts that a family may lack: a tower that can be read, positions of one axis.
TOWER, ONE_AXIS = "tower", "one axis"


def _hf(line: str, types: str, classes: str, answer_version: int = 3, **more: Any) -> HostEntry:
    """A family of transformers.

    Args:
        types: `model_type` of its members.
        classes: theirs, without the ending that all have.
    """
    names = tuple(f"{name}ForConditionalGeneration" for name in classes.split())
    return HostEntry(FACTS, "hf", names, line, tuple(types.split()), answer_version=answer_version, **more)


def _grid(line: str, types: str, classes: str) -> HostEntry:
    """A family whose images have any size and whose positions have three axes."""
    return _hf(line, types, classes, lacks=(ONE_AXIS,), clips=True)


def _derived(line: str, types: str, classes: str, *lacks: str, answer_version: int = 3) -> HostEntry:
    """A family of transformers whose tiles are found by backward passes."""
    return _hf(f"{line} (derived)", types, classes, answer_version, lacks=lacks)


HOSTS: dict[str, HostEntry] = {
    "llava": HostEntry(
        f"{OURS}.official_model:Official",
        "llava",
        ("LlavaLlamaForCausalLM", "LlavaMistralForCausalLM"),
        "official LLaVA 1.5 / 1.6 (the `llava` package), Llama and Mistral language models",
        types=("llava_llama", "llava_mistral"),
        options={"layout": LAYOUTS},
        answer_version=2,
    ),
    "llava-hf": _hf("LLaVA 1.5 in transformers, CLIP and SigLIP towers", "llava", "Llava", 2),
    "llava-next": _hf(
        "LLaVA-NeXT (1.6) in transformers: tiles", "llava_next", "LlavaNext", options={"layout": LAYOUTS}
    ),
    "qwen2.5-vl": _grid("Qwen2.5-VL: images of any size, videos", "qwen2_5_vl", "Qwen2_5_VL"),
    "qwen2-vl": _grid("Qwen2-VL: images of any size, videos", "qwen2_vl", "Qwen2VL"),
    "qwen3-vl": _grid(
        "Qwen3-VL, dense and of experts: images of any size, videos", "qwen3_vl qwen3_vl_moe", "Qwen3VL Qwen3VLMoe"
    ),
    "glm-4v": _grid(
        "GLM-4.1V, GLM-4.5V and GLM-4.6V: images of any size, videos", "glm4v glm4v_moe glm46v", "Glm4v Glm4vMoe Glm46V"
    ),
    "internvl": _hf("InternVL 2.5 / 3 in transformers: tiles", "internvl", "InternVL"),
    "smolvlm": _hf("SmolVLM and Idefics3: tiles with text between them", "smolvlm idefics3", "SmolVLM Idefics3"),
    "llava-onevision": _hf("LLaVA-OneVision: tiles, videos", "llava_onevision", "LlavaOnevision", clips=True),
    "llava-next-video": _hf("LLaVA-NeXT-Video: tiles, videos", "llava_next_video", "LlavaNextVideo", clips=True),
    "gemma-3": _hf("Gemma 3: crops, images that attend both ways", "gemma3", "Gemma3"),
    "aya-vision": _hf("Aya Vision: tiles with tags between them", "aya_vision", "AyaVision"),
    "cohere2-vision": _hf("Command A Vision: tiles", "cohere2_vision", "Cohere2Vision"),
    "ovis-2": _hf("Ovis 2: tiles with one row between them", "ovis2", "Ovis2"),
    "mistral-3": _hf("Mistral Small 3.1 and later, Ministral 3: images of any size", "mistral3", "Mistral3", 4),
    "pixtral": _hf(
        "Pixtral, LLaVA in transformers with a tower of that name: images of any size",
        "llava",
        "Llava",
        4,
        towers=("pixtral",),
    ),
    "video-llava": _hf("Video-LLaVA: images, clips", "video_llava", "VideoLlava", 2, clips=True),
    "qwen3.5": _derived(
        "Qwen3.5, dense and of experts: SCAP reads layer 3, the first one with attention",
        "qwen3_5 qwen3_5_moe",
        "Qwen3_5 Qwen3_5Moe",
        ONE_AXIS,
    ),
    "gemma-4": _derived("Gemma 4: images of any shape", "gemma4", "Gemma4", answer_version=4),
    "gemma-3n": _derived("Gemma 3n: a tower without attention, which no method reads", "gemma3n", "Gemma3n", TOWER),
    "molmo-2": _derived("Molmo 2: crops that overlap", "molmo2", "Molmo2"),
    "minicpm-v": _derived(
        "MiniCPM-V 4.6 and 4.7: SCAP reads layer 3, the first one with attention",
        "minicpmv4_6 minicpmv4_7",
        "MiniCPMV4_6 MiniCPMV4_7",
    ),
    "lfm2-vl": _derived(
        "LFM2-VL and LFM3-VL: SCAP reads the first layer that is no convolution", "lfm2_vl lfm3_vl", "Lfm2Vl Lfm3Vl"
    ),
    "llama-4": _derived("Llama 4: tiles", "llama4", "Llama4"),
    "paligemma": _derived("PaliGemma 1 and 2", "paligemma", "PaliGemma", answer_version=4),
    "kimi-k2.5": _derived("Kimi-K2.5: images of any size", "kimi_k25", "Kimi_K25"),
    "glm-ocr": _derived("GLM-OCR: images of any size", "glm_ocr", "GlmOcr", ONE_AXIS),
    "perception-lm": _derived("PerceptionLM: a tower of timm", "perception_lm", "PerceptionLM"),
    "granite-vision": _derived("Granite Vision 4: tiles, a Q-Former in windows", "granite4_vision", "Granite4Vision"),
    "paddleocr-vl": _derived("PaddleOCR-VL: images of any size", "paddleocr_vl", "PaddleOCRVL", ONE_AXIS),
    "video-llama-3": _derived("Video-LLaMA 3: images", "video_llama_3", "VideoLlama3"),
    "qwen-vl": HostEntry(
        f"{OURS}.remote.qwen_vl:QwenVLChat",
        "remote",
        ("QWenLMHeadModel",),
        "Qwen-VL of 2023: a resampler",
        types=("qwen",),
        remote=True,
    ),
    "cogvlm": HostEntry(
        f"{OURS}.remote.cogvlm:CogVLM",
        "remote",
        ("CogVLMForCausalLM",),
        "CogVLM-chat and v1.1: visual experts",
        types=("cogvlm",),
        remote=True,
    ),
    "internvl-chat": HostEntry(
        f"{OURS}.remote.internvl_chat:InternVLChat",
        "internvl-chat",
        ("LlavaLlamaForCausalLM",),
        "InternVL-Chat of 2023: InternViT-6B and Vicuna (the `llava` package of its authors)",
        towers=("internvit", "intern_vit", "internvl", "intern_vl"),
        remote=True,
    ),
}


CROSS = HostEntry(f"{OURS}.cross_attention:CrossFacts", "hf", (), "images by cross attention", tuple(sorted(SIDES)))

# Of a model of transformers that no entry names.
OTHER = _derived("any other vision-language model of transformers that takes `mm_encoder_outputs`", "", "")


def view_of(model: Any, options: Mapping[str, str] | None = None) -> Any:
    """A host's view of a model that is loaded, compiled or not: methods attach to it.

    Args:
        model: of a class some host adapts.
        options: see `HostEntry`; the default for each that is left out.
    Raises:
        OptionError: for a model class no host adapts, or an option that its host does not have.
    """
    model = getattr(model, "_orig_mod", model)
    names = [cls.__name__ for cls in type(model).__mro__]
    if isinstance(model, str):
        raise OptionError(
            f"model={model!r}: must be a loaded model, not a name. With pipe = pipeline('image-text-to-text', "
            f"{model!r}) of transformers pass pipe.model"
        )
    if "Pipeline" in names:
        raise OptionError(f"model is a {names[0]}: pass pipe.model, the model in it")
    entry = adapting(names, None, tower_named(vars(getattr(model, "config", object))))
    across = getattr(getattr(model, "config", None), "model_type", None) in CROSS.types
    if entry is None and (across or takes_features(model)):
        if not model.can_generate():
            raise OptionError(
                f"model of class {names[0]} makes no tokens: attach to the whole model that it is part of"
            )
        entry = CROSS if across else OTHER
    if entry is None:
        inner = next((path for path in INNER if hasattr(model, path)), None)
        if inner is not None:
            path = inner + "()" * (inner == "get_base_model")
            raise OptionError(
                f"model of class {type(model).__name__} wraps another model: attach to that one, model.{path}"
            )
        known = ", ".join(name for entry in HOSTS.values() for name in entry.classes)
        raise OptionError(
            f"model of class {type(model).__name__} has no host: its forward takes no encoded images "
            f"(mm_encoder_outputs). Adapted classes: {known}"
        )
    if entry.family:
        from llava_consensus.hosts.images import TABLE

        TABLE.update((kind, load_place(entry.family)) for kind in entry.types)
    view = load_place(entry.view)(model, chosen(entry, type(model).__name__, options))
    keep_freed_memory()
    return view


def keep_freed_memory() -> None:
    """Lets glibc see one large block come and go. From then on it takes smaller blocks from its heap, and gives the
    heap back to the system only from twice that size on (mallopt(3), M_MMAP_THRESHOLD). Otherwise the attention maps of
    a vision tower are mapped again and filled with zeros page by page in every layer: on LLaVA's own pins that was a
    third to a half of the time to the first token (docs/efficiency.md). Other C libraries ignore it.
    """
    import torch

    torch.empty(31 << 20, dtype=torch.uint8)  # bytes, freed at once; blocks above 32 MiB never raise the threshold


def attached(
    model: Any, method: Any, budget: Any, total: int | None = None, options: Mapping[str, str] | None = None
) -> Any:
    """Attaches a method to a loaded model.

    Raises:
        OptionError: for a model class no host adapts, or a method that this model cannot have.
    """
    return attach_view(view_of(model, options), method, budget, total)


def attach_view(view: Any, method: Any, budget: Any, total: int | None = None) -> Any:
    from llava_consensus.hosts.attachment import Attachment

    entrance = load_place(view.entrance) if isinstance(view.entrance, str) else view.entrance
    return Attachment(view.module, method, budget, total, view.options, entrance)


def takes_features(model: Any) -> bool:
    """Whether a transformers model encodes images separately and accepts features, as derived hosts need."""
    base = getattr(model, "model", None)
    encodes = hasattr(model, "get_image_features") or hasattr(base, "get_image_features")
    forward = getattr(type(model), "forward", None)
    return encodes and forward is not None and "mm_encoder_outputs" in inspect.signature(forward).parameters


def known_hosts() -> dict[str, HostEntry]:
    """Every host: ours, then those of other packages.

    Raises:
        OptionError: for a registered one that is no `HostEntry` or cannot be imported.
    """
    hosts = dict(HOSTS)
    for name in registered(GROUP).keys() - HOSTS.keys():
        found, where = load_registered(GROUP, "host", name, HOSTS)
        if not isinstance(found, HostEntry):
            raise OptionError(f"{where}: must be a HostEntry (docs/adding.md)")
        hosts[name] = found
    return hosts


def chosen(entry: HostEntry, model: str, given: Mapping[str, str] | None) -> dict[str, str]:
    """Every option of a host: as given, or its default. OptionError for options that the host of `model` lacks."""
    given = given or {}
    for name, value in given.items():
        if value not in entry.options.get(name, ()):
            known = ", ".join(f"{option}={'|'.join(values)}" for option, values in entry.options.items())
            raise OptionError(f"host option {name}={value}: the host of {model} knows {known or 'no options'}")
    return {**entry.defaults, **given}


def adapting(classes: Sequence[str], kind: object, tower: object) -> HostEntry | None:
    """The host of a model of one of these classes, or of this kind where no class is named, whose configuration names
    this vision tower. Those of other packages are looked at if it is none of ours.
    """

    def among(hosts: Mapping[str, HostEntry]) -> list[HostEntry]:
        known = hosts.values()
        return [one for one in known if set(classes) & set(one.classes) or (not classes and kind in one.types)]

    entries = among(HOSTS) or among(known_hosts())
    named = [entry for entry in entries if any(word in str(tower).lower() for word in entry.towers)]
    plain = [entry for entry in entries if not entry.towers]
    return next(iter(named or plain), None)


def tower_named(config: Mapping[str, object]) -> object:
    """The vision tower that the configuration of a LLaVA names; of two, that of videos; in transformers, its kind."""
    vision = config.get("vision_config") or {}
    kind = vision.get("model_type") if isinstance(vision, dict) else getattr(vision, "model_type", None)
    return config.get("mm_video_tower") or config.get("mm_vision_tower") or kind
