"""How a model is loaded, `load("owner/name", Loading(dtype="bfloat16", bits=4))`, and what can be known of it before
(`check`; no torch is imported for it).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_consensus.entry_points import load_place
from llava_consensus.errors import (
    ConsensusError,
    DataError,
    MissingDependency,
    OptionError,
    choose,
    missing_extra,
    unknown_name,
)
from llava_consensus.evaluation.files import read_json
from llava_consensus.evaluation.models import llava_loading
from llava_consensus.evaluation.models.checkpoint import Checkpoint, find
from llava_consensus.hosts import (
    HOSTS,
    HostEntry,
    adapting,
    check_version,
    chosen,
    keep_freed_memory,
    known_hosts,
    tower_named,
)
from llava_consensus.hosts.hf import TEXT_SIDE
from llava_consensus.methods import truth

if TYPE_CHECKING:
    import torch
    from transformers import BitsAndBytesConfig, PreTrainedModel, ProcessorMixin

    from llava_consensus.evaluation.models.base import Host
    from llava_consensus.reduction.method import Method

DTYPES = ("auto", "float32", "float16", "bfloat16")
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
BITS = (4, 8)
ATTENTIONS = ("auto", "sdpa", "flash_attention_2", "eager")
CLIPS = "clips"  # how a run says that a video was shown as one, under one budget
CHAT_TEMPLATE = "chat template of the model"
OWN_PROMPTS = "prompts of the model's own code"
COGVLM_TEMPLATES = ("base", "chat", "chat_old", "vqa")  # of CogVLM's `build_conversation_input_ids`
ENGINES = {"vllm": "llava_consensus.evaluation.models.vllm"}  # modules that ask models by them, with `check` and `load`
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")


@dataclass(frozen=True)
class Loading:
    """What a model's loader is told.

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
            return
        choose("engine", self.engine, tuple(ENGINES))
        if replace(self, engine=None) != Loading(self.device, self.dtype, revision=self.revision):
            raise OptionError(
                f"engine={self.engine!r} loads the model itself: leave out device maps, bits, attention kernels and "
                "code of checkpoints"
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

    def torch_dtype(self) -> "torch.dtype | str":
        """The type of the weights as torch names it; `auto` where the checkpoint or the loader decides. On the CPU that
        would be slow, so there they are float32 unless they are quantised.
        """
        import torch

        if self.dtype != "auto":
            return getattr(torch, self.dtype)
        return torch.float32 if self.device == "cpu" and self.bits is None else "auto"

    def cast(self, model: "PreTrainedModel") -> None:
        """Changes the type of a loaded model's weights, for loaders that cannot be told; quantised ones stay."""
        dtype = self.torch_dtype()
        if self.bits is None and dtype != "auto":
            model.to(dtype)

    def told(self) -> dict[str, Any]:
        """What `from_pretrained` of transformers is told beside the type of the weights."""
        told: dict[str, Any] = {}
        if self.device_map is not None:
            told["device_map"] = self.device_map
        if self.attention != "auto":
            told["attn_implementation"] = self.attention
        told["trust_remote_code"] = self.trust_remote_code  # where nothing is said, transformers asks standard input
        if self.bits is not None:
            told["quantization_config"] = self._quantisation()
            told.setdefault("device_map", {"": self.device})
        return told

    def _quantisation(self) -> "BitsAndBytesConfig":
        """How bitsandbytes quantises: 4 bits as QLoRA does, 8 bits as LLM.int8 does."""
        import torch
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
        """The same with the device of this machine in place of `auto`.

        Raises:
            OptionError: for a CUDA device that is not there.
        """
        if self.device in ("cpu", "mps"):
            return self
        import torch  # only now: it takes a second

        devices = torch.cuda.device_count()
        if self.device == "auto":
            return self if self.device_map else replace(self, device="cuda" if devices else "cpu")
        if int(self.device[5:] or 0) >= devices:
            raise OptionError(f"device={self.device!r}: this machine has {devices} CUDA devices. Take cpu or auto")
        return self


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
    options = chosen(entry, model, host_options)
    checkpoint.files()
    keep_freed_memory()
    with _nobody_is_asked():
        host: Host = _of_kind(entry, loading, "load")(str(checkpoint.folder), loading, entry.view, options)
    return host


@contextmanager
def _nobody_is_asked() -> Iterator[None]:
    """While a model loads, transformers does not ask standard input whether a checkpoint's code may run, which loaders
    of other packages leave to it: it refuses.
    """
    from transformers import dynamic_module_utils

    before = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = before


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
    options = chosen(entry, model, host_options)
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


def _of_kind(entry: HostEntry, loading: Loading, name: str) -> Callable[..., Any]:
    """`check` or `load` of an engine, or of the kind of model that a host adapts; of a kind that is not ours its own
    module's.
    """
    if loading.engine is None and entry.kind in KINDS:
        return KINDS[entry.kind][name]
    return getattr(import_module(ENGINES.get(loading.engine or "", entry.kind)), name)


def check_hf(model: str, conversation: str | None, videos: bool, options: Mapping[str, str]) -> dict[str, Any]:
    """Of a checkpoint of transformers.

    Raises:
        OptionError: for a version of transformers that is not adapted, or a named template: prompts are put into the
            model's own.
    """
    check_version(version("transformers"))
    if conversation not in (None, CHAT_TEMPLATE):
        raise OptionError(
            f"conversation={conversation!r}: {model} is a model of transformers, whose prompts are put into its own "
            "chat template. Leave --conversation out"
        )
    return {"conversation": CHAT_TEMPLATE}


def _load_hf(path: str, loading: Loading, view: str, options: Mapping[str, str]) -> "Host":
    """A checkpoint of transformers with its processor.

    Args:
        path: folder of the checkpoint.
        loading: how, with nothing left open.
        view: the family's view, as `module:class`.
        options: all options of the host.
    Raises:
        DataError: for a checkpoint that cannot be loaded, or whose weights are not those of its config.json.
        MissingDependency: for a processor that needs a package which is not installed.
        OptionError: for a version of transformers or a processor that is not adapted.
    """
    import transformers

    from llava_consensus.evaluation.models.checkpoint import refuse_incomplete, refuse_not_finite
    from llava_consensus.evaluation.models.hf import HfHost

    check_version(transformers.__version__)
    code = {"trust_remote_code": loading.trust_remote_code}
    try:
        processor = processor_of(path, code)
        config = transformers.AutoConfig.from_pretrained(path, **code)
        cls: Any = getattr(transformers, (config.architectures or ["AutoModelForImageTextToText"])[0])
        model, info = cls.from_pretrained(path, dtype=loading.torch_dtype(), output_loading_info=True, **loading.told())
    except MissingDependency:
        raise
    except Exception as error:  # a damaged checkpoint breaks foreign code in any way
        raise DataError(f"model={path!r} cannot be loaded: {type(error).__name__}: {error}") from error
    refuse_incomplete(path, cls, info)
    refuse_not_finite(path, model)
    text_side = next(Path(path).glob(TEXT_SIDE), None)
    if text_side is not None:  # the CLIP model that `convert` has put beside the weights
        model.config.vision_config._name_or_path = str(text_side.parent)
    if loading.device_map is None and loading.bits is None:  # else it stands where it should
        model.to(loading.device)
    try:
        host = HfHost(load_place(view)(model.eval(), options), processor)
        host.check_prompts()
    except ConsensusError:
        raise
    except Exception as error:  # a damaged processor breaks foreign code in any way
        raise DataError(
            f"model={path!r}: its processor cannot read a picture ({type(error).__name__}: {error}). Fetch its "
            "preprocessor_config.json, processor_config.json and tokenizer again"
        ) from error
    return host


def processor_of(path: str, code: dict[str, Any]) -> "ProcessorMixin":
    """The processor of a checkpoint; those of models that know videos need torchvision, that of SmolVLM num2words."""
    import transformers

    try:
        return transformers.AutoProcessor.from_pretrained(path, **code)
    except ImportError as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise missing_extra(f"model={path!r} cannot be loaded: {reason}", "processors") from error


def _check_remote(model: str, conversation: str | None, videos: bool, options: Mapping[str, str]) -> dict[str, Any]:
    """Of a checkpoint with code of its own, before any of that code runs.

    Raises:
        OptionError: for a template the model does not have.
    """
    if conversation in (None, OWN_PROMPTS):
        return {"conversation": OWN_PROMPTS}
    file = Path(model).expanduser() / "config.json"
    config = read_json(file, "Fetch the checkpoint again", dict) if file.is_file() else {}
    if "QWenLMHeadModel" in (config.get("architectures") or []):
        raise OptionError(f"conversation={conversation!r}: Qwen-VL has one prompt of its own. Leave --conversation out")
    if conversation not in COGVLM_TEMPLATES:
        raise unknown_name("conversation", str(conversation), COGVLM_TEMPLATES)
    return {"conversation": conversation}


def _load_remote(path: str, loading: Loading, view: str, options: Mapping[str, str]) -> "Host":
    """A checkpoint that carries its own code, which the user trusts (checked before), with its tokenizer.

    Args:
        path: folder of the checkpoint.
        loading: how, its device resolved.
        view: the family's view, as `module:class`.
        options: of the host; it has none.
    Raises:
        OptionError: for an attention kernel, which such code chooses itself.
        DataError: for a checkpoint that cannot be loaded, or whose weights are not those of its config.json.
    """
    if loading.attention != "auto":
        raise OptionError(f"attention={loading.attention!r}: the code of {path} has a kernel of its own. Leave it out")
    import transformers

    from llava_consensus.evaluation.models.checkpoint import refuse_incomplete, refuse_not_finite
    from llava_consensus.evaluation.models.remote import host_of

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=loading.trust_remote_code)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path, output_loading_info=True, torch_dtype=loading.torch_dtype(), **loading.told()
        )
    except Exception as error:  # foreign code breaks in any way
        raise DataError(
            f"model={path!r} cannot be loaded: {type(error).__name__}: {error}. Its code is of 2023, written for "
            "transformers 4.31 to 4.37 (make setup-pinned); CogVLM's checkpoint needs the tokenizer files of "
            "lmsys/vicuna-7b-v1.5 beside it"
        ) from error
    refuse_incomplete(path, type(model), info)
    if loading.device_map is None and loading.bits is None:
        model.to(loading.device)
    refuse_not_finite(path, model)
    return host_of(load_place(view)(model.eval(), options), tokenizer)


