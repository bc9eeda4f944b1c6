"""Hosts: the families of vision-language models that a method can be attached to. HOSTS is the list of ours; an
installed package adds its own under the entry point `llava_consensus.hosts` (docs/adding.md). A host's packages are
imported when it is used.
"""

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, NamedTuple

from llava_consensus.entry_points import load_place, load_registered, registered
from llava_consensus.errors import OptionError

# How LLaVA-NeXT lays out the tiles of a picture, a base view and then a grid of tiles. `stock` is what the checkpoint
# says: the grid that fits the picture best, rows and columns of padding cut away, a newline after each row. `2880` is
# what the numbers of the paper, of VisPruner and of CDPruner are for: always 2 x 2 tiles, nothing cut away, no
# newlines, so that every picture has 5 x 576 tokens and 640 of them are 128 of each tile.
STOCK, FIXED = LAYOUTS = ("stock", "2880")
REMEDY = "Type: pip install 'transformers>=5.19,<{}'"  # for a version of transformers that is not adapted
ACROSS = 2  # tiles in a row of the fixed grid


def fixed_grid(image_size: int) -> list[list[int]]:
    """The only entry of `image_grid_pinpoints` for the fixed grid of tiles of so many pixels."""
    return [[ACROSS * image_size, ACROSS * image_size]]


def check_tiles(counts: Iterable[int]) -> None:
    """Raises OptionError unless every picture has as many tiles as the fixed grid, with the base view."""
    wanted = 1 + ACROSS**2
    for count in counts:
        if count != wanted:
            raise OptionError(
                f"layout={FIXED}: every picture must be {wanted} tiles, and one is {count}: cut it with "
                f"image_grid_pinpoints of one entry, {ACROSS} by {ACROSS} tiles in pixels"
            )


def check_layout(layout: str, image_aspect_ratio: str | None) -> None:
    """Raises OptionError for a layout of tiles where pictures are one square each."""
    if layout != STOCK and image_aspect_ratio != "anyres":
        raise OptionError(
            f"layout={layout} lays out the tiles of a picture, and this model cuts none (image_aspect_ratio="
            f"{image_aspect_ratio!r}): take a checkpoint of LLaVA 1.6, or layout={STOCK}"
        )


def check_version(transformers: str) -> None:
    """Raises OptionError for a version of transformers on whose own models methods were not seen to work."""
    if not (5, 19) <= _numbers(transformers) < (5, 25):
        raise OptionError(
            f"transformers {transformers}: methods on models of transformers run on 5.19 to 5.24. {REMEDY.format(5.25)}"
        )


