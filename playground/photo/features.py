"""Cached features of the frozen tower: what feeds the projector, and what each patch shows.

    python -m playground.photo.features --split train --side 168 --scenes 6000

Files lie in `PHOTO_WORK/features`; a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
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


def device() -> torch.device:
    """Where models are run: a GPU where torch sees one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def sized(image: Image.Image, side: int) -> np.ndarray:
    """A picture as uint8 [side, side, 3]."""
    return np.array(image if image.width == side else image.resize((side, side), Image.Resampling.BICUBIC))


def pixels(images: Sequence[np.ndarray]) -> torch.Tensor:
    """Normalised pixels [B, 3, side, side] of pictures as `sized` makes them, as the checkpoint's processor makes
    them.
    """
    values = torch.from_numpy(np.stack(images)).to(device()).permute(0, 3, 1, 2).float() / 255
    return (values - values.new_tensor(MEAN).view(3, 1, 1)) / values.new_tensor(STD).view(3, 1, 1)


def load_tower() -> torch.nn.Module:
    """The converted tower without its last block, which LLaVA's layer -2 does not read, in bfloat16."""
    from transformers import Dinov2Model

    model = Dinov2Model.from_pretrained(converted() / "tower").eval()
    model.encoder.layer = model.encoder.layer[:-1]
    return model.to(device(), torch.bfloat16)


@torch.no_grad()
def encode(tower: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Patch features [B, n, 384], float16."""
    out = tower(batch.to(torch.bfloat16), output_hidden_states=True)
    return out.hidden_states[-1][:, 1:].half().cpu()


def shard_path(split: str, side: int, number: int) -> Path:
    """Where the features of a shard of `SHARD` scenes lie; what the patches show is in a file beside it."""
    return WORK / "features" / f"{split}-{side}-{number:04d}.npy"


def drawn(split: str, side: int, index: int) -> tuple[np.ndarray, np.ndarray]:
    """The picture of a scene, and what its patches show, uint8 [n]."""
    image, labels = render(scene(split, index))
    return sized(image, side), patch_labels(labels, side // 14).astype(np.uint8)


def make(split: str, side: int, scenes: int) -> None:
    """Write the shards that are missing; beside a GPU every core draws pictures."""
    (WORK / "features").mkdir(parents=True, exist_ok=True)
    missing = [n for n in range(-(-scenes // SHARD)) if not shard_path(split, side, n).exists()]
    if not missing:
        return
    cores, size = (len(os.sched_getaffinity(0)), SHARD // 2) if device().type == "cuda" else (1, 8)
    with ProcessPoolExecutor(cores) as pool:
        ahead = [_ask(pool, split, side, number) for number in missing[:2]]  # a shard is drawn while one is encoded
        tower = load_tower()
        for place, number in enumerate(missing):
            images, labels = zip(*ahead.pop(0), strict=True)
            ahead += [_ask(pool, split, side, later) for later in missing[place + 2 : place + 3]]
            parts = [encode(tower, pixels(images[first : first + size])) for first in range(0, SHARD, size)]
            path = shard_path(split, side, number)
            np.save(path.with_suffix(".labels.npy"), np.stack(labels))
            part = path.with_suffix(".part.npy")
            np.save(part, torch.cat(parts).numpy())
            part.rename(path)
            print(path.name, flush=True)


def _ask(pool: ProcessPoolExecutor, split: str, side: int, number: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    return pool.map(partial(drawn, split, side), range(number * SHARD, (number + 1) * SHARD), chunksize=5)


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
    """Features [B, n, 384] of some scenes, float16."""
    return torch.stack([torch.from_numpy(np.array(shards[i // SHARD][i % SHARD])) for i in indices])


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
