"""Checkpoints of LLaVA 1.6's kind, whose vision tower was trained along: the checkpoint's own tower is loaded, all of
it, or the checkpoint is refused.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llava_consensus.errors import DataError
from llava_consensus.evaluation import models
from llava_consensus.evaluation.models.llava import PREFIX

MINI = Path("checkpoints/llava-mini")


def checkpoint(folder: Path, change: Any = None, name: str = "model.safetensors") -> Path:
    """The mini model with a tower of its own: the stock one is beside it, with other weights."""
    shutil.copytree(MINI, folder, ignore=shutil.ignore_patterns("README.md", ".work"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"unfreeze_mm_vision_tower": True}))
    weights = load_file(folder / "model.safetensors")
    stock = load_file(MINI / "vision_tower" / "model.safetensors")
    own = {PREFIX + key: values + 0.01 for key, values in stock.items() if key.startswith("vision_model.")}
    if change:
        change(own)
    if name.endswith(".bin"):
        (folder / "model.safetensors").unlink()
        torch.save(weights | own, folder / name)
    else:
        save_file(weights | own, folder / name, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_the_checkpoints_own_tower_is_loaded(tmp_path: Path, name: str) -> None:
    host: Any = models.load(str(checkpoint(tmp_path / "llava-v1.6-tiny", name=name)), models.Loading("cpu", "float32"))
    stock = load_file(MINI / "vision_tower" / "model.safetensors")
    tower = host.model.get_vision_tower().vision_tower.state_dict()
    compared = 0
    for key, values in stock.items():
        mine = tower.get(key, tower.get(key.removeprefix("vision_model.")))
        if key.startswith("vision_model.") and mine is not None:
            assert torch.equal(mine, values + 0.01), key
            compared += 1
    assert (
        compared == sum(not key.endswith("position_ids") for key in tower)
        and host.model.config.unfreeze_mm_vision_tower
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda own: own.clear(), "103 tensors missing"),
        (lambda own: own.pop(next(iter(own))), "1 tensor missing"),
        (lambda own: own.update({PREFIX + "vision_model.more": torch.zeros(1)}), "1 tensor left over"),
        (lambda own: own.update({next(iter(own)): torch.zeros(3)}), "1 tensor of another shape"),
    ],
)
def test_a_tower_that_is_not_whole_is_refused_by_name(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        models.load(str(checkpoint(tmp_path / "llava-v1.6-tiny", change)), models.Loading("cpu", "float32"))
