"""Hosts: the vision-language models a method can be attached to. HOSTS is the only list; a host's own packages are
imported when it is used.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llava_consensus.errors import DataError, OptionError, unknown_name
from llava_consensus.files import read_json
from llava_consensus.hosts.checkpoints import DTYPES, check_checkpoint

if TYPE_CHECKING:
    from llava_consensus.hosts.attachment import Attachment
    from llava_consensus.hosts.base import Answer, Encoded, Host, Prompt

__all__ = ["HOSTS", "Answer", "Attachment", "Encoded", "Host", "HostEntry", "Prompt", "check", "load", "wrap"]


class HostEntry(NamedTuple):
    """A host: its package, which has `host.wrap`, `host.load` and `checks.check`, the model classes it adapts, one line
    about it, and where a package has several families, the one that is meant as `file:class`.
    """

    package: str
    classes: tuple[str, ...]
    line: str
    view: str = ""


HF = "llava_consensus.hosts.hf"


HOSTS: dict[str, HostEntry] = {
    "llava": HostEntry(
        "llava_consensus.hosts.llava",
        ("LlavaLlamaForCausalLM", "LlavaMistralForCausalLM", "LlavaMptForCausalLM"),
        "official LLaVA 1.5 / 1.6 (the `llava` package), Llama and Mistral language models",
    ),
    "llava-hf": HostEntry(
        HF, ("LlavaForConditionalGeneration",), "LLaVA 1.5 in transformers, CLIP and SigLIP towers", "llava:Llava"
    ),
    "llava-next": HostEntry(
        HF, ("LlavaNextForConditionalGeneration",), "LLaVA-NeXT (1.6) in transformers: tiles", "tiled:LlavaNext"
    ),
    "qwen2.5-vl": HostEntry(
        HF, ("Qwen2_5_VLForConditionalGeneration",), "Qwen2.5-VL: pictures of any size, videos", "qwen_vl:QwenVL"
    ),
    "qwen3-vl": HostEntry(
        HF, ("Qwen3VLForConditionalGeneration",), "Qwen3-VL: pictures of any size, videos", "qwen_vl:QwenVL"
    ),
    "internvl": HostEntry(
        HF, ("InternVLForConditionalGeneration",), "InternVL 2.5 / 3 in transformers: tiles", "internvl:InternVL"
    ),
    "smolvlm": HostEntry(
        HF,
        ("SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration"),
        "SmolVLM and Idefics3: tiles with text between them",
        "smolvlm:SmolVLM",
    ),
    "llava-onevision": HostEntry(
        HF, ("LlavaOnevisionForConditionalGeneration",), "LLaVA-OneVision: tiles, videos", "tiled:LlavaOnevision"
    ),
    "llava-next-video": HostEntry(
        HF, ("LlavaNextVideoForConditionalGeneration",), "LLaVA-NeXT-Video: tiles, videos", "tiled:LlavaNextVideo"
    ),
    "gemma-3": HostEntry(HF, ("Gemma3ForConditionalGeneration",), "Gemma 3: methods behind the tower", "gemma3:Gemma3"),
    "video-llava": HostEntry(
        HF, ("VideoLlavaForConditionalGeneration",), "Video-LLaVA: pictures, clips", "video_llava:VideoLlava"
    ),
}
DEFAULT = "llava"  # for checkpoints that do not say which class they are of


def __getattr__(name: str) -> Any:
    """Classes that need torch, imported when they are asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    submodule = "attachment" if name == "Attachment" else "base"
    return getattr(import_module(f"{__name__}.{submodule}"), name)


def wrap(model: Any) -> "Host":
    """The host of a model that is already loaded, compiled or not.

    Raises:
        OptionError: for a model class no host adapts.
    """
    model = getattr(model, "_orig_mod", model)
    names = {cls.__name__ for cls in type(model).__mro__}
    for entry in HOSTS.values():
        if names & set(entry.classes):
            host_module = import_module(f"{entry.package}.host")
            host: Host = host_module.wrap(model, entry.view) if entry.view else host_module.wrap(model)
            return host
    raise OptionError(f"model of class {type(model).__name__} has no host. Adapted classes: {_classes()}")


def load(model: str, device: str = "auto", dtype: str = "auto") -> "Host":
    """Loads a checkpoint folder or hub name with the official loader of its package.

    Args:
        model: local folder or `owner/name`.
        device: `auto` | `cpu` | `cuda` | `cuda:N`.
        dtype: `auto` (the official loader's on CUDA, float32 on the CPU) | `float32` | `float16` | `bfloat16`.
    Raises:
        ConsensusError: for a model that is not there or not of a kind any host adapts.
    """
    check_checkpoint(model)
    entry = _entry(model)
    host_module = import_module(f"{entry.package}.host")
    host: Host = (
        host_module.load(model, device, dtype, entry.view) if entry.view else host_module.load(model, device, dtype)
    )
    return host


def check(model: str, conversation: str | None = None, dtype: str = "auto", *, videos: bool = False) -> dict[str, Any]:
    """Checks what can be known of a model without its weights.

    Args:
        model: local folder or `owner/name`.
        conversation: template of the prompt; None is the host's own.
        dtype: see `load`.
        videos: whether the questions are about videos, for which a host may have a template of its own.
    Returns:
        What belongs in the description of a run beside these arguments, the host's defaults filled in.
    Raises:
        ConsensusError: for a folder that is no checkpoint, a class no host adapts, or a name the host does not know.
    """
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    check_checkpoint(model)
    description: dict[str, Any] = import_module(f"{_entry(model).package}.checks").check(model, conversation, videos)
    return description


def _entry(model: str) -> HostEntry:
    """The host of a checkpoint, by the class its configuration names."""
    file = Path(model).expanduser() / "config.json"
    architectures = _architectures(file) if file.is_file() else []
    for entry in HOSTS.values():
        if set(architectures) & set(entry.classes):
            return entry
    if architectures:
        raise OptionError(
            f"model {model!r} is a {architectures[0]}, which no host adapts. Adapted classes: {_classes()}"
        )
    return HOSTS[DEFAULT]


def _architectures(file: Path) -> list[str]:
    architectures = read_json(file, "Fetch the checkpoint again", dict).get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise DataError(f"{file}: architectures={architectures!r} must be a list of names. Fetch the checkpoint again")
    return architectures


def _classes() -> str:
    return ", ".join(name for entry in HOSTS.values() for name in entry.classes)
