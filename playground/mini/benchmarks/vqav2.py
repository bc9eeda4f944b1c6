"""Mini VQAv2: a test-dev list, the longer test2015 list it is part of, and annotations, so that it can be scored too.

Of the real test-dev the annotations are not published; the mini file has the name and the layout they would have. Ten
people answered: mostly the same, sometimes with an article, a colour or another count.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from playground.mini.benchmarks.files import line, picture, scenes, write_json, write_lines
from playground.mini.questions import GQA_MIX, QA, SHORT, View, article, write

HELD_OUT = 6  # every sixth picture is in test2015 but not in test-dev
SUBTYPE = "test-dev2015"
TYPES = ("how many", "what color is the", "what is the color of the", "what kind of", "what is the", "what is",
         "is there a", "is there", "are there any", "do you", "is the", "what", "which")  # fmt: skip
KINDS = {"yes": "yes/no", "no": "yes/no"}


def question_type(text: str) -> str:
    """The first words as the official list has them: the longest that fit."""
    low = text.lower() + " "
    fitting = [one for one in TYPES if low.startswith(one + " ")]
    return max(fitting, key=len, default="none of the above")


def people(qa: QA, rng: random.Random) -> list[str]:
    """Ten answers: at least seven are the right one."""
    other = qa.answer
    if qa.answer.isdigit():
        other = str(max(0, int(qa.answer) + rng.choice((-1, 1))))
    elif qa.structural == "query" and qa.kind != "attribute":
        other = article(qa.answer)
    odd = rng.choice((0, 0, 0, 1, 2, 3)) if other != qa.answer else 0
    answers = [qa.answer] * (10 - odd) + [other] * odd
    rng.shuffle(answers)
    return answers


def annotation(question_id: int, qa: QA, rng: random.Random) -> dict[str, Any]:
    """An entry of the official annotation file."""
    answers = [{"answer": text, "answer_confidence": rng.choice(("yes", "yes", "maybe")), "answer_id": number}
               for number, text in enumerate(people(qa, rng), start=1)]  # fmt: skip
    return {
        "question_type": question_type(qa.question),
        "multiple_choice_answer": qa.answer,
        "answers": answers,
        "image_id": question_id // 1000,
        "answer_type": "number" if qa.answer.isdigit() else KINDS.get(qa.answer, "other"),
        "question_id": question_id,
    }


def asked(view: View, rng: random.Random) -> list[QA]:
    """One question of every kind the scene supports."""
    made = [write(view, kind, rng) for kind in GQA_MIX]
    return list({qa.question: qa for qa in made if qa}.values())


def build_vqav2(folder: Path, split: str = "test") -> None:
    """VQAv2: `llava_vqav2_mscoco_{test-dev2015,test2015}.jsonl`, annotations and questions of test-dev, `test2015`."""
    every: list[dict[str, Any]] = []
    dev: list[dict[str, Any]] = []
    questions: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, (index, shown) in enumerate(scenes("vqav2", split)):
        view, rng, image_id = View(shown), random.Random(index), 100_000 + index
        image = f"COCO_test2015_{image_id:012d}.jpg"
        picture(folder / "test2015" / image, view.scene)
        for place, qa in enumerate(asked(view, rng)):
            question_id = image_id * 1000 + place
            every.append(line(question_id, image, f"{qa.question}\n{SHORT}"))
            if number % HELD_OUT == HELD_OUT - 1:
                continue
            dev.append(every[-1])
            questions.append({"image_id": image_id, "question": qa.question, "question_id": question_id})
            annotations.append(annotation(question_id, qa, rng))
    write_lines(folder / "llava_vqav2_mscoco_test2015.jsonl", every)
    write_lines(folder / "llava_vqav2_mscoco_test-dev2015.jsonl", dev)
    head = {
        "info": {"description": "Mini twin of VQA v2.0", "version": "2.0", "year": 2026},
        "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        "data_subtype": SUBTYPE,
        "data_type": "mscoco",
        "task_type": "Open-Ended",
    }
    write_json(folder / f"v2_OpenEnded_mscoco_{SUBTYPE}_questions.json", {**head, "questions": questions})
    write_json(folder / f"v2_mscoco_{SUBTYPE}_annotations.json", {**head, "annotations": annotations})
