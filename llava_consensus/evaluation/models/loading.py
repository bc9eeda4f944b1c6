"""From the name of a model to the model: where its files are (`find("owner/name")`), which host adapts it, facts
known without its weights (`check`), and how it is loaded (`load("owner/name", Loading(dtype="bfloat16", bits=4))`).
How a kind of model is checked, loaded and asked is a file beside this one (KINDS).

A model of the hub is its snapshot in huggingface_hub's cache, pinned by commit.
"""

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
from transformers import PreTrainedModel, dynamic_module_utils

from llava_consensus.errors import ConsensusError, DataError, OptionError, listed, plural, unknown_name
from llava_consensus.evaluation.files import read_json
from llava_consensus.evaluation.models.weights import MEND, reason
from llava_consensus.hosts import HOSTS, HostEntry, adapting, chosen, keep_freed_memory, known_hosts, tower_named
from llava_consensus.hosts.environment import load_pretrained
from llava_consensus.methods import truth

if TYPE_CHECKING:
    from llava_consensus.evaluation.models.base import Runner
    from llava_consensus.reduction.method import Method

DTYPES = ("auto", "float32", "float16", "bfloat16")
DEVICE_MAPS = (None, "auto", "balanced", "balanced_low_0", "sequential")
ATTENTIONS = ("auto", "sdpa", "flash_attention_2", "eager")
CLIPS = "clips"  # marks in a run that a video was one clip, under one budget
# Modules of the kinds of models that our hosts adapt. Each has
#     check(folder, conversation, videos, options)   entries of a run's description, without weights
#     load(folder, loading, view, options)           the `Runner`
# with the folder of the checkpoint, the `Loading` with nothing left open, the family's view as `module:class`, and all
# options of the host.
KINDS = {
    "llava": "llava_consensus.evaluation.models.llava",
    "hf": "llava_consensus.evaluation.models.hf",
    "remote": "llava_consensus.evaluation.models.remote",
    "internvl-chat": "llava_consensus.evaluation.models.remote",
}
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
SUFFIXES = {".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py"}
FETCH = "llava-consensus data mini puts the embedded model there"
OWN = "checkpoints"  # a name in this folder is never taken for one of the hub
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "non_lora_trainables.bin")
WEIGHTS = ("*.safetensors", "*.bin")  # only the first format that a model has is downloaded, and read
# Unexpected on purpose: the text side of a CLIP checkpoint whose vision side is the tower, a tower that LLaVA reads
# from a separate folder, and buffers that older versions of transformers stored.
UNREAD = re.compile(
    r"(^|\.)(text_model|text_projection|visual_projection|vision_tower)\.|(^|\.)logit_scale$"
    r"|rotary_emb\.inv_freq$|position_ids$|(^|\.)masked_bias$"
)
_LOADING = threading.Lock()  # `from_pretrained` is replaced for the whole process


