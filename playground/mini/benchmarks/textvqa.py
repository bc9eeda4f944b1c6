"""Mini TextVQA: what the sign says, ten equal answers each. The OCR line is empty, as no OCR system was run: the sign
must be read. Of the larger set it is the same pictures and questions with the words beside, as LLaVA asks it, made up
to be as a bad OCR's are: some wrong in a character, some missing.
"""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

from playground.mini.benchmarks.files import TEST, line, picture, write_json, write_lines
from playground.mini.catalogue import SIGN_ALPHABET
from playground.mini.questions import QA, View
from playground.mini.scenes import scene
from playground.mini.styles import EMPTY, prompt, reading

TEXT_QUESTIONS = 320
WRONG, MISSING = 0.2, 0.15  # shares of signs of which a character is read wrong, or nothing


def read_words(text: str, image: str) -> str:
    """What an OCR says of a sign, the same for all questions about one picture."""
    rng = random.Random(f"ocr-{image}")
    roll, place, other = rng.random(), rng.randrange(len(text)), rng.choice(SIGN_ALPHABET)
    while other == text[place]:
        other = rng.choice(SIGN_ALPHABET)
    if roll < MISSING:
        return ""
    return text[:place] + other + text[place + 1 :] if roll < MISSING + WRONG else text


def build_textvqa(folder: Path, split: str = "test") -> None:
    """TextVQA: `llava_textvqa_val_v051_ocr.jsonl`, `TextVQA_0.5.1_val.json`, `train_images`."""
    with_words = split == "large"
    lines: list[dict] = []
    records: list[dict] = []
    for index in TEST["textvqa"]:
        view, rng = View(scene("test" if with_words else split, index)), random.Random(index)
        if view.scene.sign is None or len(records) >= TEXT_QUESTIONS:
            continue
        image = hashlib.md5(f"mini-{index}".encode()).hexdigest()[:16]
        asked = (reading(view, rng) for _ in range(rng.choice((1, 1, 2, 2, 2))))
        # the official scorer drops articles: of the answer "a" nothing would be left, and a full stop would be right
        made = {qa.question: qa for qa in asked if qa and qa.answer != "A"}
        if not made:
            continue
        picture(folder / "train_images" / f"{image}.jpg", view.scene)
        for qa in list(made.values())[: TEXT_QUESTIONS - len(records)]:
            text = prompt(QA(qa.kind, qa.question, qa.answer, style="read"))
            if with_words:
                text = text.replace(EMPTY, EMPTY + read_words(view.scene.sign.text, image))
            lines.append(line(image, f"{image}.jpg", text))
            records.append({
                "question": qa.question, "image_id": image, "image_classes": ["Sign"], "flickr_original_url": "",
                "flickr_300k_url": "", "image_width": view.scene.width * 2, "image_height": view.scene.height * 2,
                "answers": [qa.answer.lower()] * 10, "question_tokens": qa.question.rstrip("?").lower().split(),
                "question_id": 34602 + len(records), "set_name": "val",
            })  # fmt: skip
    head = {"dataset_type": "val", "dataset_name": "textvqa", "dataset_version": "0.5.1"}
    write_json(folder / "TextVQA_0.5.1_val.json", {**head, "data": records})
    write_lines(folder / "llava_textvqa_val_v051_ocr.jsonl", lines)
