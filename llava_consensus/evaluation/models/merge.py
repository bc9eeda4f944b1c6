"""A LoRA checkpoint of LLaVA and the model it was trained on, as one checkpoint: W + scale B A for each adapted matrix,
and the weights that were trained whole (`non_lora_trainables.bin`: the projector) in place of the base's.

    llava-consensus model merge llava-v1.5-7b-lora vicuna-7b-v1.5 OUT

Tensors are read one at a time and written shard by shard. Neither PEFT nor official LLaVA is needed. A checkpoint that
is loaded with its base (`Loading.model_base`) is merged once, into ~/.cache.
"""

import fcntl
import logging
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from llava_consensus.errors import DataError, OptionError, listed
from llava_consensus.evaluation.checksums import checksum_of
from llava_consensus.evaluation.files import FRESH, Record, read_json
from llava_consensus.evaluation.models.weights import FORMATS, copy_small_files, tensors_of, weight_files, write_shards
from llava_consensus.hosts.environment import cache_folder

SETTINGS, ADAPTER, WHOLE = "adapter_config.json", "adapter_model", "non_lora_trainables.bin"
PREFIX = "base_model.model."  # of names as PEFT writes them
OTHER = ("use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save")  # would change the sum
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
log = logging.getLogger(__name__)


def check(model: str, lora: Path, base: str | None, folder: Path | None) -> None:
    """Checks, without weights, that a checkpoint is whole or is loaded with a base of its shape.

    Args:
        model, base: names as they were given.
        lora, folder: of the checkpoint and of its base.
    Raises:
        OptionError: for a LoRA checkpoint without a base, or a base of another checkpoint.
        DataError: for an adapter that is not plain LoRA, or a base of another shape.
    """
    adapts = (lora / SETTINGS).is_file()
    if folder is None:
        whole = any(not path.name.startswith(ADAPTER) for kind in FORMATS for path in lora.glob(kind))
        if adapts and not whole:
            named = _settings(lora).get("base_model_name_or_path") or "BASE"
            raise OptionError(f"model {model!r} is a LoRA checkpoint: give its base, --model-base {named}")
        return
    if not adapts:
        raise OptionError(f"model_base={base!r}: {model} is no LoRA checkpoint, it has no {SETTINGS}. Leave it out")
    named = _settings(lora).get("base_model_name_or_path")
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
    out = folder / f"llava-{checksum_of(files)[:24]}"  # LLaVA's loader goes by the name
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
    """
    if out.exists():
        raise DataError(f"{out}: is there already. Give a folder that is not")
    settings = _settings(lora)
    rank = settings["r"]
    scale = settings["lora_alpha"] / (rank**0.5 if settings.get("use_rslora") else rank)
    trained = tensors_of(lora / WHOLE) if (lora / WHOLE).is_file() else ()
    adapter, whole = (
        {name.removeprefix(PREFIX): values for name, values in tensors}
        for tensors in (tensors_of(_one(lora, ADAPTER)), trained)
    )
    pairs = {name.removesuffix(".lora_A.weight") for name in adapter if name.endswith(".lora_A.weight")}
    used: set[str] = set()

    def summed() -> Iterator[tuple[str, Tensor]]:
        for file in weight_files(base):
            for name, values in tensors_of(file):
                module = name.removesuffix(".weight")
                if name in whole:
                    continue
                if module in pairs:
                    used.add(module)
                    down, up = adapter[f"{module}.lora_A.weight"], adapter[f"{module}.lora_B.weight"]
                    if (up.shape[0], down.shape[1]) != values.shape:
                        raise DataError(
                            f"{lora}: {module} does not fit the {tuple(values.shape)} of {base}. Give its base"
                        )
                    values = (values.float() + scale * up.float() @ down.float()).to(values.dtype)
                yield name, values
        yield from whole.items()
        if lost := sorted(pairs - used):
            raise DataError(f"{lora}: adapts {listed(lost)}, which {base} does not have")

    fresh = out.with_name(f".{out.name}{FRESH}")
    shutil.rmtree(fresh, ignore_errors=True)  # of a call that was killed
    try:
        count = write_shards(summed(), fresh)
        copy_small_files(base, fresh)
        copy_small_files(lora, fresh)
        (fresh / SETTINGS).unlink()
        fresh.rename(out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return f"{count} tensors, {len(pairs)} of them adapted: {out}"


def _settings(lora: Path) -> Record:
    """adapter_config.json. DataError where it is of anything but plain LoRA."""
    settings: Record = read_json(lora / SETTINGS, "Give the folder of a LoRA checkpoint", dict)
    special = [name for name in OTHER if settings.get(name)]
    if special or settings.get("peft_type", "LORA") != "LORA":
        named = ", ".join(special) or settings["peft_type"]
        raise DataError(f"{lora}: {SETTINGS} has {named}, and only plain LoRA is merged")
    return settings


def _one(folder: Path, stem: str) -> Path:
    found = [path for suffix in (".safetensors", ".bin") if (path := folder / f"{stem}{suffix}").is_file()]
    if not found:
        raise DataError(f"{folder}: no {stem}.safetensors or .bin in it, so it is no LoRA checkpoint")
    return found[0]