@dataclass(frozen=True)
class Loading:
    """Options of a model's loader.

    Args:
        device: `auto` (CUDA if there is a GPU) | `cpu` | `mps` | `cuda` | `cuda:N`.
        dtype: `auto` (the official loader's on CUDA, float32 on the CPU) | `float32` | `float16` | `bfloat16`.
        device_map: how accelerate spreads the model over all devices, `auto` | `balanced` | `balanced_low_0` |
            `sequential`; None is one device.
        bits: of each weight of a model that bitsandbytes quantises while it loads, 4 | 8; None is not quantised.
        attention: kernel, `auto` (the model's own choice) | `sdpa` | `flash_attention_2` | `eager`.
        revision: branch, tag or commit of a model of the hub; None is its main branch.
        trust_remote_code: whether code that a checkpoint carries may run.
    Raises:
        OptionError: for a value outside these, or a device beside a device map.
    """

    device: str = "auto"
    dtype: str = "auto"
    device_map: str | None = None
    bits: int | None = None
    attention: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "trust_remote_code", truth("trust_remote_code", self.trust_remote_code))
        if not DEVICE.fullmatch(str(self.device)):
            raise unknown_name("device", self.device, ("auto", "cpu", "cuda", "mps"))
        choices = {"dtype": DTYPES, "device_map": DEVICE_MAPS, "bits": (None, 4, 8), "attention": ATTENTIONS}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise unknown_name(name.replace("_", " "), getattr(self, name), [str(one) for one in known if one])
        if self.device_map is not None and self.device != "auto":
            raise OptionError(
                f"device={self.device!r} and device_map={self.device_map!r}: give one, a map takes all devices"
            )

    def check_method(self, method: "Method") -> None:
        """Raises OptionError for a kernel that a method does not work with."""
        if method.place.name == "DECODER" and self.attention == "flash_attention_2":
            raise OptionError(
                f"attention={self.attention!r}: {type(method).__name__} cuts between decoder layers, which needs masks "
                "that this kernel does not take. Take sdpa"
            )

    def torch_dtype(self) -> torch.dtype | str:
        """Type of the weights; `auto` if the checkpoint or the loader decides. Half precision is slow on the CPU."""
        if self.dtype != "auto":
            return getattr(torch, self.dtype)
        return torch.float32 if self.device == "cpu" and self.bits is None else "auto"

    def cast(self, model: PreTrainedModel) -> None:
        """Casts the weights of a loaded model, for loaders without a dtype option; quantised ones stay."""
        dtype = self.torch_dtype()
        if self.bits is None and dtype != "auto":
            model.to(dtype)

    def from_pretrained_kwargs(self) -> dict[str, Any]:
        """Kwargs of `from_pretrained` of transformers, apart from the type of the weights."""
        kwargs: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        if self.device_map is not None:
            kwargs["device_map"] = self.device_map
        if self.attention != "auto":
            kwargs["attn_implementation"] = self.attention
        if self.bits is not None:
            from transformers import BitsAndBytesConfig

            four_bits = {  # as in QLoRA; 8 bits as in LLM.int8
                "load_in_4bit": True,
                "bnb_4bit_compute_dtype": torch.float16 if self.dtype == "auto" else getattr(torch, self.dtype),
                "bnb_4bit_use_double_quant": True,
                "bnb_4bit_quant_type": "nf4",
            }
            kwargs["quantization_config"] = BitsAndBytesConfig(
                **(four_bits if self.bits == 4 else {"load_in_8bit": True})
            )
            kwargs.setdefault("device_map", {"": self.device})
        return kwargs

    def resolved(self) -> "Loading":
        """A copy with the device of this machine in place of `auto`. OptionError for a CUDA device that is absent."""
        if self.device in ("cpu", "mps"):
            return self
        devices = torch.cuda.device_count()
        if self.device == "auto":
            return self if self.device_map else replace(self, device="cuda" if devices else "cpu")
        if int(self.device[5:] or 0) >= devices:
            raise OptionError(f"device={self.device!r}: here are {plural(devices, 'CUDA device')}. Take cpu or auto")
        return self


def load(
    model: str | PathLike[str], loading: Loading | None = None, host_options: Mapping[str, str] | None = None
) -> "Runner":
    """A model of any kind that a host adapts, with its tokenizer and processor.

    Args:
        model: local folder or `owner/name`.
        loading: options of the loader.
        host_options: see `HostEntry`; the default for each that is left out.
    """
    model = fspath(model)
    loading = pinned(model, loading or Loading())
    checkpoint = find(model, loading.revision)
    entry = _entry(checkpoint, loading)
    options = chosen(entry, model, host_options)
    checkpoint.files()
    keep_freed_memory()
    # a loader that leaves open whether a checkpoint's code may run gets a refusal, not a question on standard input
    with patch.object(dynamic_module_utils, "TIME_OUT_REMOTE_CODE", 0):
        runner: Runner = _of_kind(entry, "load")(str(checkpoint.folder), loading, entry.view, options)
    return runner


def pinned(model: str, loading: Loading) -> Loading:
    """The loading options with nothing left open: the device of this machine, and the commit of a model of the hub."""
    return replace(loading.resolved(), revision=find(model, loading.revision).commit)


