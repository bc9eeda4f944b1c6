"""Mini GQA: about thirty questions a picture, answers balanced within their groups, with the official annotations. Of
the larger set five, one of each kind.
"""

from __future__ import annotations

import collections
import random
from pathlib import Path

from playground.mini.benchmarks.files import line, picture, scenes, write_json, write_lines
from playground.mini.questions import GQA_MIX, QA, SHORT, View, write

SEMANTIC = {"existence": "obj", "category": "cat", "attribute": "attr", "count": "global", "relation": "rel"}


def quota(number: int, large: bool) -> dict[str, int]:
    """How many questions of each kind picture `number` gets."""
    if large:
        return dict.fromkeys(GQA_MIX, 1)
    return {"existence": 6 + number % 2, "category": 8 - number % 2, "attribute": 6, "count": 4, "relation": 6}


def gqa_questions(view: View, rng: random.Random, used: collections.Counter, most: dict[str, int]) -> list[QA]:
    """Questions on one scene, `most` of each kind, taking answers that their group has seen least."""
    chosen: list[QA] = []
    for kind in GQA_MIX:
        found = {qa.question: qa for qa in (write(view, kind, rng, 1) for _ in range(150)) if qa}
        for _ in range(most[kind]):
            if not found:
                break
            form = rng.choice(sorted({qa.detailed for qa in found.values()}))
            fitting = [qa for qa in found.values() if qa.detailed == form]
            best = min(fitting, key=lambda qa: (used[qa.kind, qa.detailed, qa.answer], rng.random()))
            used[best.kind, best.detailed, best.answer] += 1
            chosen.append(found.pop(best.question))
    return chosen


def gqa_record(qa: QA, view: View, image: str) -> dict:
    """An entry of the official question file."""
    named = [view.items[k].name for k in qa.named]
    steps: list[dict] = [
        {"operation": "select", "dependencies": [], "argument": f"{name} ({k})"}
        for k, name in zip(qa.named, named, strict=True)
    ]
    steps.append({"operation": qa.structural, "dependencies": [*range(len(steps))], "argument": qa.group})
    return {
        "semantic": steps, "entailed": [], "equivalent": [], "question": qa.question, "imageId": image,
        "isBalanced": True,
        "groups": {"global": qa.group, "local": f"{qa.kind}-{qa.detailed}-{qa.group}"}, "answer": qa.answer,
        "semanticStr": "->".join(f"{s['operation']}: {s['argument']}" for s in steps),
        "annotations": {"answer": {}, "question": {}, "fullAnswer": {}},
        "types": {"detailed": qa.detailed, "semantic": SEMANTIC[qa.kind], "structural": qa.structural},
        "fullAnswer": f"{qa.answer[0].upper()}{qa.answer[1:]}.",
    }  # fmt: skip


def build_gqa(folder: Path, split: str = "test") -> None:
    """GQA: `llava_gqa_testdev_balanced.jsonl`, `data/testdev_balanced_questions.json`, `data/images`."""
    records: dict[str, dict] = {}
    lines = []
    used: collections.Counter = collections.Counter()
    for number, (index, shown) in enumerate(scenes("gqa", split)):
        view, image = View(shown), f"n{700000 + index}"
        picture(folder / "data" / "images" / f"{image}.jpg", view.scene)
        for qa in gqa_questions(view, random.Random(index), used, quota(number, split == "large")):
            question_id = str(20_000_000 + len(records))
            records[question_id] = gqa_record(qa, view, image)
            lines.append(line(question_id, f"{image}.jpg", f"{qa.question}\n{SHORT}"))
    write_json(folder / "data" / "testdev_balanced_questions.json", records)
    write_lines(folder / "llava_gqa_testdev_balanced.jsonl", lines)
