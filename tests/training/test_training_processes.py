"""Two processes train what one does; so does DeepSpeed on the CPU, where it is installed."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from training_data import MINI, arguments, scenes, tensors, trained

ROOT = Path(__file__).parents[2]
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
STEPS = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of one length: the loss of a batch is a mean over its tokens, and a mean of means is that of all then."""
    folder = scenes(tmp_path_factory.mktemp("scenes"))
    file = folder / "conversations.json"
    entries = json.loads(file.read_text())
    for number, entry in enumerate(entries):
        entry["conversations"][1]["value"] = ("yes", "no")[number % 2]
    file.write_text(json.dumps(entries))
    return folder


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "llava-alone"
    trained(data, out, steps=STEPS, accumulate=2, tune="full", learning_rate=3e-4)
    return out


def together(data: Path, out: Path, *more: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "llava_consensus.cli", *arguments(data, out), "--steps", str(STEPS), *more]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-9000:]


def distance(one: Path, other: Path) -> float:
    """The largest difference of two checkpoints, by the largest change of the training."""
    first, second, before = tensors(one), tensors(other), tensors(MINI)
    moved = max(float((first[name] - before[name]).float().abs().max()) for name in before)
    return max(float((first[name] - second[name]).float().abs().max()) for name in before) / moved


def test_two_processes_train_what_one_does(data: Path, alone: Path, tmp_path: Path) -> None:
    together(data, tmp_path / "llava-two")
    said = json.loads((tmp_path / "llava-two" / "training.json").read_text())
    assert said["processes"] == 2 and said["steps_done"] == STEPS
    one = json.loads((alone / "training.json").read_text())
    assert said["losses"] == pytest.approx(one["losses"], rel=1e-3)
    assert distance(alone, tmp_path / "llava-two") < 0.05


@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_on_the_cpu_trains_what_one_process_does(data: Path, alone: Path, tmp_path: Path, stage: int) -> None:
    out = tmp_path / f"llava-zero{stage}"
    config = json.loads((ROOT / "eval_scripts" / f"zero{stage}.json").read_text())
    config["zero_force_ds_cpu_optimizer"] = False
    (tmp_path / "zero.json").write_text(json.dumps(config))
    together(data, out, "--deepspeed", str(tmp_path / "zero.json"))
    one, said = (json.loads((path / "training.json").read_text()) for path in (alone, out))
    assert said["zero_stage"] == stage and said["losses"] == pytest.approx(one["losses"], rel=1e-2)
    assert all(bool(torch.isfinite(value).all()) for value in tensors(out).values())
    assert distance(alone, out) < 0.2
