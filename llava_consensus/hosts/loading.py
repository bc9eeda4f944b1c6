"""How a model is loaded: `Loading(dtype="bfloat16", bits=4)`. Everything here may change an answer."""

import re
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from llava_consensus.errors import OptionError, missing_extra, unknown_name
from llava_consensus.methods.options import truth

if TYPE_CHECKING:
    from llava_consensus.reduction.method import Method

DTYPES = ("auto", "float32", "float16", "bfloat16")
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
BITS = (4, 8)
ATTENTIONS = ("auto", "sdpa", "flash_attention_2", "eager")
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
        if not DEVICE.fullmatch(self.device):
            raise unknown_name("device", self.device, ("auto", "cpu", "cuda", "mps"))
        if self.dtype not in DTYPES:
            raise unknown_name("dtype", self.dtype, DTYPES)
        if self.device_map is not None and self.device_map not in DEVICE_MAPS:
            raise unknown_name("device map", self.device_map, DEVICE_MAPS)
        if self.device_map is not None and self.device != "auto":
            raise OptionError(
                f"device={self.device!r} and device_map={self.device_map!r}: a map takes all devices. Leave one out"
            )
        if self.bits is not None and self.bits not in BITS:
            raise OptionError(f"bits={self.bits!r} must be 4 or 8, or left out for weights that are not quantised")
        if self.attention not in ATTENTIONS:
            raise unknown_name("attention", self.attention, ATTENTIONS)
        if self.revision is not None and not self.revision.strip():
            raise OptionError(f"revision={self.revision!r} must name a branch, a tag or a commit of the hub")

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

    def numbers(self) -> Any:
        """The type of the weights as torch names it; `auto` where the checkpoint or the loader decides: on the CPU that
        would be slow, so there they are float32 unless they are quantised.
        """
        import torch

        if self.dtype != "auto":
            return getattr(torch, self.dtype)
        return torch.float32 if self.device == "cpu" and self.bits is None else "auto"

    def cast(self, model: Any) -> None:
        """Changes the type of a loaded model's weights, for loaders that cannot be told; quantised ones stay."""
        numbers = self.numbers()
        if self.bits is None and numbers != "auto":
            model.to(numbers)

    def told(self) -> dict[str, Any]:
        """What `from_pretrained` of transformers is told beside the type of numbers."""
        told: dict[str, Any] = {}
        if self.device_map is not None:
            told["device_map"] = self.device_map
        if self.attention != "auto":
            told["attn_implementation"] = self.attention
        if self.trust_remote_code:
            told["trust_remote_code"] = True
        if self.bits is not None:
            told["quantization_config"] = self._quantisation()
            told.setdefault("device_map", {"": self.device})
        return told

    def _quantisation(self) -> Any:
        """How bitsandbytes quantises: 4 bits as QLoRA does, 8 bits as LLM.int8 does."""
        import torch
        from transformers import BitsAndBytesConfig

        if self.bits == 8:
            return BitsAndBytesConfig(load_in_8bit=True)
        numbers = torch.float16 if self.dtype == "auto" else getattr(torch, self.dtype)
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype=numbers,
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
