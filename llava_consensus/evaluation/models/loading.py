"""From the name of a model to the model: where its files are (`find("owner/name")`), which host adapts it, what can be
known of it without weights (`check`), how it is loaded (`load("owner/name", Loading(dtype="bfloat16", bits=4))`), and
whether its weights are whole. How a kind of model is checked, loaded and asked is a file beside this one (KINDS).

A model of the hub is its snapshot in huggingface_hub's cache, pinned by commit. The hub is asked once whether it
answers, because its own library repeats a request for minutes; where it does not, what the cache holds is used.
"""

import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch  # names of a module are others for a while, and come back

import torch
from transformers import PreTrainedModel, dynamic_module_utils

from llava_consensus.errors import DataError, OptionError, listed, missing_extra, plural, unknown_name
from llava_consensus.evaluation.files import read_json
from llava_consensus.evaluation.models import merge
from llava_consensus.hosts import HOSTS, HostEntry, adapting, chosen, known_hosts, tower_named
from llava_consensus.hosts.environment import keep_freed_memory
from llava_consensus.hosts.pretrained import load_pretrained
from llava_consensus.methods import truth
from llava_consensus.reduction.options import choose

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

    from llava_consensus.evaluation.models.base import Runner
    from llava_consensus.reduction.method import Method

DTYPES = ("auto", "float32", "float16", "bfloat16")
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
BITS = (4, 8)
ATTENTIONS = ("auto", "sdpa", "flash_attention_2", "eager")
CLIPS = "clips"  # how a run says that a video was shown as one, under one budget
# Modules of the kinds of models our hosts are of, and of engines that load a model themselves. Each has
#     check(folder, conversation, videos, options)   what a run's description says, defaults filled in; without weights
#     load(folder, loading, view, options)           the `Runner`
# with the folder of the checkpoint, the `Loading` with nothing left open, the family's view as `module:class`, and all
# options of the host.
KINDS = {
    "llava": "llava_consensus.evaluation.models.llava",
    "hf": "llava_consensus.evaluation.models.hf",
    "remote": "llava_consensus.evaluation.models.remote",
    "internvl-chat": "llava_consensus.evaluation.models.internvl_chat",
}
ENGINES = {"vllm": "llava_consensus.evaluation.models.vllm"}
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
SUFFIXES = {".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py"}
FETCH = "llava-consensus data mini puts the embedded model there"
OWN = "checkpoints"  # the folder in which a checkpoint is never taken for a name of the hub
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PATIENCE = 5.0  # seconds until a hub that does not answer is given up
SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", merge.WHOLE)
WEIGHTS = ("*.safetensors", "*.bin")  # only the first format that a model has is downloaded, and read
# Left over on purpose: the text side of a CLIP checkpoint of which the tower is one side, a tower that LLaVA reads from
# a folder of its own, and buffers that older versions of transformers stored.
UNREAD = re.compile(
    r"(^|\.)(text_model|text_projection|visual_projection|vision_tower)\.|(^|\.)logit_scale$"
    r"|rotary_emb\.inv_freq$|position_ids$|(^|\.)masked_bias$"
)
_LOADING = threading.Lock()  # `from_pretrained` is replaced for the whole process


