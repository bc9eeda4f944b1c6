"""Mini POPE: six questions a picture and split, with random, popular and adversarial absent objects. Of the larger set
two, in two of the three splits.
"""

from __future__ import annotations

import collections
import random
from itertools import islice
from pathlib import Path

from playground.mini.benchmarks.files import line, picture, scenes, write_lines
from playground.mini.catalogue import NAMES
from playground.mini.questions import SHORT, View, article
from playground.mini.scenes import scene

POPE_IMAGES, POPE_IMAGES_LARGE = 50, 250
POPE_FIRST_ID = {"adversarial": 1, "random": 10_000_001, "popular": 20_000_001}


def company(scenes: int = 3000) -> tuple[collections.Counter, collections.Counter]:
    """How often objects occur, and occur together, in training scenes."""
    single: collections.Counter = collections.Counter()
    pairs: collections.Counter = collections.Counter()
    for index in range(scenes):
        names = {item.name for item in scene("train", index).items}
        single.update(names)
        pairs.update((a, b) for a in names for b in names if a != b)
    return single, pairs


def pope_negatives(present: list[str], split: str, rng: random.Random, counts: tuple) -> list[str]:
    """Three absent objects: any, the most frequent ones, or the ones that most often keep this company."""
    absent = [name for name in NAMES if name not in present]
    if split == "random":
        return rng.sample(absent, 3)
    single, pairs = counts
    if split == "popular":
        return sorted(absent, key=lambda name: -single[name])[:3]
    return sorted(absent, key=lambda name: -max(pairs[name, p] / single[p] for p in present))[:3]


def build_pope(folder: Path, split: str = "test") -> None:
    """POPE: `llava_pope_test.jsonl`, `coco/coco_pope_*.json`, `val2014`."""
    counts = company()
    large = split == "large"
    every = (View(shown) for _, shown in scenes("pope", split))
    views = list(islice((view for view in every if len(view.names) >= 4), POPE_IMAGES_LARGE if large else POPE_IMAGES))
    lines = []
    names = [f"COCO_val2014_{view.scene.seed % 10**9:012d}.jpg" for view in views]
    for place, (split, first) in enumerate(POPE_FIRST_ID.items()):
        labels: list[dict] = []
        for number, (view, image) in enumerate(zip(views, names, strict=True)):
            if large and number % 3 == place:
                continue
            rng = random.Random(f"{split}-{image}")
            present = random.Random(image).sample(sorted(view.names), 3)
            absent = pope_negatives(sorted(view.names), split, rng, counts)
            for yes, no in islice(zip(present, absent, strict=True), 1 if large else 3):
                for name, answer in ((yes, "yes"), (no, "no")):
                    text = f"Is there {article(name)} in the image?"
                    lines.append(line(first + len(labels), image, f"{text}\n{SHORT}", split))
                    labels.append({"question_id": len(labels) + 1, "image": image, "text": text, "label": answer})
        write_lines(folder / "coco" / f"coco_pope_{split}.json", labels)
    write_lines(folder / "llava_pope_test.jsonl", lines)
    for view, image in zip(views, names, strict=True):
        picture(folder / "val2014" / image, view.scene)
