"""Scores of the model card: what the assembled checkpoint answers to the letter about held-out scenes.

    python -m playground.photo.measure [--split unseen] [--scenes 400]

All 576 tokens. Beside each score: chance, and the same questions without a picture.
"""

from __future__ import annotations

import argparse
import collections
import sys
from pathlib import Path
from typing import Any

import torch

from playground.mini.questions import QA
from playground.photo.catalogue import NAMES
from playground.photo.features import device, pixels, sized
from playground.photo.paths import CHECKPOINT
from playground.photo.questions import NUMBERS, WRITERS
from playground.photo.scenes import PIXELS, QUADRANTS, render, scene, shown_in
from playground.photo.sequences import Drill, Encoder, one_of_each, pack, right

ANSWERS = {"place": len(QUADRANTS), "count": len(NUMBERS), "category": len(NAMES), "relation": len(NAMES), "letter": 4}
KINDS = [kind for kind in WRITERS if kind not in ("description", "grounding")]


def chance(qa: QA | Drill) -> float:
    """What guessing among the answers that fit scores."""
    if isinstance(qa, Drill):
        raise TypeError("a drill is no question")
    return 1 / ANSWERS.get(qa.kind, len(NAMES)) if qa.structural == "query" else 0.5


@torch.no_grad()
def measure(model: Any, encoder: Encoder, split: str, scenes: int, size: int = 4) -> dict[str, list[list[float]]]:
    """For each kind a row for each question: right, chance, right without the picture."""
    rows: dict[str, list[list[float]]] = collections.defaultdict(list)
    known = [name for name in shown_in(split) if name in shown_in("train")] if split == "unseen" else None
    language, head, width = model.model.language_model, model.lm_head, model.config.text_config.hidden_size
    for first in range(0, scenes, size):
        indices = range(first, min(first + size, scenes))
        asked = [one_of_each(KINDS, split, index, known) for index in indices]
        pictures = pixels([sized(render(scene(split, index))[0], PIXELS) for index in indices])
        seen = torch.stack(list(model.model.get_image_features(pixel_values=pictures).pooler_output))
        batch = pack(asked, seen.shape[1], encoder).to(seen.device)
        blind = pack(asked, 0, encoder).to(seen.device)
        answers = right(language, head, seen, batch), right(language, head, seen.new_zeros(len(asked), 0, width), blind)
        for questions, hits, guesses in zip(batch.asked, *answers, strict=True):
            for qa, hit, guess in zip(questions, hits, guesses, strict=True):
                rows[qa.kind].append([float(hit), chance(qa), float(guess)])
        print(f"{indices.stop}/{scenes} pictures", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=CHECKPOINT, help="assembled checkpoint (%(default)s)")
    parser.add_argument("--split", choices=("val", "test", "unseen"), default="test", help="which scenes (%(default)s)")
    parser.add_argument("--scenes", type=int, default=400, help="pictures (%(default)s)")
    given = parser.parse_args()
    if not (given.model / "config.json").exists():
        raise SystemExit(f"error: {given.model}: no checkpoint. Run make checkpoint-photo")
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    model = AutoModelForImageTextToText.from_pretrained(given.model).eval().to(device())
    encoder = Encoder(AutoTokenizer.from_pretrained(given.model))
    rows = measure(model, encoder, given.split, given.scenes)
    print(f"| kind | right, % | chance | without the picture | pictures |\n|{'---|' * 5}")
    for kind in KINDS:
        if rows[kind]:
            shares = [100 * sum(column) / len(rows[kind]) for column in zip(*rows[kind], strict=True)]
            print(f"| {kind} | " + " | ".join(f"{share:.1f}" for share in shares) + f" | {len(rows[kind])} |")


if __name__ == "__main__":
    main()