def check(
    model: str,
    conversation: str | None = None,
    loading: Loading | None = None,
    *,
    videos: bool = False,
    host_options: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Checks a model without its weights. Returns entries of a run's description: the host's
    defaults filled in, under `host_options` those that are not the default, and under `videos` whether videos are
    passed as clips.
    """
    loading = loading or Loading()
    checkpoint = find(model, loading.revision)
    entry = _entry(checkpoint, loading)
    options = chosen(entry, model, host_options)
    changed = {name: value for name, value in options.items() if value != entry.defaults[name]}
    description: dict[str, Any] = _of_kind(entry, "check")(str(checkpoint.folder), conversation, videos, options)
    clips = {"videos": CLIPS} if videos and entry.clips else {}
    return {**description, **clips, **({"host_options": changed} if changed else {})}


def name_of(model: str, loading: Loading | None = None) -> str:
    """The name of the host that adapts a model. ConsensusError if there is none."""
    loading = loading or Loading()
    entry = _entry(find(model, loading.revision), loading)
    return next(name for name, known in known_hosts().items() if known is entry)


def _entry(checkpoint: "Checkpoint", loading: Loading) -> HostEntry:
    name, file = checkpoint.name, checkpoint.folder / "config.json"
    config = read_json(file, MEND, dict)
    architectures, kind = config.get("architectures") or [], config.get("model_type")
    if not isinstance(architectures, list) or not (architectures or kind):
        raise DataError(f"{file}: neither architectures nor model_type says what it is. {MEND}")
    entry = adapting(architectures, kind, tower_named(config))
    if entry is None:
        raise OptionError(
            f"model {name!r} is a {(architectures or [kind])[0]} (model_type {kind!r}), which no host "
            f"adapts. Adapted: {', '.join(dict.fromkeys(kind for entry in HOSTS.values() for kind in entry.types))}"
        )
    if entry.remote and not loading.trust_remote_code:
        raise OptionError(f"model {name!r} runs code of its authors: read it, then say --trust-remote-code")
    if entry.kind == "llava" and (checkpoint.folder / "adapter_config.json").is_file():
        raise OptionError(f"model {name!r} is a LoRA checkpoint. Merge it: llava-consensus model merge {name} BASE OUT")
    return entry


def _of_kind(entry: HostEntry, name: str) -> Callable[..., Any]:
    """`check` or `load` of the kind of model that a host adapts; another package names its own module."""
    function: Callable[..., Any] = getattr(import_module(KINDS.get(entry.kind, entry.kind)), name)
    return function


class Checkpoint(NamedTuple):
    name: str  # as the user named it
    folder: Path
    commit: str | None = None  # of a model of the hub

    def files(self) -> list[Path]:
        """Files that can change answers, downloaded if missing; a vision tower in a folder below included. DataError
        for a model of the hub without weights.
        """
        if self.commit is None:
            paths = (*self.folder.glob("[!.]*"), *self.folder.glob("[!.]*/[!.]*"))
            return sorted(path for path in paths if path.suffix in SUFFIXES)
        from huggingface_hub import snapshot_download

        for pattern in WEIGHTS:
            wanted = [*SMALL, pattern]
            # folders below a model of the hub hold other formats
            _ask_hub(snapshot_download, self.name, self.commit, allow_patterns=wanted, ignore_patterns=["*/*"])
            if any(self.folder.glob(pattern)):
                return sorted({path for kind in wanted for path in self.folder.glob(kind)})
        raise DataError(f"model {self.name!r}: {self.folder} lacks weight files. Download it again")


def find(model: str, revision: str | None = None) -> Checkpoint:
    """A model's folder with its configuration; of a model of the hub no weights are downloaded yet."""
    check_checkpoint(model)
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise OptionError(f"revision={revision!r}: {model} is a folder, and only models of the hub have revisions")
        return Checkpoint(model, folder)
    folder = _snapshot(model, revision)
    return Checkpoint(model, folder, folder.name)


@cache
def _snapshot(model: str, revision: str | None) -> Path:
    """The folder of a model of the hub, which is asked once."""
    from huggingface_hub import hf_hub_download

    return Path(_ask_hub(hf_hub_download, model, revision, filename="config.json")).parent


def check_checkpoint(model: str) -> None:
    """Raises DataError for a local folder that is no checkpoint; a name of the form owner/name is left to the hub."""
    folder = Path(model).expanduser()
    local = model.startswith((".", "/", "~", f"{OWN}/")) or Path(folder.parts[0] if folder.parts else ".").is_dir()
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return
        problem, hint = "the folder has no config.json, so it is no checkpoint.", ""
    elif folder.exists() or local or not HUB_NAME.fullmatch(model):
        problem, hint = "no such folder.", " A model of the hub is named owner/name"
    else:
        return
    here = sorted(str(path.parent) for path in Path(OWN).glob("*/config.json"))
    instead = f"Here are: {', '.join(here)}." if here else f"There are none in {OWN}/ either: {FETCH}."
    raise DataError(f"model {model!r}: {problem} {instead}{hint}")


def _ask_hub(function: Callable[..., str], model: str, revision: str | None, **arguments: Any) -> str:
    """The path that a function of huggingface_hub returns. DataError with the library's own message."""
    from huggingface_hub import constants, errors

    away = not constants.HF_HUB_OFFLINE and not _answers(constants.ENDPOINT)
    try:
        return str(function(model, revision=revision, **arguments, local_files_only=away))
    except (errors.EntryNotFoundError, OSError) as error:
        problem = f"{constants.ENDPOINT} cannot be reached, and there is no copy of it" if away else error
        raise DataError(
            f"model {model!r}: {' '.join(str(problem).split())} (cache: {constants.HF_HUB_CACHE}). A gated or private "
            "model needs: hf auth login. Without the hub, give --model the folder of a checkpoint"
        ) from None


@cache
def _answers(hub: str) -> bool:
    """False if the hub cannot be reached, which huggingface_hub would try for half a minute."""
    import requests

    try:
        requests.head(hub, timeout=5)
    except requests.RequestException:
        return False
    return True


@contextmanager
def loading_errors(path: str, remedy: str = "") -> Iterator[None]:
    """DataError in one line for any error of foreign code in the block, which a damaged checkpoint breaks anyhow."""
    try:
        yield
    except ConsensusError:
        raise
    except Exception as error:
        raise DataError(f"model={path!r} cannot be loaded: {reason(error)}{remedy}") from error


@contextmanager
def incomplete_refused() -> Iterator[None]:
    """Checks the weights of every model that foreign code loads in the block; one thread at a time."""
    with _LOADING:
        dtype = torch.get_default_dtype()  # transformers 4 does not set it back when a loading fails
        official = PreTrainedModel.__dict__["from_pretrained"]

        def checked(cls: type, path: Any, *args: Any, **kwargs: Any) -> Any:
            wanted = kwargs.pop("output_loading_info", False)
            kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # else they are counted, not named
            model, info = official.__func__(cls, path, *args, **kwargs)
            refuse_incomplete(str(path), cls, info)
            return (model, info) if wanted else model

        try:
            with patch.object(PreTrainedModel, "from_pretrained", classmethod(checked)):
                yield
        finally:
            torch.set_default_dtype(dtype)


def from_auto(auto: Any, path: str, loading: Loading) -> Any:
    """The model that an Auto class of transformers makes of a checkpoint, with its weights checked."""
    kwargs = {"torch_dtype": loading.torch_dtype(), "output_loading_info": True, **loading.from_pretrained_kwargs()}
    model, info = load_pretrained(auto, path, **kwargs)
    refuse_incomplete(path, type(model), info)
    if loading.device_map is None and loading.bits is None:  # else accelerate has placed it
        model.to(loading.device)
    return model.eval()


def refuse_incomplete(path: str, model: type, info: Mapping[str, Any]) -> None:
    """Raises DataError if a tensor is missing, of another shape, or left over; `info` is from `output_loading_info`."""
    kinds = ("missing_keys", "mismatched_keys", "unexpected_keys")  # of a misshapen tensor the shapes come along
    missing, mismatched, unexpected = (
        sorted(key if isinstance(key, str) else str(key[0]) for key in info.get(kind, ())) for kind in kinds
    )
    problems = {
        "missing (they would be random)": [name for name in missing if name not in mismatched],
        "of another shape than config.json says": mismatched,
        "left over, the model has no place for them": [name for name in unexpected if not UNREAD.search(name)],
    }
    lines = [f"{plural(len(names), 'tensor')} {why}: {listed(names)}" for why, names in problems.items() if names]
    if lines:
        raise DataError(
            f"model={path!r}: the weights do not fit config.json. {model.__name__}: {'; '.join(lines)}. "
            "Fetch the whole checkpoint again, or mend its config.json"
        )


def clip_costs(name: str) -> dict[str, Any]:
    """Cost figures of CLIP's text tower, from the folder of a whole CLIP model; empty for other names."""
    file = Path(name, "config.json")
    text = read_json(file).get("text_config") if file.is_file() else None
    if not text:
        return {}
    width, inner, length = (text[name] for name in ("hidden_size", "intermediate_size", "max_position_embeddings"))
    weights = text["num_hidden_layers"] * (4 * width**2 + 2 * width * inner)
    return {"joint": text["projection_dim"], "text_tower": 2.0 * length * weights}
