"""Weight files of a checkpoint, of safetensors or pickled, read one tensor at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from llava_consensus.errors import DataError

FORMATS = ("*.safetensors", "pytorch_model*.bin")


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder, of the first format there is. DataError for none."""
    for pattern in FORMATS:
        if files := sorted(folder.glob(pattern)):
            return files
    raise DataError(f"{folder}: no {' or '.join(FORMATS)} in it")


def tensors_of(file: Path, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file whose names begin so; of a pickled file nothing is executed."""
    if file.suffix == ".bin":
        weights: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        yield from ((name, values) for name, values in weights.items() if name.startswith(prefix))
        return
    with safe_open(file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            if name.startswith(prefix):
                yield name, opened.get_tensor(name)
