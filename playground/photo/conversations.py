"""Write training scenes in LLaVA's data format, as `playground/mini/conversations.py` does of the generated ones.

    python -m playground.photo.conversations --out playground/photo-train --scenes 100

Each entry of `conversations.json` is one picture with a question of each kind it supports. The scenes are of the
training split, from a part of it that the adapter has not seen, and never those of the benchmarks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from playground.mini.benchmarks.files import write_json
from playground.mini.conversations import IMAGES, NAME, conversation
from playground.mini.questions import QA
from playground.photo.measure import KINDS
from playground.photo.questions import prompt
from playground.photo.scenes import render, scene
from playground.photo.sequences import one_of_each

FIRST = 1_000_000  # training scenes below it may have been shown to the model


def write(out: Path, scenes: int) -> Path:
    """`conversations.json` and `images/` in a folder; returns the file."""
    entries = []
    (out / IMAGES).mkdir(parents=True, exist_ok=True)
    for index in range(FIRST, FIRST + scenes):
        asked = [qa for qa, _ in one_of_each(KINDS, "train", index) if isinstance(qa, QA)]
        turns = [{"question": prompt(qa), "answer": qa.answer, "kind": qa.kind} for qa in asked]
        entries.append(conversation(str(index), f"{index}.jpg", turns))
        render(scene("train", index))[0].save(out / IMAGES / f"{index}.jpg", quality=92)
    write_json(out / NAME, entries)
    return out / NAME


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("playground/photo-train"))
    parser.add_argument("--scenes", type=int, default=100)
    given = parser.parse_args()
    print(write(given.out, given.scenes))
