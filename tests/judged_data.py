"""MM-Vet and a video QA set with a handful of questions each, in the official layout and file formats."""

import json
from pathlib import Path
from typing import Any

from tiny_data import write_lines

VIDEO = "eval/GPT_Zero_Shot_QA/MSVD_Zero_Shot_QA"
SAMPLES = [  # question, answer, capabilities
    ("What is x?", "-1<AND>-5", ["ocr", "math"]),
    ("Which animal?", "dog<OR>a dog", ["rec"]),
    ("Where is the dog?", "left", ["rec", "spat"]),
    ("What does the sign say?", "stop", ["ocr"]),
    ("Tell a story.", "once upon a time", ["rec", "gen", "know"]),
]


def make_mmvet(data: Path) -> Path:
    """Five samples; the question file as LLaVA has it, the gold file as MM-Vet has it."""
    asked, gold = [], {}
    for number, (question, answer, capability) in enumerate(SAMPLES):
        image = f"v1_{number}.png"
        asked.append({"image": image, "text": question, "category": "conv", "question_id": number})
        gold[f"v1_{number}"] = {
            "imagename": image,
            "question": question,
            "answer": answer,
            "capability": capability,
            "imagesource": "here",
        }
    write_lines(data / "eval/mm-vet/llava-mm-vet.jsonl", asked)
    (data / "eval/mm-vet/mm-vet.json").write_text(json.dumps(gold))
    return data


def make_msvd(data: Path, count: int = 6) -> Path:
    """Questions on three videos, answers with ids by position; two videos are there."""
    asked: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    for number in range(count):
        name = f"clip{number % 3}"
        key = f"v_{name}_{number}"
        asked.append({"video_name": name, "question_id": key, "question": f"what does number {number} do?"})
        answers.append({"answer": f"act {number}", "type": 0, "question_id": key})
    folder = data / VIDEO
    (folder / "videos").mkdir(parents=True)
    (folder / "test_q.json").write_text(json.dumps(asked))
    (folder / "test_a.json").write_text(json.dumps(answers))
    (folder / "videos/clip0.avi").write_bytes(b"")
    (folder / "videos/clip1.gif").write_bytes(b"")
    (folder / "videos/clip1.mkv").write_bytes(b"")
    return data
