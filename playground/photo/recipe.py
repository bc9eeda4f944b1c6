"""Train the photograph model from nothing but the network, or go on where it was stopped.

    python -m playground.photo.recipe

Fetches and converts the parts, caches the tower's features in a process beside, aligns the projector, trains at 168
pixels and then at 336, and writes the adapter to `checkpoints/llava-photo`. Everything lies in `PHOTO_WORK` and every
stage goes on where it was stopped. About 70 core-minutes; `--steps` makes it longer or shorter.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from llava_consensus.errors import DataError
from playground.photo import align, checkpoint, features, parts, train
from playground.photo.paths import CHECKPOINT, WORK

SMALL, WHOLE = 168, 336
SCENES = {SMALL: 6000, WHOLE: 1600}
ENOUGH = {SMALL: 3000, WHOLE: 400}  # scenes of which features are there before the projector is aligned
HELD = 200


def cache() -> None:
    """Make the features of all stages, those that are needed first first."""
    for side in (SMALL, WHOLE):
        features.make("val", side, HELD)
        features.make("train", side, ENOUGH[side])
    for side in (SMALL, WHOLE):
        features.make("train", side, SCENES[side])


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
    parser.add_argument("--steps", type=int, default=930, help="at 168 pixels; an eighth of it at 336 (%(default)s)")
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
            if not any(path.exists() for path in (WORK / "projector.pt", CHECKPOINT / checkpoint.ADAPTER)):
                align.align(1500, SCENES[SMALL])
            train.train(SMALL, 0, given.steps, (1.0, 0.4))
            wait_for(WHOLE, SCENES[WHOLE], beside)
            train.train(WHOLE, given.steps, given.steps + given.steps // 8, (0.5, 0.0), drilled=0.3)
        finally:
            beside.terminate()
        checkpoint.write_adapter()
    except DataError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