@dataclass(frozen=True)
class Loading:
    """Options of a model's loader.

    Args:
        device: `auto` (CUDA where there is any) | `cpu` | `mps` | `cuda` | `cuda:N`.
        dtype: `auto` (the official loader's on CUDA, float32 on the CPU) | `float32` | `float16` | `bfloat16`.
        device_map: how accelerate spreads the model over all devices, `auto` | `balanced` | `balanced_low_0` |
            `sequential`; None is one device.
        bits: of each weight of a model that is quantised while it loads, 4 | 8; None is not quantised.
        attention: kernel, `auto` (the model's own choice) | `sdpa` | `flash_attention_2` | `eager`. Methods read
            queries and keys before the kernel runs, so that any kernel does; only methods between decoder layers, whose
            shortened sequences need masks, are for sdpa and eager.
        revision: branch, tag or commit of a model of the hub; None is its main branch.
        trust_remote_code: whether code that a checkpoint carries may run.
        engine: `vllm`, which loads the model itself; None is torch.
        vllm: arguments of that engine in one text, as its command takes them.
        model_base: folder or hub name of the model that a LoRA checkpoint adapts; None is a checkpoint that is whole.
    Raises:
        OptionError: for a value outside these, a device beside a device map, or what an engine is not told.
    """

    device: str = "auto"
    dtype: str = "auto"
    device_map: str | None = None
    bits: int | None = None
    attention: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    engine: str | None = None
    vllm: str | None = None
    model_base: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "trust_remote_code", truth("trust_remote_code", self.trust_remote_code))
        for name in ("device", "dtype", "device_map", "attention", "revision"):
            value, open_to_none = getattr(self, name), name in ("device_map", "revision")
            if not isinstance(value, str) and not (value is None and open_to_none):
                raise OptionError(f"{name}={value!r} must be a text{' or left out' if open_to_none else ''}")
        if not DEVICE.fullmatch(self.device):
            raise unknown_name("device", self.device, ("auto", "cpu", "cuda", "mps"))
        for what, value, known in (
            ("dtype", self.dtype, DTYPES),
            ("device map", self.device_map, (None, *DEVICE_MAPS)),
            ("attention", self.attention, ATTENTIONS),
        ):
            if value not in known:
                raise unknown_name(what, str(value), [name for name in known if name])
        if self.device_map is not None and self.device != "auto":
            raise OptionError(
                f"device={self.device!r} and device_map={self.device_map!r}: a map takes all devices. Leave one out"
            )
        if self.bits is not None and self.bits not in BITS:
            raise OptionError(f"bits={self.bits!r} must be 4 or 8, or left out for weights that are not quantised")
        self._check_engine()
        if self.revision is not None and not self.revision.strip():
            raise OptionError(f"revision={self.revision!r} must name a branch, a tag or a commit of the hub")

    def _check_engine(self) -> None:
        if self.engine is None:
            if self.vllm is not None:
                raise OptionError(f"vllm={self.vllm!r} is for engine='vllm'. Leave it out, or give the engine")
            return
        choose("engine", self.engine, tuple(ENGINES))
        if replace(self, engine=None, vllm=None) != Loading(self.device, self.dtype, revision=self.revision):
            raise OptionError(
                f"engine={self.engine!r} loads the model itself: leave out device maps, bits, attention kernels, bases "
                "and code of checkpoints"
            )

    def check_packages(self) -> None:
        """Raises MissingDependency for a package that is needed and not installed."""
        for needed, package, extra in (
            (self.device_map or self.bits, "accelerate", "quantised"),
            (self.bits, "bitsandbytes", "quantised"),
            (self.attention == "flash_attention_2", "flash_attn", "gpu"),
        ):
            if needed and find_spec(package) is None:
                raise missing_extra(package, extra)

    def check_method(self, method: "Method") -> None:
        """Raises OptionError for a kernel that a method does not work with."""
        if method.place.name == "DECODER" and self.attention == "flash_attention_2":
            raise OptionError(
                f"attention={self.attention!r}: {type(method).__name__} cuts between decoder layers, which needs masks "
                "that this kernel does not take. Take sdpa"
            )

    def torch_dtype(self) -> torch.dtype | str:
        """The type of the weights as torch names it; `auto` where the checkpoint or the loader decides. On the CPU that
        would be slow, so there they are float32 unless they are quantised.
        """
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
        kwargs: dict[str, Any] = {}
        if self.device_map is not None:
            kwargs["device_map"] = self.device_map
        if self.attention != "auto":
            kwargs["attn_implementation"] = self.attention
        kwargs["trust_remote_code"] = self.trust_remote_code  # where nothing is said, transformers asks standard input
        if self.bits is not None:
            kwargs["quantization_config"] = self._quantisation()
            kwargs.setdefault("device_map", {"": self.device})
        return kwargs

    def _quantisation(self) -> "BitsAndBytesConfig":
        """Configuration of bitsandbytes: 4 bits as in QLoRA, 8 bits as in LLM.int8."""
        from transformers import BitsAndBytesConfig

        if self.bits == 8:
            return BitsAndBytesConfig(load_in_8bit=True)
        dtype = torch.float16 if self.dtype == "auto" else getattr(torch, self.dtype)
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_quant_type="nf4",
        )

    def resolved(self) -> "Loading":
        """A copy with the device of this machine in place of `auto`.

        Raises:
            OptionError: for a CUDA device that is not there.
        """
        if self.device in ("cpu", "mps"):
            return self
        devices = torch.cuda.device_count()
        if self.device == "auto":
            return self if self.device_map else replace(self, device="cuda" if devices else "cpu")
        if int(self.device[5:] or 0) >= devices:
            raise OptionError(
                f"device={self.device!r}: this machine has {plural(devices, 'CUDA device')}. Take cpu or auto"
            )
        return self


