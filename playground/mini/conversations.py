"""Write training scenes in LLaVA's data format: one JSON file of conversations and a folder of pictures.

    python -m playground.mini.conversations --out playground/mini-train --scenes 400

The scenes are of the training split, from a part of it that no stage of the embedded model has seen, and never those of
the benchmarks. Each entry of `conversations.json` is one question about one picture with its answer, in the words of
the benchmarks (`forms.py`); `--turns` puts several questions about a picture into one conversation. The same files come
out every time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

from playground.mini.forms import MIX, WRITERS
from playground.mini.scenes import render, scene
from playground.mini.styles import prompt, training_questions

FIRST = 2_000_000  # training scenes below it may have been shown to the embedded model
SHORT_ANSWER = 24  # characters: answers of a word or a few, which is what the benchmarks of the model ask for
READING = 6.0  # weight of questions about signs, as in the last stage of the embedded model
NAME, IMAGES = "conversations.json", "images"


def about(index: int, number: int, reading: float) -> list[dict[str, str]]:
    """Questions and short answers about a training scene, at most `number` of them."""
    made = training_questions(scene("train", index), random.Random(index), 24, {**MIX, "reading": reading}, WRITERS)
    short = [qa for qa in made if len(qa.answer) <= SHORT_ANSWER]
    return [{"question": prompt(qa), "answer": qa.answer, "kind": qa.kind} for qa in short[:number]]


def conversation(name: str, picture: str, asked: list[dict[str, str]]) -> dict[str, Any]:
    turns = []
    for place, one in enumerate(asked):
        turns += [
            {"from": "human", "value": ("<image>\n" if place == 0 else "") + one["question"]},
            {"from": "gpt", "value": one["answer"]},
        ]
    return {"id": name, "image": picture, "conversations": turns}


def entries(index: int, number: int, turns: int, reading: float) -> list[dict[str, Any]]:
    """The conversations about one scene, of `turns` questions each, `number` questions in all."""
    asked = about(index, number, reading)
    parts = [asked[first : first + turns] for first in range(0, len(asked), turns)]
    return [conversation(f"{index}-{place}", f"{index}.png", part) for place, part in enumerate(parts)]


def draw(index: int, folder: Path) -> None:
    path = folder / f"{index}.png"
    if not path.exists():
        part = folder / f".{index}.part"
        with part.open("wb") as file:
            render(scene("train", index), scale=1).save(file, "PNG")
        os.replace(part, path)


def write(out: Path, scenes: int, number: int = 6, turns: int = 1, reading: float = READING) -> Path:
    """The data of so many scenes; the path of the JSON file, which is written last.

    Args:
        out: folder that gets `conversations.json` and `images/`.
        scenes: how many training scenes.
        number: questions about each.
        turns: of them in one conversation.
        reading: weight of questions about signs among them.
    """
    images = out / IMAGES
    images.mkdir(parents=True, exist_ok=True)
    indices = range(FIRST, FIRST + scenes)
    for index in indices:
        draw(index, images)
    lines = [entry for index in indices for entry in entries(index, number, turns, reading)]
    path, part = out / NAME, out / f".{NAME}.part"
    part.write_text(json.dumps(lines, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(part, path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("playground/mini-train"), help="folder (%(default)s)")
    parser.add_argument("--scenes", type=int, default=400, help="training scenes (%(default)s)")
    parser.add_argument("--questions", type=int, default=6, help="questions about each (%(default)s)")
    parser.add_argument("--turns", type=int, default=1, help="of them in one conversation (%(default)s)")
    parser.add_argument("--reading", type=float, default=READING, help="weight of questions about signs (%(default)s)")
    given = parser.parse_args()
    path = write(given.out, given.scenes, given.questions, given.turns, given.reading)
    print(f"{path}: {len(json.loads(path.read_text(encoding='utf-8')))} conversations about {given.scenes} pictures")


if __name__ == "__main__":
    main()
