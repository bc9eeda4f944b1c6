"""Hosts: the vision-language models a method can be attached to. HOSTS is the only list; a host's own packages are
imported when it is used.
"""

from importlib import import_module
from typing import Any, NamedTuple

from llava_consensus.errors import OptionError, unknown_name
from llava_consensus.hosts.base import Answer, Attachment, Encoded, Host, Prompt
from llava_consensus.hosts.checkpoints import DTYPES, check_checkpoint, check_conversation

__all__ = ["HOSTS", "Answer", "Attachment", "Encoded", "Host", "HostEntry", "Prompt", "check", "load", "wrap"]


class HostEntry(NamedTuple):
    """Where a host's code is, which model classes it adapts, and one line about it."""

    module: str
    classes: tuple[str, ...]
    line: str


HOSTS: dict[str, HostEntry] = {
    "llava": HostEntry(
        "llava_consensus.hosts.llava.host",
        ("LlavaLlamaForCausalLM", "LlavaMistralForCausalLM", "LlavaMptForCausalLM"),
        "official LLaVA 1.5 / 1.6 (the `llava` package), Llama and Mistral language models",
    )
}


def wrap(model: Any) -> Host:
    """The host of a model that is already loaded.

    Raises:
        OptionError: for a model class no host adapts.
    """
    names = {cls.__name__ for cls in type(model).__mro__}
    for entry in HOSTS.values():
        if names & set(entry.classes):
            return import_module(entry.module).wrap(model)
    known = ", ".join(name for entry in HOSTS.values() for name in entry.classes)
    raise OptionError(f"model of class {type(model).__name__} has no host. Adapted classes: {known}")


def check(model: str, conversation: str | None = None, dtype: str = "auto") -> dict[str, Any]:
    """Checks everything about a model's name that needs no weights; returns what belongs in a run's description."""
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    check_checkpoint(model)
    if conversation not in (None, "vicuna_v1", "llava_v1"):
        check_conversation(conversation)
    return {"conversation": conversation or "vicuna_v1"}


def load(model: str, device: str = "auto", dtype: str = "auto") -> Host:
    """Loads a checkpoint folder or hub name with the official loader of its package.

    Args:
        model: local folder or `owner/name`.
        device: `auto` | `cpu` | `cuda` | `cuda:N`.
        dtype: `auto` (the official loader's on CUDA, float32 on the CPU) | `float32` | `float16` | `bfloat16`.
    Raises:
        OptionError: for a model that is not there or not of a kind any host adapts.
    """
    return import_module(HOSTS["llava"].module).load(model, device, dtype)