def load(
    model: str | PathLike[str], loading: Loading | None = None, host_options: Mapping[str, str] | None = None
) -> "Runner":
    """Load a checkpoint folder or hub name with the official loader of its package.

    Args:
        model: local folder or `owner/name`.
        loading: how; None is as on any machine.
        host_options: see `HostEntry`; the default for each that is left out.
    Raises:
        ConsensusError: for a model that is not there or not of a kind any host adapts, or an option that its host does
            not have.
    """
    model = fspath(model)
    loading = pinned(model, loading or Loading())
    loading.check_packages()
    checkpoint = find(model, loading.revision)
    entry = _entry(checkpoint, loading)
    options = chosen(entry, model, host_options)
    files = checkpoint.files()
    base = _base(checkpoint, loading)
    folder = checkpoint.folder if base is None else merge.merged(checkpoint.folder, base.folder, files + base.files())
    keep_freed_memory()
    # where a loader of another package leaves it to transformers whether a checkpoint's code may run, that refuses, and
    # does not ask standard input
    with patch.object(dynamic_module_utils, "TIME_OUT_REMOTE_CODE", 0):
        runner: Runner = _of_kind(entry, loading, "load")(str(folder), loading, entry.view, options)
    return runner


def _base(checkpoint: "Checkpoint", loading: Loading) -> "Checkpoint | None":
    """The base that a LoRA checkpoint is loaded with, checked; None for a checkpoint that is whole.

    Raises:
        ConsensusError: see `merge.check`, and for a base that is not there.
    """
    base = None
    if loading.model_base is not None:
        if checkpoint.commit is not None:
            from huggingface_hub import hf_hub_download

            _ask_hub(hf_hub_download, checkpoint.name, checkpoint.commit, filename=merge.SETTINGS)
        try:
            base = find(loading.model_base)
        except DataError as error:
            raise DataError(f"the base of {checkpoint.name}: {error}") from None
    merge.check(checkpoint.name, checkpoint.folder, loading.model_base, base and base.folder)
    return base


