"""Trainings of the embedded model: what comes out, and what survives a kill."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import transformers
from training_data import MINI, arguments, changed, scenes, tensors, trained

from llava_consensus.errors import DataError, OptionError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.models import Loading, Prompt
from llava_consensus.training.run import STATES
from llava_consensus.training.trainer import WEIGHTS

ROOT = Path(__file__).parents[2]
needs_5 = pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="hosts of transformers need >= 5")
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
FULL: dict[str, Any] = {"tune": "full", "learning_rate": 3e-4}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scenes(tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="module")
def projector(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with its projector adapted in four steps."""
    out = tmp_path_factory.mktemp("out") / "llava-projector"
    trained(data, out)
    return out


@pytest.fixture(scope="module")
def full(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with everything but its tower adapted in six steps, undisturbed."""
    out = tmp_path_factory.mktemp("out") / "llava-full"
    trained(data, out, steps=6, **FULL)
    return out


def test_the_projector_alone_is_trained_and_the_folder_says_what_was_done(projector: Path) -> None:
    assert changed(projector) == {f"model.mm_projector.{n}.{part}" for n in (0, 2) for part in ("weight", "bias")}
    said = json.loads((projector / "training.json").read_text())
    assert said["method"] == "consensusdrop" and said["budgets"] == [64, 32] and said["seed"] == 0
    assert said["steps_done"] == 4 == len(said["losses"]) and said["data"]["conversations"] == 12
    assert len(said["data"]["fingerprint"]) == 64 and said["model"]["host"] == "llava"
    assert json.loads((projector / "config.json").read_text()) == json.loads((MINI / "config.json").read_text())


def test_what_was_trained_loads_and_answers(projector: Path, data: Path) -> None:
    host: Any = models.load(str(projector), Loading("cpu"))
    picture = host.encode([_picture(data)])
    assert host.answer([picture], [Prompt("Is there a dog in the picture?", max_new_tokens=4)])[0].text


def test_a_finished_training_and_a_damaged_state_are_refused(projector: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no unfinished training"):
        trained(data, projector)
    out = tmp_path / "llava-stopped"
    shutil.copytree(projector, out)
    (out / "training.json").unlink()
    (weights,) = (out / STATES).glob(f"checkpoint-*/{WEIGHTS}")
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(DataError, match=rf"{weights}: cannot be read .* Remove {weights.parent} to resume"):
        trained(data, out)


def test_everything_but_the_tower_is_trained(full: Path) -> None:
    assert not any("vision_tower" in name for name in changed(full))
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"} <= changed(full)


def test_a_killed_training_goes_on_to_the_same_weights(full: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "llava-killed"
    command = [sys.executable, "-m", "llava_consensus.cli", *arguments(data, out), "--steps", "6", "--save-every", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    until = time.monotonic() + 600
    while not list((out / STATES).glob("checkpoint-*/trainer_state.json")) and process.poll() is None:
        assert time.monotonic() < until, "no state was stored in ten minutes"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    _, said = process.communicate()
    assert process.returncode == -signal.SIGKILL, said.decode()
    assert not (out / "training.json").exists()
    result = trained(data, out, steps=6, **FULL)
    undisturbed = json.loads((full / "training.json").read_text())
    assert result["losses"] == undisturbed["losses"] and len(result["losses"]) == 6
    assert all(value.equal(tensors(full)[name]) for name, value in tensors(out).items())


@needs_5
def test_a_model_of_transformers_takes_the_same_first_steps(full: Path, data: Path, tmp_path: Path) -> None:
    from llava_consensus.evaluation.models.convert import convert

    convert(MINI, tmp_path / "llava-mini-hf")
    out = tmp_path / "llava-hf-full"
    result = trained(data, out, model=str(tmp_path / "llava-mini-hf"), steps=2, **FULL)
    official = json.loads((full / "training.json").read_text())
    first, second = result["losses"]
    assert first == pytest.approx(official["losses"][0], abs=1e-4)
    assert second == pytest.approx(official["losses"][1], rel=0.02)  # Adam's first step is the sign of the gradient
    assert set(tensors(out)) == set(tensors(tmp_path / "llava-mini-hf"))
    host: Any = models.load(str(out), Loading("cpu"))
    assert host.answer([host.encode([_picture(data)])], [Prompt("What is there?", max_new_tokens=4)])[0].text


@needs_peft
def test_adapters_are_merged_into_the_checkpoint(data: Path, tmp_path: Path) -> None:
    trained(data, tmp_path / "llava-adapted", tune="lora", steps=2, arguments=("--lora_r", "8"))
    names = changed(tmp_path / "llava-adapted")
    assert "model.layers.3.mlp.down_proj.weight" in names and "model.mm_projector.0.weight" in names
    assert "model.embed_tokens.weight" not in names


def test_layers_computed_again_and_passes_added_up_change_nothing(data: Path, tmp_path: Path) -> None:
    one = trained(data, tmp_path / "llava-one", steps=2, batch=4)
    again = trained(data, tmp_path / "llava-again", steps=2, batch=4, checkpointing=True)
    assert again["losses"] == pytest.approx(one["losses"], abs=1e-5)
    added = trained(data, tmp_path / "llava-added", steps=2, batch=2, accumulate=2)
    assert added["losses"][0] == pytest.approx(one["losses"][0], rel=0.5) and added["steps_done"] == 2


def test_bfloat16_and_a_method_between_layers(data: Path, tmp_path: Path) -> None:
    result = trained(data, tmp_path / "llava-half", "fastv", steps=2, precision="bfloat16")
    assert all(0 < loss < 10 for loss in result["losses"])
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ, "the next training has a precision of its own"


def test_what_stops_a_training_is_a_line(data: Path, tmp_path: Path) -> None:
    """An argument LLaVA does not know, and at the first batch data without an answer left and a damaged picture."""
    with pytest.raises(OptionError, match=r"after `--`.*nonsense"):
        trained(data, tmp_path / "llava-x", arguments=("--nonsense", "1"))
    with pytest.raises(DataError, match="no row of a batch has an answer left"):
        trained(data, tmp_path / "llava-y", arguments=("--model_max_length", "40"))
    shutil.copytree(data, tmp_path / "data")
    for file in (tmp_path / "data" / "images").iterdir():
        file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(DataError, match="damaged or cut off"):
        trained(tmp_path / "data", tmp_path / "llava-z")


def _picture(data: Path) -> Any:
    from PIL import Image

    return Image.open(next((data / "images").glob("*.png"))).convert("RGB")
