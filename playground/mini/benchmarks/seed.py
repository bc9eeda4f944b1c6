"""Mini SEED-Bench: twelve types, nine about pictures and three about clips, of which the middle frame is shown.

Four options always. Names of pictures have no ending, ids of pictures are numbers in LLaVA's list and digits as text
in the annotations, and ids of clips begin with a `v`, all as in the official files.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from playground.mini.benchmarks.choices import LETTERS, Choice, choose
from playground.mini.benchmarks.files import TEST, line, picture, write_json, write_lines
from playground.mini.clips import FRAMES, clip
from playground.mini.questions import View
from playground.mini.scenes import scene
from playground.mini.styles import LETTER

TYPES = {
    "Scene Understanding": 1, "Instance Identity": 2, "Instance Attributes": 3, "Instance Location": 4,
    "Instances Counting": 5, "Spatial Relation": 6, "Instance Interaction": 7, "Visual Reasoning": 8,
    "Text Understanding": 9, "Action Recognition": 10, "Action Prediction": 11, "Procedure Understanding": 12,
}  # fmt: skip
KINDS = {1: "theme", 2: "identity", 3: "colour", 4: "place", 5: "counting", 6: "side", 7: "nearest", 8: "member",
         9: "sign", 10: "identity", 11: "identity", 12: "missing"}  # fmt: skip
WORDING = {
    10: "Which object takes part in the action?",
    11: "Which object will be seen in the next moment?",
    12: "Which object does not take part in the action?",
}
PER_TYPE, PER_CLIP_TYPE = 36, 28
FIRST_ID = 101_669


def annotated(question_id: str, kind: int, choice: Choice, data_id: str) -> dict[str, Any]:
    """An entry of `SEED-Bench.json`."""
    options = {f"choice_{letter.lower()}": text for letter, text in zip(LETTERS, choice.options, strict=False)}
    entry: dict[str, Any] = {
        "answer": choice.letter, **options, "data_id": data_id, "data_type": "video" if kind > 9 else "image",
        "question": WORDING.get(kind, choice.question), "question_id": question_id, "question_type_id": kind,
    }  # fmt: skip
    return entry | ({"segment": [0.0, float(FRAMES)]} if kind > 9 else {})


def asked(entry: dict[str, Any], image: str) -> dict[str, Any]:
    """The line of LLaVA's list."""
    options = "\n".join(f"{letter}. {entry[f'choice_{letter.lower()}']}" for letter in LETTERS[:4])
    names = {number: name for name, number in TYPES.items()}
    key = entry["question_id"]
    text = f"{entry['question']}\n{options}\n{LETTER}"
    return line(int(key) if key.isdigit() else key, image, text, names[entry["question_type_id"]])


def image_questions(folder: Path) -> list[tuple[dict[str, Any], str]]:
    """Up to `PER_TYPE` questions of each of the types 1 to 9, two types a picture."""
    rows: list[tuple[dict[str, Any], str]] = []
    left = dict.fromkeys(range(1, 10), PER_TYPE)
    for index in TEST["seed_bench"]:
        view, rng = View(scene("test", index)), random.Random(index)
        wanted = sorted((kind for kind in left if left[kind]), key=lambda kind: (-left[kind], kind))
        found = [(kind, choose(view, KINDS[kind], rng, exactly=True)) for kind in wanted]
        name = f"{index}_{index * 7919 % 10**6}"
        taken = [(kind, choice) for kind, choice in found if choice][:2]
        for kind, choice in taken:
            left[kind] -= 1
            entry = annotated(str(FIRST_ID + 3 * len(rows)), kind, choice, name)
            rows.append((entry, f"SEED-Bench-image/{name}"))
        if taken:
            picture(folder / "SEED-Bench-image" / name, view.scene)
    return rows


def clip_questions(folder: Path) -> list[tuple[dict[str, Any], str]]:
    """`PER_CLIP_TYPE` questions of each of the types 10 to 12, asked on the middle frame of a clip."""
    rows: list[tuple[dict[str, Any], str]] = []
    for number, index in enumerate(TEST["seed_clips"]):
        kind = 10 + number % 3
        middle = clip("test", index).at(FRAMES // 2)
        choice = choose(View(middle), KINDS[kind], random.Random(index), exactly=True)
        if choice is None or len(rows) >= 3 * PER_CLIP_TYPE:
            continue
        image = f"SEED-Bench-video-image/{kind}_v{len(rows)}.png"
        rows.append((annotated(f"v{len(rows)}", kind, choice, f"clip_{index}.mp4"), image))
        picture(folder / image, middle)
    return rows


def build_seed(folder: Path) -> None:
    """SEED-Bench: `llava-seed-bench.jsonl`, `SEED-Bench.json`, `SEED-Bench-image`, `SEED-Bench-video-image`."""
    rows = image_questions(folder) + clip_questions(folder)
    write_json(folder / "SEED-Bench.json", {"question_type": TYPES, "questions": [entry for entry, _ in rows]})
    write_lines(folder / "llava-seed-bench.jsonl", [asked(entry, image) for entry, image in rows])
