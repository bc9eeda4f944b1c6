"""Checkpoints whose vision tower was trained along, as LLaVA 1.6's: `unfreeze_mm_vision_tower` in config.json.

The official loader would load the tower while the language model is being made, which current transformers refuse. Here
the language model is loaded without it, then the tower from its name, then the checkpoint's own tower weights over it:
all of them and no others, never silently the stock tower.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from llava_consensus.errors import DataError

FLAG = "unfreeze_mm_vision_tower"
PREFIX = "model.vision_tower.vision_tower."  # of the tower's tensors in a checkpoint
SHOWN = 4  # names in a message


def trains_tower(path: str) -> bool:
    """Whether the vision tower is part of the checkpoint in a folder."""
    file = Path(path) / "config.json"
    return bool(file.is_file() and json.loads(file.read_text()).get(FLAG, False))


def load_own_tower(path: str, model: Any) -> None:
    """Puts the checkpoint's tower weights into a model that was loaded with another tower.

    Raises:
        DataError: where the checkpoint has none, or they are not those of this tower.
    """
    tower = model.get_vision_tower().vision_tower
    tower_state = tower.state_dict()
    bare = not any(name.startswith("vision_model.") for name in tower_state)  # transformers 5 has one level less
    tensors = {name.removeprefix("vision_model.") if bare else name: values for name, values in _tensors(Path(path))}
    tensors = {
        name: values for name, values in tensors.items() if name in tower_state or not name.endswith("position_ids")
    }
    missing, surplus = sorted(tower_state.keys() - tensors.keys()), sorted(tensors.keys() - tower_state.keys())
    missing = [name for name in missing if not name.endswith("position_ids")]
    shapes = [name for name in tensors.keys() & tower_state.keys() if tensors[name].shape != tower_state[name].shape]
    if missing or surplus or shapes:
        raise DataError(
            f"model={path!r}: config.json says that its vision tower was trained ({FLAG}), but the tower's weights do "
            f"not fit: {len(missing)} missing, {len(surplus)} left over, {len(shapes)} of another shape "
            f"({', '.join([*missing, *surplus, *shapes][:SHOWN])}). Fetch the whole checkpoint again"
        )
    tower.load_state_dict(tensors, strict=False)
    setattr(model.config, FLAG, True)


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tower's tensors in the weight files of a checkpoint, by their names in the tower."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name.startswith(PREFIX):
                    yield name.removeprefix(PREFIX), file.get_tensor(name)
    for path in sorted(folder.glob("pytorch_model*.bin")):
        weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        for name, values in weights.items():
            if name.startswith(PREFIX):
                yield name.removeprefix(PREFIX), values