def check_llava_version() -> None:
    """Raises OptionError for a version of transformers on which official LLaVA does not run: the metadata of this
    project can only say what models of transformers need. From 5.24 on generate() hands models a `cache`, and LLaVA's
    own code takes `past_key_values`.
    """
    installed = version("transformers")
    if _numbers(installed) != (4, 37) and not (5, 19) <= _numbers(installed) < (5, 24):
        raise OptionError(
            f"transformers {installed}: official LLaVA runs here on 4.37.2, its own pin, and on 5.19 to 5.23. "
            f"{REMEDY.format(5.24)}, or model convert for a checkpoint of transformers' own LLaVA"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


INNER = ("get_base_model", "module")  # where PEFT, and what spreads a model over devices, have the model itself


class HostEntry(NamedTuple):
    """A host: one family of models."""

    view: str  # the class of its views of a model (`base.Model`), as `module:class`
    kind: str  # how the evaluation loads it (`KINDS` there), or a module of another package with `check` and `load`
    classes: tuple[str, ...]  # model classes it adapts
    line: str  # about it
    types: tuple[str, ...] = ()  # what configurations call the classes (`model_type`)
    options: Mapping[str, tuple[str, ...]] = MappingProxyType({})  # its options: the values of each, the default first
    clips: bool = False  # whether a video can be shown to it as one clip, and not as pictures
    towers: tuple[str, ...] = ()  # where its classes are another host's too: words, one of which its towers' names have
    remote: bool = False  # whether code is run that the user must trust

    @property
    def defaults(self) -> dict[str, str]:
        """What is meant by each option where nobody says."""
        return {name: values[0] for name, values in self.options.items()}


OURS = "llava_consensus.hosts"
GROUP = "llava_consensus.hosts"  # entry points of other packages, each a `HostEntry`

HOSTS: dict[str, HostEntry] = {
    "llava": HostEntry(
        f"{OURS}.llava:LlavaModel",
        "llava",
        ("LlavaLlamaForCausalLM", "LlavaMistralForCausalLM", "LlavaMptForCausalLM"),
        "official LLaVA 1.5 / 1.6 (the `llava` package), Llama and Mistral language models",
        types=("llava_llama", "llava_mistral", "llava_mpt"),
        options={"layout": LAYOUTS},
    ),
    "llava-hf": HostEntry(
        f"{OURS}.hf.llava:Llava",
        "hf",
        ("LlavaForConditionalGeneration",),
        "LLaVA 1.5 in transformers, CLIP and SigLIP towers",
        types=("llava",),
    ),
    "llava-next": HostEntry(
        f"{OURS}.hf.tiled:LlavaNext",
        "hf",
        ("LlavaNextForConditionalGeneration",),
        "LLaVA-NeXT (1.6) in transformers: tiles",
        types=("llava_next",),
        options={"layout": LAYOUTS},
    ),
    "qwen2.5-vl": HostEntry(
        f"{OURS}.hf.qwen_vl:QwenVL",
        "hf",
        ("Qwen2_5_VLForConditionalGeneration",),
        "Qwen2.5-VL: pictures of any size, videos",
        types=("qwen2_5_vl",),
        clips=True,
    ),
    "qwen2-vl": HostEntry(
        f"{OURS}.hf.qwen_vl:QwenVL",
        "hf",
        ("Qwen2VLForConditionalGeneration",),
        "Qwen2-VL: pictures of any size, videos",
        types=("qwen2_vl",),
        clips=True,
    ),
    "qwen3-vl": HostEntry(
        f"{OURS}.hf.qwen_vl:QwenVL",
        "hf",
        ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
        "Qwen3-VL, dense and of experts: pictures of any size, videos",
        types=("qwen3_vl", "qwen3_vl_moe"),
        clips=True,
    ),
    "glm-4v": HostEntry(
        f"{OURS}.hf.glm4v:Glm4v",
        "hf",
        ("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration", "Glm46VForConditionalGeneration"),
        "GLM-4.1V, GLM-4.5V and GLM-4.6V: pictures of any size, videos",
        types=("glm4v", "glm4v_moe", "glm46v"),
        clips=True,
    ),
    "internvl": HostEntry(
        f"{OURS}.hf.internvl:InternVL",
        "hf",
        ("InternVLForConditionalGeneration",),
        "InternVL 2.5 / 3 in transformers: tiles",
        types=("internvl",),
    ),
    "smolvlm": HostEntry(
        f"{OURS}.hf.smolvlm:SmolVLM",
        "hf",
        ("SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration"),
        "SmolVLM and Idefics3: tiles with text between them",
        types=("smolvlm", "idefics3"),
    ),
    "llava-onevision": HostEntry(
        f"{OURS}.hf.tiled:LlavaOnevision",
        "hf",
        ("LlavaOnevisionForConditionalGeneration",),
        "LLaVA-OneVision: tiles, videos",
        types=("llava_onevision",),
        clips=True,
    ),
    "llava-next-video": HostEntry(
        f"{OURS}.hf.tiled:LlavaNextVideo",
        "hf",
        ("LlavaNextVideoForConditionalGeneration",),
        "LLaVA-NeXT-Video: tiles, videos",
        types=("llava_next_video",),
        clips=True,
    ),
    "gemma-3": HostEntry(
        f"{OURS}.hf.gemma3:Gemma3",
        "hf",
        ("Gemma3ForConditionalGeneration",),
        "Gemma 3: crops, pictures that attend both ways",
        types=("gemma3",),
    ),
    "aya-vision": HostEntry(
        f"{OURS}.hf.aya_vision:AyaVision",
        "hf",
        ("AyaVisionForConditionalGeneration",),
        "Aya Vision: tiles with tags between them",
        types=("aya_vision",),
    ),
    "cohere2-vision": HostEntry(
        f"{OURS}.hf.aya_vision:Cohere2Vision",
        "hf",
        ("Cohere2VisionForConditionalGeneration",),
        "Command A Vision: tiles",
        types=("cohere2_vision",),
    ),
    "ovis-2": HostEntry(
        f"{OURS}.hf.ovis2:Ovis2",
        "hf",
        ("Ovis2ForConditionalGeneration",),
        "Ovis 2: tiles with one row between them",
        types=("ovis2",),
    ),
    "mistral-3": HostEntry(
        f"{OURS}.hf.mistral3:Mistral3",
        "hf",
        ("Mistral3ForConditionalGeneration",),
        "Mistral Small 3.1 and later, Ministral 3: pictures of any size",
        types=("mistral3",),
    ),
    "pixtral": HostEntry(
        f"{OURS}.hf.mistral3:Pixtral",
        "hf",
        ("LlavaForConditionalGeneration",),
        "Pixtral, LLaVA in transformers with a tower of that name: pictures of any size",
        types=("llava",),
        towers=("pixtral",),
    ),
    "video-llava": HostEntry(
        f"{OURS}.hf.video_llava:VideoLlava",
        "hf",
        ("VideoLlavaForConditionalGeneration",),
        "Video-LLaVA: pictures, clips",
        types=("video_llava",),
        options={"class_tokens": ("keep", "drop", "candidates")},
        clips=True,
    ),
    "qwen-vl": HostEntry(
        f"{OURS}.remote.qwen_vl:QwenVL",
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


def view_of(model: Any, options: Mapping[str, str] | None = None) -> Any:
    """A host's view of a model that is loaded, compiled or not: what `Attachment` is given.

    Args:
        model: of a class some host adapts.
        options: see `HostEntry`; the default for each that is left out.
    Raises:
        OptionError: for a model class no host adapts, or an option that its host does not have.
    """
    model = getattr(model, "_orig_mod", model)
    names = [cls.__name__ for cls in type(model).__mro__]
    entry = adapting(names, None, tower_named(vars(getattr(model, "config", object))))
    if entry is None:
        inner = next((path for path in INNER if hasattr(model, path)), None)
        if inner is not None:
            path = inner + "()" * (inner == "get_base_model")
            raise OptionError(
                f"model of class {type(model).__name__} wraps another model: attach to that one, model.{path}"
            )
        known = ", ".join(name for entry in HOSTS.values() for name in entry.classes)
        raise OptionError(f"model of class {type(model).__name__} has no host. Adapted classes: {known}")
    view = load_place(entry.view)(model, chosen(entry, type(model).__name__, options))
    keep_freed_memory()
    return view


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
    """Every option of a host: as given, or its default. OptionError for what the host of `model` does not have."""
    given = given or {}
    for name, value in given.items():
        if value not in entry.options.get(name, ()):
            known = ", ".join(f"{option}={'|'.join(values)}" for option, values in entry.options.items())
            raise OptionError(f"host option {name}={value}: the host of {model} knows {known or 'no options'}")
    return {**entry.defaults, **given}


def adapting(classes: Sequence[str], kind: object, tower: object) -> HostEntry | None:
    """The host of a model of one of these classes, or of this kind where no class is named, whose configuration names
    this vision tower. Those of other packages are looked at where it is none of ours.
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


def keep_freed_memory() -> None:
    """Lets glibc see one large block come and go. From then on it takes smaller blocks from its heap, and gives the
    heap back to the system only from twice that size on (mallopt(3), M_MMAP_THRESHOLD). Otherwise the attention maps of
    a vision tower are mapped anew and filled with zeros page by page in every layer: on LLaVA's own pins that was a
    third to a half of the time to the first token (docs/efficiency.md). Other C libraries ignore it.
    """
    import torch

    torch.empty(31 << 20, dtype=torch.uint8)  # bytes, freed at once; blocks above 32 MiB never raise the threshold
