"""A LoRA checkpoint of LLaVA and the model it was trained on, as one checkpoint: PEFT merges the adapter, and weights
that were trained whole (`non_lora_trainables.bin`: the projector) replace those of the base.

    llava-consensus model merge llava-v1.5-7b-lora vicuna-7b-v1.5 OUT

A checkpoint that is loaded with its base (`Loading.model_base`) is merged once, into ~/.cache.
"""

import fcntl
import logging
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor

from llava_consensus.errors import DataError, OptionError, listed, missing_extra
from llava_consensus.evaluation.checksums import checksum_of
from llava_consensus.evaluation.files import read_json
from llava_consensus.evaluation.models.weights import (
    FORMATS,
    copy_small_files,
    new_folder,
    tensors_of,
    weight_files,
    write_shards,
)
from llava_consensus.hosts.clip import without_unused_report
from llava_consensus.hosts.environment import cache_folder
from llava_consensus.hosts.pretrained import load_pretrained

SETTINGS, ADAPTER, WHOLE = "adapter_config.json", "adapter_model", "non_lora_trainables.bin"
PREFIX = "base_model.model."  # of names as PEFT writes them
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
log = logging.getLogger(__name__)


def check(model: str, lora: Path, base: str | None, folder: Path | None) -> None:
    """Checks, without weights, that a checkpoint is whole or is loaded with a base of its shape.

    Args:
        model, base: names as they were given.
        lora, folder: of the checkpoint and of its base.
    Raises:
        OptionError: for a LoRA checkpoint without a base, or a base of another checkpoint.
        DataError: for a base of another shape.
    """
    adapts = (lora / SETTINGS).is_file()
    if folder is None:
        whole = any(not path.name.startswith(ADAPTER) for kind in FORMATS for path in lora.glob(kind))
        if adapts and not whole:
            raise OptionError(
                f"model {model!r} is a LoRA checkpoint: give its base, --model-base {_base_named(lora) or 'BASE'}"
            )
        return
    if not adapts:
        raise OptionError(f"model_base={base!r}: {model} is no LoRA checkpoint, it has no {SETTINGS}. Leave it out")
    named = _base_named(lora)
    own, other = (read_json(path / "config.json", "Give the base of the adapter", dict) for path in (lora, folder))
    for name in SIZES:
        if own.get(name) != other.get(name) and None not in (own.get(name), other.get(name)):
            raise DataError(
                f"model_base={base!r}: has {name}={other[name]}, and {model} was trained on a model of {own[name]}. "
                f"Give its base{f', {named}' if named else ''}"
            )


def merged(lora: Path, base: Path, files: Iterable[Path]) -> Path:
    """The folder of a LoRA checkpoint and its base as one checkpoint, made by the first call.

    Args:
        lora, base: their folders.
        files: of both, whose contents name the folder.
    Raises:
        DataError: see `merge`.
    """
    folder = cache_folder("merged")
    out = folder / f"llava-{checksum_of(files)[:24]}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of workers, the first one merges
        if not out.is_dir():
            log.info("%s and %s are merged, once: %s", lora, base, out)
            merge(lora, base, out)
    return out


def merge(lora: Path, base: Path, out: Path) -> str:
    """Writes the merged checkpoint; returns a line about it. The folder appears when it is whole.

    Args:
        lora: folder with adapter_config.json, the adapter's weights and LLaVA's config.json.
        base: folder of the model that was adapted.
        out: folder that is not there yet.
    Raises:
        DataError: for a folder that is not that, an adapter that does not fit the base, or an `out` that exists.
        MissingDependency: if PEFT is not installed.
    """
    if find_spec("peft") is None:
        raise missing_extra("LoRA checkpoints need peft", "eval")
    adapters = [path for suffix in ("safetensors", "bin") for path in lora.glob(f"{ADAPTER}.{suffix}")]
    if not adapters:
        raise DataError(f"{lora}: no {ADAPTER}.safetensors or .bin in it, so it is no LoRA checkpoint")
    adapted = {name.removeprefix(PREFIX).partition(".lora_")[0] for name, _ in tensors_of(adapters[0])}
    trained = dict(tensors_of(lora / WHOLE)) if (lora / WHOLE).is_file() else {}
    trained = {name.removeprefix(PREFIX): values for name, values in trained.items()}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        merged = _language_model(lora, base, adapted)
        for file in weight_files(base):
            for name, values in tensors_of(file):
                if name not in trained:
                    yield name, merged.get(name, values).to(values.dtype)
        yield from trained.items()

    with new_folder(out, lora) as fresh:
        count = write_shards(tensors(), fresh)
        copy_small_files(base, fresh)
        copy_small_files(lora, fresh)
        (fresh / SETTINGS).unlink()
    return f"{count} tensors, {len(adapted)} of them adapted: {out}"


def _language_model(lora: Path, base: Path, adapted: set[str]) -> dict[str, Tensor]:
    """Tensors of the base's language model with the adapter merged into it by PEFT."""
    import transformers
    from peft import PeftModel

    kind = str(read_json(base / "config.json", "Give the base of the adapter", dict).get("model_type"))
    # the class without a vision tower, which the adapter does not touch
    cls = transformers.MistralForCausalLM if "mistral" in kind else transformers.LlamaForCausalLM
    with without_unused_report():
        model = load_pretrained(cls, base, torch_dtype="auto")
    if lost := sorted(adapted - {name for name, _ in model.named_modules()}):
        raise DataError(f"{lora}: adapts {listed(lost)}, which {base} does not have")
    state: dict[str, Tensor] = PeftModel.from_pretrained(model, lora).merge_and_unload().state_dict()
    return state


def _base_named(lora: Path) -> str | None:
    """Name of the base in adapter_config.json."""
    settings = read_json(lora / SETTINGS, "Give the folder of a LoRA checkpoint", dict)
    return settings.get("base_model_name_or_path")
