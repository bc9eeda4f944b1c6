"""A training from its plan to its checkpoint: the folder it works in, which survives a kill, and what it writes, a
checkpoint with the files and tensors of the one it started from. So it loads wherever that one does.
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from llava_consensus.errors import DataError, OptionError, listed, plural
from llava_consensus.evaluation import models
from llava_consensus.evaluation.checksums import checksum_of
from llava_consensus.evaluation.files import Record, misread, read_json, remove_leftovers, take_lock, write_json
from llava_consensus.evaluation.runs.questions import place, versions
from llava_consensus.hosts import HOSTS
from llava_consensus.training.plan import Conversations, TrainingPlan, read
from llava_consensus.training.trainer import inner, trained

OFFICIAL, TRANSFORMERS = "llava", "hf"  # name of a host, kind of others
STATES = ".training"  # folder in the checkpoint, of its description and the checkpoints to resume from
DESCRIPTION = RESULT = "training.json"
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
INDEXES = {".safetensors": "model.safetensors.index.json", ".bin": "pytorch_model.bin.index.json"}
SMALL = (".json", ".model", ".txt", ".jinja", ".md", ".py")
LEFT_OUT = (RESULT, "README.md", *INDEXES.values())
ANEW = "Remove {} to begin anew"


def prepare(plan: TrainingPlan, name: str) -> tuple[Record, Conversations]:
    """Checks everything that needs no weights: the description of the training, and its data.

    Args:
        plan: what is trained.
        name: of its method.
    Raises:
        ConsensusError: for a model, data or method that cannot be trained, or a package that is not installed.
    """
    data = read(plan.conversations, plan.images)
    plan.check(name, data)
    host, checkpoint = models.name_of(plan.model), models.find(plan.model)
    if host != OFFICIAL and HOSTS[host].kind != TRANSFORMERS:
        raise OptionError(
            f"model={plan.model!r} is run by code of its own ({host}), which has no training here. Adapted: official "
            "LLaVA and models of transformers"
        )
    _stack(host).check(plan, checkpoint.folder)
    return {
        **plan.description(name),
        "model": {"name": place(plan.model), "host": host, "fingerprint": checksum_of(checkpoint.files())},
        "data": data.description,
        "processes": int(os.environ.get("WORLD_SIZE", 1)),  # as torchrun and accelerate say it
        "versions": versions("accelerate", "peft", "deepspeed"),
    }, data


def train(plan: TrainingPlan, name: str) -> Record:
    """Trains a plan, or resumes it; returns the summary of the finished training.

    Args:
        plan: what is trained.
        name: of its method.
    Raises:
        ConsensusError: see `prepare`; or a folder that holds another training.
    """
    description, data = prepare(plan, name)
    first = int(os.environ.get("RANK", 0)) == 0
    with _opened(plan.out, description) if first else contextlib.nullcontext():
        if (plan.out / RESULT).is_file():
            known: Record = read_json(plan.out / RESULT, ANEW.format(plan.out), dict)
            with misread(str(plan.out / RESULT), ANEW.format(plan.out)):
                return {**known, "steps_done": int(known["steps_done"]), "losses": list(map(float, known["losses"]))}
        source = models.find(plan.model).folder
        with patch.dict(os.environ):  # transformers 4.37 leaves its precision there for the next training
            trainer = _stack(description["model"]["host"]).run(plan, data, source, plan.out / STATES)
        losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
        result = {**description, "steps_done": trainer.state.global_step, "losses": losses}
        with _whole(trainer.model):
            if first:
                _export(trainer.model, description["model"]["host"], source, plan.out)
                write_json(plan.out / RESULT, result)
    return result


def _stack(host: str) -> ModuleType:
    return import_module(f"llava_consensus.training.{'official' if host == OFFICIAL else 'trainer'}")


@contextlib.contextmanager
def _opened(out: Path, description: Record) -> Iterator[None]:
    """The folder of a training with its description, locked while the body runs.

    Raises:
        DataError: where it holds another training, or a checkpoint that is none of ours.
        BusyError: where another process works in it.
    """
    states = out / STATES
    if out.exists() and any(out.iterdir()) and not states.is_dir():
        raise DataError(f"{out}: is there already, and no training made it. Give another --out")
    states.mkdir(parents=True, exist_ok=True)
    lock = take_lock(states / "lock", "this training")
    try:
        remove_leftovers(states)
        file = states / DESCRIPTION
        before = read_json(file, ANEW.format(out), dict) if file.exists() else description
        changed = [
            f"{name}: {before.get(name)!r} there, {description.get(name)!r} now"
            for name in sorted({*before, *description} - {"versions"})
            if before.get(name) != description.get(name)
        ]
        if changed:
            raise DataError(
                f"{out}: holds a training of another plan ({', '.join(changed[:3])}). Give another --out, or the "
                "arguments it had"
            )
        if not file.exists():
            write_json(file, description)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _whole(model: nn.Module) -> Iterator[None]:
    """Parameters in one piece in every process while the body runs, where ZeRO stage 3 has cut them."""
    cut = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    if not cut:
        yield
        return
    from deepspeed import zero

    with zero.GatheredParameters(cut, modifier_rank=0):
        yield


def _export(model: nn.Module, host: str, source: Path, out: Path) -> None:
    """Writes the checkpoint, adapters merged: every file of `source`, tensor for tensor and type for type, with the
    trained values in it.

    Raises:
        DataError: for a trained parameter that the checkpoint has no tensor for, or that is not finite.
    """
    values = merged(model)
    broken = sorted(name for name, value in values.items() if not bool(torch.isfinite(value).all()))
    if broken:
        raise DataError(
            f"{out}: the training has diverged, {plural(len(broken), 'tensor')} not finite: {listed(broken)}. "
            "Remove the folder and take a lower --learning-rate"
        )
    files = sorted(file for pattern in WEIGHTS for file in source.glob(pattern))
    if host != OFFICIAL:
        with tempfile.TemporaryDirectory(dir=out / STATES) as folder:  # transformers renames its tensors in files
            inner(model).save_pretrained(folder, state_dict=values)
            values = {name: one for file in Path(folder).glob("*.safetensors") for name, one in load_file(file).items()}
    left = set(values)
    for file in files:
        left -= _write(file, out / file.name, values)
        if (source / INDEXES[file.suffix]).is_file():
            shutil.copy2(source / INDEXES[file.suffix], out)
    if left:
        raise DataError(f"{out}: the checkpoint has no tensor for what was trained as {', '.join(sorted(left)[:3])}")
    for path in source.glob("[!.]*"):
        if path.is_dir():
            shutil.copytree(path, out / path.name, dirs_exist_ok=True)
        elif path.suffix in SMALL and path.name not in LEFT_OUT:
            shutil.copy2(path, out)


def merged(model: nn.Module) -> dict[str, Tensor]:
    """Trained weights by the names of the plain model, adapters merged into them."""
    names = list(trained(model))
    unloaded = getattr(model, "merge_and_unload", None)  # of peft
    if unloaded is not None:
        adapted = [re.sub(r"\.lora_.*", ".weight", name).replace(".base_layer.", ".") for name in names]
        names = [name.removeprefix("base_model.model.") for name in adapted]
        model = unloaded()
    parameters = dict(model.named_parameters())
    return {name: parameters[name].detach().cpu() for name in names}


def _write(file: Path, target: Path, values: dict[str, Tensor]) -> set[str]:
    """One file of weights with the trained values, in the types it has; the names that were put in."""
    in_safetensors = file.suffix == ".safetensors"
    tensors = load_file(file) if in_safetensors else torch.load(file, "cpu", weights_only=True, mmap=True)
    put = values.keys() & tensors.keys()
    for name in put:
        if tensors[name].shape != values[name].shape:
            raise DataError(f"{file}: {name} has another shape than what was trained")
        tensors[name] = values[name].to(tensors[name].dtype).contiguous()
    part = target.with_name(f".{target.name}.part")
    if in_safetensors:
        save_file(tensors, part, metadata={"format": "pt"})
    else:
        torch.save(tensors, part)
    part.chmod(0o644)
    part.replace(target)
    return set(put)
