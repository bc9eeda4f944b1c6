"""A pool of drawn training scenes on disk, so that the tower never waits for a renderer.

    python -m playground.mini.pool dense 14000        # 9 to 14 objects, for the tower's first stage
    python -m playground.mini.pool signs 5000         # fewer objects and a long sign, for its first stage too
    python -m playground.mini.pool scene 8000         # scenes as the benchmarks have them

Shards hold 1,000 scenes: images uint8 [1000, 192, 192, 3] and patch labels int8 [1000, 7, 24, 24]. Scene i of a pool
is always the same scene; a finished shard is never drawn again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

from playground.mini.labels import label
from playground.mini.scenes import SPLITS, Scene, padded, render, sample, scene

SHARD = 1000
DENSE_SEED, SIGNS_SEED = SPLITS["train"] + 5 * 10**8, SPLITS["train"] + 6 * 10**8


def pooled_scene(kind: str, index: int) -> Scene:
    """Scene `index` of a pool; both pools draw from training seeds."""
    if kind == "dense":
        return sample(DENSE_SEED + index, least=9, most=14, sign_rate=0.9)
    if kind == "signs":
        return sample(SIGNS_SEED + index, least=3, most=7, sign_rate=1.0, lengths=(6, 7, 8))
    return scene("train", index)


def shard_path(work: Path, kind: str, number: int) -> Path:
    """Where a shard lies."""
    return work / "pool" / f"{kind}-{number:03d}.npz"


def picture(scene_: Scene, index: int) -> np.ndarray:
    """A scene as the tower is shown it, uint8 [192, 192, 3]; every sixth is drawn at twice the size first."""
    return np.asarray(padded(render(scene_, scale=2 if index % 6 == 0 else 1)))


def draw_shard(work: Path, kind: str, number: int) -> Path:
    """Draw one shard unless it is there."""
    path = shard_path(work, kind, number)
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    images, labels = [], []
    for index in range(number * SHARD, (number + 1) * SHARD):
        scene_ = pooled_scene(kind, index)
        images.append(picture(scene_, index))
        labels.append(label(scene_).packed())
    part = path.with_suffix(f".{os.getpid()}.part")
    with part.open("wb") as file:
        np.savez(file, images=np.stack(images), labels=np.stack(labels))
    os.replace(part, path)
    return path


def shards(work: Path, kinds: str) -> list[Path]:
    """The shards of some kinds (`dense+signs`) that are ready, in order."""
    return [p for kind in kinds.split("+") for p in sorted((work / "pool").glob(f"{kind}-[0-9][0-9][0-9].npz"))]


def load(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one shard."""
    with np.load(path) as data:
        return data["images"], data["labels"]


if __name__ == "__main__":
    from playground.mini.paths import WORK

    for wanted in range(int(sys.argv[2]) // SHARD):
        print(draw_shard(WORK, sys.argv[1], wanted), flush=True)
