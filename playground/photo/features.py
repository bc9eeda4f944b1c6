"""Cached features of the frozen tower: what feeds the projector, and what each patch shows.

    python -m playground.photo.features --split train --side 168 --scenes 6000

Files lie in `PHOTO_WORK/features`; a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from llava_consensus.errors import DataError
from playground.photo.parts import converted
from playground.photo.paths import WORK
from playground.photo.scenes import patch_labels, render, scene

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SHARD, WIDTH = 200, 384


def pixels(image: Image.Image, side: int) -> torch.Tensor:
    """Normalised pixels [3, side, side], as the checkpoint's processor makes them."""
    if image.width != side:
        image = image.resize((side, side), Image.Resampling.BICUBIC)
    values = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    return (values - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def load_tower() -> torch.nn.Module:
    """The converted tower without its last block, which LLaVA's layer -2 does not read, in bfloat16."""
    from transformers import Dinov2Model

    model = Dinov2Model.from_pretrained(converted() / "tower").eval()
    model.encoder.layer = model.encoder.layer[:-1]
    return model.to(torch.bfloat16)


@torch.no_grad()
def encode(tower: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Patch features [B, n, 384], float16."""
    out = tower(batch.to(torch.bfloat16), output_hidden_states=True)
    return out.hidden_states[-1][:, 1:].half()


def shard_path(split: str, side: int, number: int) -> Path:
    """Where the features of a shard of `SHARD` scenes lie; what the patches show is in a file beside it."""
    return WORK / "features" / f"{split}-{side}-{number:04d}.npy"


def make(split: str, side: int, scenes: int, size: int = 8) -> None:
    """Write the shards that are missing."""
    (WORK / "features").mkdir(parents=True, exist_ok=True)
    tower = None
    for number in range(-(-scenes // SHARD)):
        path = shard_path(split, side, number)
        if path.exists():
            continue
        tower = tower or load_tower()
        drawn = [render(scene(split, number * SHARD + k)) for k in range(SHARD)]
        parts = [
            encode(tower, torch.stack([pixels(image, side) for image, _ in drawn[first : first + size]])).numpy()
            for first in range(0, SHARD, size)
        ]
        labels = np.stack([patch_labels(known, side // 14) for _, known in drawn])
        np.save(path.with_suffix(".labels.npy"), labels.astype(np.uint8))
        part = path.with_suffix(".part.npy")
        np.save(part, np.concatenate(parts))
        part.rename(path)
        print(path.name, flush=True)


def opened(split: str, side: int, scenes: int) -> list[np.ndarray]:
    """Features [SHARD, n, 384] of the shards that are there, read from disk when they are used.

    Raises:
        DataError: where there are none.
    """
    paths = [shard_path(split, side, number) for number in range(-(-scenes // SHARD))]
    found = [np.load(path, mmap_mode="r") for path in itertools.takewhile(Path.exists, paths)]
    if not found:
        raise DataError(
            f"{paths[0]}: is missing. Run python -m playground.photo.features --split {split} --side {side}"
        )
    return found


def take(shards: list[np.ndarray], indices: Iterable[int]) -> torch.Tensor:
    """Features [B, n, 384] of some scenes, float32."""
    return torch.stack([torch.from_numpy(np.array(shards[i // SHARD][i % SHARD])) for i in indices]).float()


def load_labels(split: str, side: int, shards: int) -> np.ndarray:
    """What each patch shows, uint8 [N, n]."""
    numbers = range(shards)
    return np.concatenate([np.load(shard_path(split, side, n).with_suffix(".labels.npy")) for n in numbers])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", default="train", choices=("train", "val"))
    parser.add_argument("--side", type=int, default=168, help="pixels of a picture (%(default)s)")
    parser.add_argument("--scenes", type=int, default=6000, help="how many (%(default)s)")
    given = parser.parse_args()
    make(given.split, given.side, given.scenes)


if __name__ == "__main__":
    main()
