"""A training from its plan to its checkpoint; the folder holds the Trainer's states, to resume from."""

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from llava_consensus.errors import DataError, OptionError, listed, plural
from llava_consensus.evaluation import models
from llava_consensus.evaluation.checksums import checksum_of
from llava_consensus.evaluation.files import Record, write_json
from llava_consensus.evaluation.models.weights import copy_small_files, rewrite
from llava_consensus.evaluation.runs.questions import place, versions
from llava_consensus.hosts import HOSTS
from llava_consensus.training.plan import TrainingPlan, read
from llava_consensus.training.trainer import inner, trained

OFFICIAL, TRANSFORMERS = "llava", "hf"  # name of a host, kind of others
STATES = ".training"  # folder in the checkpoint, of the Trainer's own to resume from
RESULT = "training.json"


def train(plan: TrainingPlan, name: str) -> Record:
    """Trains a plan with the method of this name, or resumes it; returns the description of the finished training."""
    data = read(plan.conversations, plan.images)
    plan.check(name, data)
    host, checkpoint = models.name_of(plan.model), models.find(plan.model)
    if host != OFFICIAL and HOSTS[host].kind != TRANSFORMERS:
        raise OptionError(
            f"model={plan.model!r} runs its own code ({host}), which has no training here. Adapted: official "
            "LLaVA and models of transformers"
        )
    stack = import_module(f"llava_consensus.training.{'official' if host == OFFICIAL else 'trainer'}")
    stack.check(plan, checkpoint.folder)
    described = {
        **plan.description(name),
        "model": {"name": place(plan.model), "host": host, "fingerprint": checksum_of(checkpoint.files())},
        "data": {"file": data.path.name, "fingerprint": checksum_of([data.path]), "conversations": len(data.entries)},
        "processes": int(os.environ.get("WORLD_SIZE", 1)),  # as torchrun and accelerate say it
    }
    first = int(os.environ.get("RANK", 0)) == 0
    states = plan.out / STATES
    if (plan.out / RESULT).is_file() or (plan.out.exists() and any(plan.out.iterdir()) and not states.is_dir()):
        raise DataError(f"{plan.out}: is there already, and holds no unfinished training. Give another --out")
    states.mkdir(parents=True, exist_ok=True)
    # transformers 4.37 leaves its precision in the environment for the next training
    with patch.dict(os.environ), contextlib.redirect_stdout(sys.stderr):
        trainer = stack.run(plan, data, checkpoint.folder, states)
    losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
    result = {**described, "steps_done": trainer.state.global_step, "losses": losses}
    with _whole(trainer.model):
        if first:
            _export(trainer.model, host, checkpoint.folder, plan.out)
            write_json(plan.out / RESULT, {**result, "versions": versions("accelerate", "peft", "deepspeed")})
    return result


@contextlib.contextmanager
def _whole(model: nn.Module) -> Iterator[None]:
    """Parameters in one piece in every process while the block runs, if ZeRO stage 3 has cut them."""
    cut = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    if not cut:
        yield
        return
    from deepspeed import zero

    with zero.GatheredParameters(cut, modifier_rank=0):
        yield


def _export(model: nn.Module, host: str, source: Path, out: Path) -> None:
    """Writes the checkpoint, adapters merged, with the tensors and types of `source`. DataError unless finite."""
    values = merged(model)
    broken = sorted(name for name, value in values.items() if not bool(torch.isfinite(value).all()))
    if broken:
        raise DataError(
            f"{out}: the training has diverged, {plural(len(broken), 'tensor')} not finite: {listed(broken)}. "
            "Remove the folder and take a lower --learning-rate"
        )
    if host != OFFICIAL:
        with tempfile.TemporaryDirectory(dir=out / STATES) as folder:  # transformers renames its tensors in files
            inner(model).save_pretrained(folder, state_dict=values)
            values = {name: one for file in Path(folder).glob("*.safetensors") for name, one in load_file(file).items()}
    rewrite(source, out, values)
    copy_small_files(source, out)
    for path in source.glob("[!.]*"):
        if path.is_dir():
            shutil.copytree(path, out / path.name, dirs_exist_ok=True)


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
