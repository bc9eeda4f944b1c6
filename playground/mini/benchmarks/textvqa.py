"""Mini TextVQA: what the sign says, ten equal answers each; the OCR line is empty, as no OCR system was run."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

from playground.mini.benchmarks.files import TEST, line, picture, write_json, write_lines
from playground.mini.questions import QA, View
from playground.mini.scenes import scene
from playground.mini.styles import prompt, reading

TEXT_QUESTIONS = 320


def build_textvqa(folder: Path, split: str = "test") -> None:
    """TextVQA: `llava_textvqa_val_v051_ocr.jsonl`, `TextVQA_0.5.1_val.json`, `train_images`; no OCR system was run."""
    lines: list[dict] = []
    records: list[dict] = []
    for index in TEST["textvqa"]:
        view, rng = View(scene(split, index)), random.Random(index)
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