def _check_internvl_chat(
    model: str, conversation: str | None, videos: bool, options: Mapping[str, str]
) -> dict[str, Any]:
    """Of an InternVL-Chat checkpoint; the vision tower is its package's to find. OptionError for a conversation
    template that the `llava` package does not have.
    """
    return {"conversation": llava_loading.chosen_conversation(conversation, llava_loading.CONVERSATION)}


def _load_internvl_chat(path: str, loading: Loading, view: str, options: Mapping[str, str]) -> "Host":
    """An InternVL-Chat checkpoint with its tokenizer and image processor, by the loader of its authors' package.

    Args:
        path: folder, whose name must contain `llava` or `intern` for the official loader.
        loading: how, its device resolved.
        view, options: of the host, which has no options.
    Raises:
        OptionError: for what that package's loader cannot be told.
        MissingDependency: where another `llava` package is installed than InternVL's.
        DataError: for a checkpoint that cannot be loaded, or whose weights are not those of its config.json.
    """
    try:
        from llava.model.multimodal_encoder import clip_encoder

        known = hasattr(clip_encoder, "is_intern_vit_6b_model")
    except ImportError:
        known = False
    if not known:
        raise MissingDependency(
            "InternVL-Chat is run by a `llava` package of its own, which is not installed here. In an environment of "
            "its own, type: pip install 'llava @ git+https://github.com/OpenGVLab/InternVL#subdirectory="
            "internvl_chat_llava'"
        )
    if loading.attention != "auto" or loading.device_map not in (None, "auto"):
        raise OptionError(
            f"{path}: the loader of InternVL's `llava` package takes no attention kernel, and no device map but auto. "
            "Leave them out"
        )
    from llava.mm_utils import get_model_name_from_path
    from llava.model.builder import load_pretrained_model

    from llava_consensus.evaluation.models.checkpoint import incomplete_refused, refuse_not_finite
    from llava_consensus.evaluation.models.remote import InternVLChatHost

    bits: dict[str, Any] = {} if loading.bits is None else {f"load_{loading.bits}bit": True}
    with incomplete_refused():
        model, tokenizer, processor = llava_loading.quietly_loaded(
            load_pretrained_model, path, get_model_name_from_path(path), device=loading.device, **bits
        )
    loading.cast(model)
    refuse_not_finite(path, model)
    return InternVLChatHost(model.eval(), tokenizer, processor)


KINDS: dict[str, dict[str, Callable[..., Any]]] = {
    "llava": {"check": llava_loading.check, "load": llava_loading.load},
    "hf": {"check": check_hf, "load": _load_hf},
    "remote": {"check": _check_remote, "load": _load_remote},
    "internvl-chat": {"check": _check_internvl_chat, "load": _load_internvl_chat},
}
