"""Plans of small trainings on the embedded model, for the tests of training."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget
from llava_consensus.training.plan import TrainingPlan
from llava_consensus.training.run import train
from playground.mini.conversations import NAME, write

MINI = Path(__file__).parents[1] / "checkpoints" / "llava-mini"


def scenes(folder: Path) -> Path:
    """Training scenes in LLaVA's data format; their folder."""
    write(folder, scenes=6, number=2, turns=1)
    return folder


def trained(data: Path, out: Path, method: str = "consensusdrop", **changes: Any) -> dict[str, Any]:
    """Trains four steps of two images, the projector alone, with budgets of 64 and 32; what is said of the training."""
    known = {"model": str(MINI), "method": make(method), "budgets": (Budget(64), Budget(32)), "device": "cpu"}
    files = {"conversations": data / NAME, "images": data / "images", "out": out}
    return train(TrainingPlan(**{**known, **files, "steps": 4, "batch": 2, "save_every": 2, **changes}), method)


def arguments(data: Path, out: Path) -> list[str]:
    """The same as a command, of all but the tower."""
    files = ["--data-path", str(data / NAME), "--images", str(data / "images"), "--out", str(out)]
    tuned = ["--tune", "full", "--learning-rate", "3e-4", "--tokens", "64 32", "--batch", "2"]
    return ["train", "--model", str(MINI), "--device", "cpu", *files, *tuned]


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def changed(folder: Path) -> set[str]:
    """Tensors that differ from the embedded model's."""
    before, after = tensors(MINI), tensors(folder)
    assert before.keys() == after.keys() and all(before[name].dtype == after[name].dtype for name in before)
    return {name for name in before if not before[name].equal(after[name])}
