"""Hosts: the vision-language models a method can be attached to. HOSTS is the only list; a host's own packages are
imported when it is used.
"""

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation.files import read_json
from llava_consensus.evaluation.models.checkpoint import Checkpoint, find
from llava_consensus.hosts.allocator import keep_freed_memory
from llava_consensus.hosts.catalogue import CLIPS, HOSTS, HostEntry, adapting, classes, tower_named
from llava_consensus.hosts.loading import Loading

if TYPE_CHECKING:
    from llava_consensus.hosts.attachment import Attachment
    from llava_consensus.hosts.base import Answer, Encoded, Host, Prompt

__all__ = [
    "CLIPS",
    "HOSTS",
    "Answer",
    "Attachment",
    "Checkpoint",
    "Encoded",
    "Host",
    "HostEntry",
    "Loading",
    "Prompt",
    "check",
    "find",
    "load",
    "name_of",
    "pinned",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """Classes that need torch, imported when they are asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    submodule = "attachment" if name == "Attachment" else "base"
    return getattr(import_module(f"{__name__}.{submodule}"), name)


def wrap(model: Any, host_options: Mapping[str, str] | None = None) -> "Host":
    """The host of a model that is already loaded, compiled or not.

    Args:
        model: of a class some host adapts.
        host_options: see `HostEntry`; the default for each that is left out.
    Raises:
        OptionError: for a model class no host adapts, or an option that its host does not have.
    """
    model = getattr(model, "_orig_mod", model)
    names = [cls.__name__ for cls in type(model).__mro__]
    entry = adapting(names, None, tower_named(vars(getattr(model, "config", object))))
    if entry is None:
        raise OptionError(f"model of class {type(model).__name__} has no host. Adapted classes: {classes()}")
    chosen = _chosen(entry, type(model).__name__, host_options)
    keep_freed_memory()
    host: Host = import_module(f"{entry.package}.host").wrap(model, *_view(entry), chosen)
    return host


def load(model: str, loading: Loading | None = None, host_options: Mapping[str, str] | None = None) -> "Host":
    """Loads a checkpoint folder or hub name with the official loader of its package.

    Args:
        model: local folder or `owner/name`.
        loading: how; None is as on any machine.
        host_options: see `HostEntry`; the default for each that is left out.
    Raises:
        ConsensusError: for a model that is not there or not of a kind any host adapts, or an option that its host does
            not have.
    """
    loading = pinned(model, loading or Loading())
    loading.check_packages()
    checkpoint = find(model, loading.revision)
    entry = _entry(checkpoint, loading)
    chosen = _chosen(entry, model, host_options)
    checkpoint.files()
    keep_freed_memory()
    load_host = import_module(f"{entry.package}.loading").load
    host: Host = load_host(str(checkpoint.folder), loading, *_view(entry), chosen)
    return host


def pinned(model: str, loading: Loading) -> Loading:
    """How a model is loaded, with nothing left open: the device of this machine, and of a model of the hub the commit.

    Raises:
        ConsensusError: for a device or a model that is not there.
    """
    return replace(loading.resolved(), revision=find(model, loading.revision).commit)


def check(
    model: str,
    conversation: str | None = None,
    loading: Loading | None = None,
    *,
    videos: bool = False,
    host_options: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Checks what can be known of a model without its weights.

    Args:
        model: local folder or `owner/name`.
        conversation: template of the prompt; None is the host's own.
        loading: how it will be loaded.
        videos: whether the questions are about videos, for which a host may have a template of its own.
        host_options: see `HostEntry`.
    Returns:
        What belongs in the description of a run beside these arguments: the host's defaults filled in, under
        `host_options` those that are not the default, and under `videos` whether videos are shown as clips.
    Raises:
        ConsensusError: for a folder that is no checkpoint, a class no host adapts, or a name or option the host does
            not know.
    """
    loading = loading or Loading()
    loading.check_packages()
    checkpoint = find(model, loading.revision)
    entry = _entry(checkpoint, loading)
    chosen = _chosen(entry, model, host_options)
    changed = {name: value for name, value in chosen.items() if value != entry.defaults[name]}
    checks = import_module(f"{entry.package}.checks")
    description: dict[str, Any] = checks.check(str(checkpoint.folder), conversation, videos, chosen)
    clips = {"videos": CLIPS} if videos and entry.clips else {}
    return {**description, **clips, **({"host_options": changed} if changed else {})}


def name_of(model: str, loading: Loading | None = None) -> str:
    """The name in HOSTS of the host that adapts a model.

    Raises:
        ConsensusError: for a folder that is no checkpoint, or a class no host adapts.
    """
    loading = loading or Loading()
    entry = _entry(find(model, loading.revision), loading)
    return next(name for name, known in HOSTS.items() if known is entry)


def _chosen(entry: HostEntry, model: str, given: Mapping[str, str] | None) -> dict[str, str]:
    """Every option of a host: as given, or its default. OptionError for what the host of `model` does not have."""
    given = given or {}
    for name, value in given.items():
        if value not in entry.options.get(name, ()):
            known = ", ".join(f"{option}={'|'.join(values)}" for option, values in entry.options.items())
            raise OptionError(f"host option {name}={value}: the host of {model} knows {known or 'no options'}")
    return {**entry.defaults, **given}


def _view(entry: HostEntry) -> tuple[str, ...]:
    return (entry.view,) if entry.view else ()


def _entry(checkpoint: Checkpoint, loading: Loading) -> HostEntry:
    """The host of a checkpoint, from its configuration."""
    file = checkpoint.folder / "config.json"
    config = read_json(file, "Fetch the checkpoint again", dict)
    architectures, kind = config.get("architectures") or [], config.get("model_type")
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise DataError(f"{file}: architectures={architectures!r} must be a list of names. Fetch the checkpoint again")
    if not architectures and not kind:
        raise DataError(f"{file}: neither architectures nor model_type says what it is. Fetch the checkpoint again")
    entry = adapting(architectures, kind, tower_named(config))
    if entry is None:
        raise OptionError(
            f"model {checkpoint.name!r} is a {(architectures or [kind])[0]} (model_type {kind!r}), which no host "
            f"adapts. Adapted: {', '.join(dict.fromkeys(kind for entry in HOSTS.values() for kind in entry.types))}"
        )
    if entry.remote and not loading.trust_remote_code:
        raise OptionError(
            f"model {checkpoint.name!r} is run by code that its authors publish beside it and that is no part of this "
            "project: read it, then say --trust-remote-code"
        )
    return entry
