"""The list of hosts: which model classes each adapts, and what it leaves open."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from llava_consensus.hosts.layouts import LAYOUTS


class HostEntry(NamedTuple):
    """A host: its package, which has `host.wrap`, `loading.load` and `checks.check`, the model classes it adapts, one
    line about it, where a package has several families the one that is meant as `file:class`, what configurations call
    the classes (`model_type`), and the options it has: the values of each, the first of which is meant where nobody
    says. `clips` says whether the harness shows it a video as one clip, and not as pictures. Where classes belong to
    another host too, `towers` are the words of which the name of a vision tower has one. `remote` says that code is run
    which the user must trust.
    """

    package: str
    classes: tuple[str, ...]
    line: str
    view: str = ""
    types: tuple[str, ...] = ()
    options: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    clips: bool = False
    towers: tuple[str, ...] = ()
    remote: bool = False

    @property
    def defaults(self) -> dict[str, str]:
        """What is meant by each option where nobody says."""
        return {name: values[0] for name, values in self.options.items()}


HF = "llava_consensus.hosts.hf"
REMOTE = "llava_consensus.hosts.remote"
CLIPS = "clips"  # how a run says that a video was shown as one, under one budget


HOSTS: dict[str, HostEntry] = {
    "llava": HostEntry(
        "llava_consensus.hosts.llava",
        ("LlavaLlamaForCausalLM", "LlavaMistralForCausalLM", "LlavaMptForCausalLM"),
        "official LLaVA 1.5 / 1.6 (the `llava` package), Llama and Mistral language models",
        types=("llava_llama", "llava_mistral", "llava_mpt"),
        options={"layout": LAYOUTS},
    ),
    "llava-hf": HostEntry(
        HF,
        ("LlavaForConditionalGeneration",),
        "LLaVA 1.5 in transformers, CLIP and SigLIP towers",
        "llava:Llava",
        types=("llava",),
    ),
    "llava-next": HostEntry(
        HF,
        ("LlavaNextForConditionalGeneration",),
        "LLaVA-NeXT (1.6) in transformers: tiles",
        "tiled:LlavaNext",
        types=("llava_next",),
        options={"layout": LAYOUTS},
    ),
    "qwen2.5-vl": HostEntry(
        HF,
        ("Qwen2_5_VLForConditionalGeneration",),
        "Qwen2.5-VL: pictures of any size, videos",
        "qwen_vl:QwenVL",
        types=("qwen2_5_vl",),
        clips=True,
    ),
    "qwen3-vl": HostEntry(
        HF,
        ("Qwen3VLForConditionalGeneration",),
        "Qwen3-VL: pictures of any size, videos",
        "qwen_vl:QwenVL",
        types=("qwen3_vl",),
        clips=True,
    ),
    "internvl": HostEntry(
        HF,
        ("InternVLForConditionalGeneration",),
        "InternVL 2.5 / 3 in transformers: tiles",
        "internvl:InternVL",
        types=("internvl",),
    ),
    "smolvlm": HostEntry(
        HF,
        ("SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration"),
        "SmolVLM and Idefics3: tiles with text between them",
        "smolvlm:SmolVLM",
        types=("smolvlm", "idefics3"),
    ),
    "llava-onevision": HostEntry(
        HF,
        ("LlavaOnevisionForConditionalGeneration",),
        "LLaVA-OneVision: tiles, videos",
        "tiled:LlavaOnevision",
        types=("llava_onevision",),
        clips=True,
    ),
    "llava-next-video": HostEntry(
        HF,
        ("LlavaNextVideoForConditionalGeneration",),
        "LLaVA-NeXT-Video: tiles, videos",
        "tiled:LlavaNextVideo",
        types=("llava_next_video",),
        clips=True,
    ),
    "gemma-3": HostEntry(
        HF, ("Gemma3ForConditionalGeneration",), "Gemma 3: methods after the tower", "gemma3:Gemma3", ("gemma3",)
    ),
    "video-llava": HostEntry(
        HF,
        ("VideoLlavaForConditionalGeneration",),
        "Video-LLaVA: pictures, clips",
        "video_llava:VideoLlava",
        types=("video_llava",),
        options={"class_tokens": ("keep", "drop", "candidates")},
        clips=True,
    ),
    "qwen-vl": HostEntry(
        REMOTE, ("QWenLMHeadModel",), "Qwen-VL of 2023: a resampler", "qwen_vl:QwenVL", ("qwen",), remote=True
    ),
    "cogvlm": HostEntry(
        REMOTE,
        ("CogVLMForCausalLM",),
        "CogVLM-chat and v1.1: visual experts",
        "cogvlm:CogVLM",
        ("cogvlm",),
        remote=True,
    ),
    "internvl-chat": HostEntry(
        f"{REMOTE}.internvl_chat",
        ("LlavaLlamaForCausalLM",),
        "InternVL-Chat of 2023: InternViT-6B and Vicuna (the `llava` package of its authors)",
        towers=("internvit", "intern_vit", "internvl", "intern_vl"),
        remote=True,
    ),
}


def adapting(classes: Sequence[str], kind: object, tower: object) -> HostEntry | None:
    """The host of a model of one of these classes, or of this kind where no class is named, whose configuration names
    this vision tower.
    """
    entries = [
        entry for entry in HOSTS.values() if set(classes) & set(entry.classes) or (not classes and kind in entry.types)
    ]
    named = [entry for entry in entries if any(word in str(tower).lower() for word in entry.towers)]
    plain = [entry for entry in entries if not entry.towers]
    return next(iter(named or plain), None)


def tower_named(config: Mapping[str, object]) -> object:
    """The vision tower that the configuration of a LLaVA names; of two, that of videos."""
    return config.get("mm_video_tower") or config.get("mm_vision_tower")


def classes() -> str:
    """The names of all classes, for messages."""
    return ", ".join(name for entry in HOSTS.values() for name in entry.classes)