def pinned(model: str, loading: Loading) -> Loading:
    """The loading options with nothing left open: the device of this machine, and the commit of a model of the hub.

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
    options = chosen(entry, model, host_options)
    _base(checkpoint, loading)
    changed = {name: value for name, value in options.items() if value != entry.defaults[name]}
    folder = str(checkpoint.folder)
    description: dict[str, Any] = _of_kind(entry, loading, "check")(folder, conversation, videos, options)
    clips = {"videos": CLIPS} if videos and entry.clips else {}
    return {**description, **clips, **({"host_options": changed} if changed else {})}


def name_of(model: str, loading: Loading | None = None) -> str:
    """The name of the host that adapts a model.

    Raises:
        ConsensusError: for a folder that is no checkpoint, or a class no host adapts.
    """
    loading = loading or Loading()
    entry = _entry(find(model, loading.revision), loading)
    return next(name for name, known in known_hosts().items() if known is entry)


def _entry(checkpoint: "Checkpoint", loading: Loading) -> HostEntry:
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


def _of_kind(entry: HostEntry, loading: Loading, name: str) -> Callable[..., Any]:
    """`check` or `load` of an engine, or of the kind of model that a host adapts; of a kind that is not ours its own
    module's.
    """
    module = KINDS.get(entry.kind, entry.kind) if loading.engine is None else ENGINES[loading.engine]
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


class Checkpoint(NamedTuple):
    """Location of a model's files."""

    name: str  # as the user named it
    folder: Path
    commit: str | None = None  # of a model of the hub

    def files(self) -> list[Path]:
        """Files that can change answers, downloaded if missing; a vision tower in a folder below included.

        Raises:
            DataError: for a model of the hub whose weights cannot be had, or not all of them.
        """
        if self.commit is None:
            found = (*self.folder.glob("[!.]*"), *self.folder.glob("[!.]*/[!.]*"))
            return sorted(path for path in found if path.suffix in SUFFIXES)
        from huggingface_hub import snapshot_download

        for pattern in WEIGHTS:
            wanted = [*SMALL, pattern]
            # folders below a model of the hub hold other formats
            _ask_hub(snapshot_download, self.name, self.commit, allow_patterns=wanted, ignore_patterns=["*/*"])
            indexes = self.folder.glob(f"{pattern}.index.json")
            maps = [read_json(index, "Download the model again", dict).get("weight_map", {}) for index in indexes]
            named = {name for one in maps for name in one.values()}
            if named or any(self.folder.glob(pattern)):
                if all((self.folder / name).is_file() for name in named):
                    return sorted({path for kind in wanted for path in self.folder.glob(kind)})
                break  # loaders take this format where there is anything of it
        raise DataError(
            f"model {self.name!r}: {self.folder} lacks weight files ({', '.join(WEIGHTS)}). Download the model again"
        )


def find(model: str, revision: str | None = None) -> Checkpoint:
    """A model's folder with its configuration; of a model of the hub no weights are downloaded yet.

    Args:
        model: folder, or `owner/name` of the hub.
        revision: branch, tag or commit of a model of the hub; None is its main branch.
    Raises:
        DataError: for a model or a revision that is not there, or not open to this user.
        OptionError: for a revision of a folder.
    """
    check_checkpoint(model)
    folder = Path(model).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise OptionError(f"revision={revision!r}: {model} is a folder, and only models of the hub have revisions")
        return Checkpoint(model, folder)
    from huggingface_hub import hf_hub_download

    folder = Path(_ask_hub(hf_hub_download, model, revision, filename="config.json")).parent
    return Checkpoint(model, folder, folder.name)


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

    silence = _silence(constants.ENDPOINT, constants.HF_HUB_OFFLINE)
    try:
        return str(function(model, revision=revision, **arguments, local_files_only=bool(silence)))
    except (errors.EntryNotFoundError, OSError) as error:
        reason, own = f"{silence}. " if silence else "", " ".join(str(error).split())
        raise DataError(
            f"model {model!r}: {reason}{own} (cache: {constants.HF_HUB_CACHE}). A gated or private model needs: hf "
            "auth login. Without the hub, give --model the folder of a checkpoint"
        ) from None


@cache
def _silence(endpoint: str, offline: bool) -> str:
    """Why the hub does not answer; nothing where it does. It is asked once."""
    if offline:
        return "HF_HUB_OFFLINE is set"
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=PATIENCE).close()
    except urllib.error.HTTPError:
        return ""  # it answers, if only with an error
    except (OSError, ValueError) as error:
        return f"{endpoint} does not answer ({getattr(error, 'reason', None) or type(error).__name__})"
    return ""


