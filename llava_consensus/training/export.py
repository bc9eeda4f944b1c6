"""What a training writes: a checkpoint in the layout of the one it started from, tensor for tensor and file for file,
with the trained values in it. So it loads wherever that one does.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import Record, write_json
from llava_consensus.training.state import FOLDER, RESULT
from llava_consensus.training.steps import trained

WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
ADAPTED, PART = ".base_layer.", "lora_"
LEFT_OUT = (RESULT, "README.md", "model.safetensors.index.json", "pytorch_model.bin.index.json")
SMALL = (".json", ".model", ".txt", ".jinja", ".md", ".py")


def export(model: Any, source: Path, out: Path, result: Record, first: bool = True) -> None:
    """Writes the checkpoint; `training.json`, which says what was trained, last.

    Args:
        model: that was trained, adapters included, on any number of devices.
        source: folder of the checkpoint it started from.
        out: folder of the new one.
        result: what is said of the training.
        first: whether this is the process that writes; under ZeRO stage 3 all of them must call.
    Raises:
        DataError: for a trained parameter that the checkpoint has no tensor for, or that is not finite.
    """
    with _whole(model):
        values = merged(model) if first else {}
        if first:
            _check(values, out)
            files = sorted(file for pattern in WEIGHTS for file in source.glob(pattern))
            if values.keys() & _names(files):
                _write_alike(files, out, values)
            else:  # a model of transformers, whose names in files are not those in memory
                _save(model, files, out)
    if not first:
        return
    for path in source.glob("[!.]*"):
        if path.is_dir():
            shutil.copytree(path, out / path.name, dirs_exist_ok=True)
        elif path.suffix in SMALL and path.name not in LEFT_OUT:
            shutil.copy2(path, out / path.name)
    write_json(out / RESULT, result)


def _names(files: list[Path]) -> set[str]:
    """Names of all tensors in files of weights."""
    names: set[str] = set()
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                names |= set(opened.keys())
        else:
            names |= set(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
    return names


def _write_alike(files: list[Path], out: Path, values: Mapping[str, Tensor]) -> None:
    """The files of weights with the trained values in them."""
    left = set(values)
    for file in files:
        left -= _write(file, out / file.name, values)
        index = (
            file.parent / f"{'model.safetensors' if file.suffix == '.safetensors' else 'pytorch_model.bin'}.index.json"
        )
        if index.is_file():
            shutil.copy2(index, out / index.name)
    if left:
        raise DataError(f"{out}: the checkpoint has no tensor for what was trained as {', '.join(sorted(left)[:3])}")


def _save(model: Any, files: list[Path], out: Path) -> None:
    """The files of weights of a model of transformers, which knows itself what its tensors are called in files."""
    model = model.merge_and_unload() if hasattr(model, "get_base_model") else model
    with tempfile.TemporaryDirectory(dir=out / FOLDER) as folder:
        model.save_pretrained(folder)
        values = {name: value for file in Path(folder).glob("*.safetensors") for name, value in load_file(file).items()}
    known = _names(files)
    absent = sorted(known - values.keys())
    if absent:
        raise DataError(f"{out}: the trained model has no tensor {', '.join(absent[:3])} of the checkpoint")
    _write_alike(files, out, {name: values[name] for name in known})


def merged(model: Any) -> dict[str, Tensor]:
    """What was trained, by the names of the model without adapters, which are added into the weights they change."""
    if not hasattr(model, "get_base_model"):
        return {name: parameter.detach().cpu() for name, parameter in trained(model).items()}
    adapted = {name.split(f".{PART}")[0] for name, _ in model.named_parameters() if f".{PART}" in name}
    rest = [name for name in trained(model) if PART not in name]
    model.merge_adapter()
    parameters = dict(model.named_parameters())
    names = [*rest, *(f"{name}{ADAPTED}weight" for name in adapted)]
    prefix = "base_model.model."
    return {name.removeprefix(prefix).replace(ADAPTED, "."): parameters[name].detach().cpu() for name in names}


@contextlib.contextmanager
def _whole(model: nn.Module) -> Iterator[None]:
    """Parameters in one piece in every process while the body runs, where ZeRO has cut them."""
    cut = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    if not cut:
        yield
        return
    from deepspeed import zero

    with zero.GatheredParameters(cut, modifier_rank=0):
        yield


def _check(values: Mapping[str, Tensor], out: Path) -> None:
    broken = sorted(name for name, value in values.items() if not bool(torch.isfinite(value).all()))
    if broken:
        raise DataError(
            f"{out}: the training has diverged, {len(broken)} tensors are not finite ({', '.join(broken[:3])}). "
            "Remove the folder and take a lower --learning-rate"
        )


def _write(file: Path, target: Path, values: Mapping[str, Tensor]) -> set[str]:
    """One file of weights with the trained values, in the types it has; the names that were put in."""
    if file.suffix == ".safetensors":
        tensors = load_file(file)
    else:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    put = {name for name in values if name in tensors}
    for name in put:
        if tensors[name].shape != values[name].shape:
            raise DataError(f"{file}: {name} has another shape than what was trained")
        tensors[name] = values[name].to(tensors[name].dtype).contiguous()
    part = target.with_name(f".{target.name}.part")
    if file.suffix == ".safetensors":
        save_file(tensors, part, metadata={"format": "pt"})
    else:
        torch.save(tensors, part)
    part.chmod(0o644)
    part.replace(target)
    return put
