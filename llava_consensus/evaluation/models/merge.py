"""A LoRA checkpoint of LLaVA and the model it was trained on, as one checkpoint: W + scale B A for each adapted matrix,
and the weights that were trained whole (`non_lora_trainables.bin`: the projector) in place of the base's.

    llava-consensus model merge llava-v1.5-7b-lora vicuna-7b-v1.5 OUT

Tensors are read one at a time and written shard by shard. Neither PEFT nor official LLaVA is needed.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import FRESH, read_json
from llava_consensus.evaluation.models.convert import MEND, copy_small_files, write_shards
from llava_consensus.evaluation.models.weights import tensors_of, weight_files

ADAPTER, WHOLE = "adapter_model", "non_lora_trainables.bin"
PREFIX = "base_model.model."  # of names as PEFT writes them
OTHER = ("use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save")  # would change the sum


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
    settings = read_json(lora / "adapter_config.json", "Give the folder of a LoRA checkpoint", dict)
    special = [name for name in OTHER if settings.get(name)]
    if special or settings.get("peft_type", "LORA") != "LORA":
        named = ", ".join(special) or settings["peft_type"]
        raise DataError(f"{lora}: adapter_config.json has {named}, and only plain LoRA is merged")
    rank = settings["r"]
    scale = settings["lora_alpha"] / (rank**0.5 if settings.get("use_rslora") else rank)
    trained = tensors_of(lora / WHOLE) if (lora / WHOLE).is_file() else ()
    adapter, whole = (
        {name.removeprefix(PREFIX): values for name, values in tensors}
        for tensors in (tensors_of(_one(lora, ADAPTER)), trained)
    )
    pairs = {name.removesuffix(".lora_A.weight") for name in adapter if name.endswith(".lora_A.weight")}
    used: set[str] = set()

    def merged() -> Iterator[tuple[str, Tensor]]:
        for file in weight_files(base):
            for name, values in tensors_of(file):
                module = name.removesuffix(".weight")
                if name in whole:
                    continue
                if module in pairs:
                    used.add(module)
                    down, up = adapter[f"{module}.lora_A.weight"], adapter[f"{module}.lora_B.weight"]
                    if (up.shape[0], down.shape[1]) != values.shape:
                        raise DataError(f"{lora}: {module} does not fit the {tuple(values.shape)} of {base}. {MEND}")
                    values = (values.float() + scale * up.float() @ down.float()).to(values.dtype)
                yield name, values
        yield from whole.items()
        if lost := sorted(pairs - used):
            raise DataError(f"{lora}: adapts {lost[0]} and {len(lost) - 1} more, which {base} does not have")

    fresh = out.with_name(f".{out.name}{FRESH}")
    shutil.rmtree(fresh, ignore_errors=True)  # of a call that was killed
    try:
        count = write_shards(merged(), fresh)
        copy_small_files(base, fresh)
        copy_small_files(lora, fresh)
        (fresh / "adapter_config.json").unlink()
        fresh.rename(out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return f"{count} tensors, {len(pairs)} of them adapted: {out}"


def _one(folder: Path, stem: str) -> Path:
    found = [path for suffix in (".safetensors", ".bin") if (path := folder / f"{stem}{suffix}").is_file()]
    if not found:
        raise DataError(f"{folder}: no {stem}.safetensors or .bin in it, so it is no LoRA checkpoint")
    return found[0]