@contextmanager
def incomplete_refused() -> Iterator[None]:
    """Inside, every model that foreign code loads is held against its weights (`refuse_incomplete`); one thread at a
    time.
    """
    with _LOADING:
        dtype = torch.get_default_dtype()  # transformers 4 does not set it back when a loading fails
        official = PreTrainedModel.__dict__["from_pretrained"]

        def checked(cls: type, path: Any, *args: Any, **kwargs: Any) -> Any:
            wanted = kwargs.pop("output_loading_info", False)
            kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # else they are counted, not named
            try:
                model, info = official.__func__(cls, path, *args, **kwargs)
            except NotImplementedError:  # of transformers 4, which cannot place a model with a misshapen tensor
                plain = {
                    name: value for name, value in kwargs.items() if name not in ("low_cpu_mem_usage", "device_map")
                }
                model, info = official.__func__(cls, path, *args, **plain)
            refuse_incomplete(str(path), cls, info)
            return (model, info) if wanted else model

        try:
            with patch.object(PreTrainedModel, "from_pretrained", classmethod(checked)):
                yield
        finally:
            torch.set_default_dtype(dtype)


def from_auto(auto: Any, path: str, loading: Loading) -> Any:
    """The model that an Auto class of transformers makes of a checkpoint, where the loading options put it.

    Raises:
        DataError: for weights that are not those of config.json, or hold NaN or infinity.
    """
    kwargs = {"torch_dtype": loading.torch_dtype(), "output_loading_info": True, **loading.from_pretrained_kwargs()}
    model, info = load_pretrained(auto, path, **kwargs)
    refuse_incomplete(path, type(model), info)
    refuse_not_finite(path, model)
    if loading.device_map is None and loading.bits is None:  # else accelerate has placed it
        model.to(loading.device)
    return model.eval()


def refuse_incomplete(path: str, model: type, info: Mapping[str, Any]) -> None:
    """Raises DataError where a tensor is missing, of another shape, or left over although the model is of its kind.

    Args:
        path: of the checkpoint, for the message.
        model: class that was loaded.
        info: what transformers says of the loading (`output_loading_info`).
    """
    kinds = ("missing_keys", "mismatched_keys", "unexpected_keys")  # of a misshapen tensor the shapes come along
    missing, mismatched, unexpected = (
        sorted(key if isinstance(key, str) else str(key[0]) for key in info.get(kind, ())) for kind in kinds
    )
    problems = {
        "missing (they would be random)": [name for name in missing if name not in mismatched],
        "of another shape than config.json says": mismatched,
        "left over, the model has no place for them": [name for name in unexpected if not UNREAD.search(name)],
    }
    found = [
        f"{model.__name__}: {plural(len(names), 'tensor')} {problem}: {listed(names)}"
        for problem, names in problems.items()
        if names
    ]
    if found:
        raise DataError(
            f"model={path!r}: the weights do not fit config.json. {'; '.join(found)}. "
            "Fetch the whole checkpoint again, or mend its config.json"
        )


def refuse_not_finite(path: str, model: torch.nn.Module) -> None:
    """Raises DataError where a weight is NaN or infinite in the type the model is run in (quantised ones are whole
    numbers).
    """
    names = [
        name
        for name, weight in model.named_parameters()
        if weight.is_floating_point() and not bool(torch.isfinite(weight).all())
    ]
    if names:
        kinds = sorted({str(weight.dtype).removeprefix("torch.") for weight in model.parameters()})
        raise DataError(
            f"model={path!r}: NaN or infinity in {plural(len(names), 'tensor')} (as {', '.join(kinds)}): "
            f"{listed(names)}. Fetch the checkpoint again; if only --dtype float16 says so, take bfloat16 or float32"
        )
