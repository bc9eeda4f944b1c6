"""Train the photograph model from nothing but the network, or go on where it was stopped.

    python -m playground.photo.recipe [--seed 1] [--jittered 0.5]

Fetches and converts the parts, caches the tower's features in a process beside, aligns the projector, trains, and
writes the adapter to `--out`. Everything lies in `PHOTO_WORK` and every stage goes on where it was stopped. With a GPU:
27,000 pictures of 336 pixels, as the committed adapter was trained. Without one 2,100 pictures, of 168
pixels first, in about 70 core-minutes: a smaller model of the same recipe.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from llava_consensus.errors import DataError
from playground.photo import align, checkpoint, features, parts, train
from playground.photo.paths import CHECKPOINT, WORK
from playground.photo.train import Stage

SMALL, WHOLE = 168, 336
ENOUGH = {SMALL: 3000, WHOLE: 400}  # scenes of which features are there before the projector is aligned
HELD = 200
ON_CPU = (Stage(SMALL, 0, 930, (1.0, 0.4)), Stage(WHOLE, 930, 1046, (0.5, 0.0), drilled=0.3, scenes=1600))
ON_GPU = (Stage(WHOLE, 0, 1106, (1.0, 0.0), drilled=0.5, size=24, scenes=40_000),)


def stages() -> tuple[Stage, ...]:
    """Those of this machine."""
    return ON_CPU if features.device().type == "cpu" else ON_GPU


def cache() -> None:
    """Make the features of all stages, those that are needed first first."""
    for side in (SMALL, WHOLE):
        features.make("val", side, HELD)
        features.make("train", side, ENOUGH[side])
    for stage in stages():
        features.make("train", stage.side, stage.scenes)


def wait_for(side: int, scenes: int, beside: subprocess.Popen[bytes]) -> None:
    """Wait until the process beside has made the features of so many scenes."""
    last = features.shard_path("train", side, scenes // features.SHARD - 1)
    while not last.exists():
        if beside.poll():
            raise DataError(f"the features could not be made (exit status {beside.returncode}): see above")
        time.sleep(2)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the adaptation (%(default)s)")
    parser.add_argument("--out", type=Path, default=CHECKPOINT, help="folder of the adapter (%(default)s)")
    parser.add_argument("--jittered", type=float, default=0.0, help="share of steps with fewer patches at jittered "
                        "positions (%(default)s)")  # fmt: skip
    parser.add_argument("--only", choices=("features",), help="what the process beside does")
    given = parser.parse_args()
    try:
        if given.only:
            cache()
            return
        parts.fetch_photographs()
        parts.converted()
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "playground.photo.recipe", "--only", "features"]
        beside = subprocess.Popen(command, env=one_thread)
        try:
            wait_for(WHOLE, ENOUGH[WHOLE], beside)
            if not (WORK / "projector.pt").exists():
                align.align(1500, 6000)
            for stage in stages():
                if stage.side == WHOLE:
                    wait_for(stage.side, stage.scenes, beside)
                train.train(replace(stage, jittered=given.jittered), given.seed)
        finally:
            beside.terminate()
        checkpoint.write_adapter(given.out, given.seed)
    except DataError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
