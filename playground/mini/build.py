"""Write the mini benchmarks in the official file formats and folder layout, from test scenes only.

    python -m playground.mini.build [--out playground/mini]

Makes `<out>/eval/{gqa,pope,textvqa}` with the names LLaVA's scripts expect. The same files come out every time; when
they are complete the command does nothing. Which test scenes go where is fixed below.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterable
from pathlib import Path

from playground.mini.catalogue import NAMES
from playground.mini.paths import MINI
from playground.mini.questions import GQA_MIX, QA, SHORT, View, article, write
from playground.mini.scenes import Scene, render, scene
from playground.mini.styles import prompt, reading

GQA_SCENES, POPE_SCENES, TEXT_SCENES = range(0, 50), range(1000, 1400), range(2000, 2600)
POPE_IMAGES, TEXT_QUESTIONS = 50, 320
POPE_FIRST_ID = {"adversarial": 1, "random": 10_000_001, "popular": 20_000_001}
SEMANTIC = {"existence": "obj", "category": "cat", "attribute": "attr", "count": "global", "relation": "rel"}
SOURCES = ("catalogue.py", "glyphs.py", "glyphs.png", "scenes.py", "questions.py", "styles.py", "build.py")


def fingerprint() -> str:
    """A hash of everything the files depend on."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((MINI / name).read_bytes())
    return digest.hexdigest()


def _lines(path: Path, rows: Iterable[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _picture(path: Path, scene_: Scene) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    render(scene_).save(path, quality=92)


def _line(question_id: int | str, image: str, text: str, category: str = "default") -> dict:
    return {"question_id": question_id, "image": image, "text": text, "category": category}


def gqa_questions(view: View, rng: random.Random, used: collections.Counter, number: int) -> list[QA]:
    """About 30 questions on one scene in the mix of kinds, taking answers that their group has seen least."""
    quota = {"existence": 6 + number % 2, "category": 8 - number % 2, "attribute": 6, "count": 4, "relation": 6}
    chosen: list[QA] = []
    for kind in GQA_MIX:
        found = {qa.question: qa for qa in (write(view, kind, rng, 1) for _ in range(150)) if qa}
        for _ in range(quota[kind]):
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


def build_gqa(folder: Path) -> None:
    """GQA: `llava_gqa_testdev_balanced.jsonl`, `data/testdev_balanced_questions.json`, `data/images`."""
    records: dict[str, dict] = {}
    lines = []
    used: collections.Counter = collections.Counter()
    for number, index in enumerate(GQA_SCENES):
        view, image = View(scene("test", index)), f"n{700000 + index}"
        _picture(folder / "data" / "images" / f"{image}.jpg", view.scene)
        for qa in gqa_questions(view, random.Random(index), used, number):
            question_id = str(20_000_000 + len(records))
            records[question_id] = gqa_record(qa, view, image)
            lines.append(_line(question_id, f"{image}.jpg", f"{qa.question}\n{SHORT}"))
    (folder / "data" / "testdev_balanced_questions.json").write_text(json.dumps(records))
    _lines(folder / "llava_gqa_testdev_balanced.jsonl", lines)


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


def build_pope(folder: Path) -> None:
    """POPE: `llava_pope_test.jsonl`, `coco/coco_pope_*.json`, `val2014`."""
    counts = company()
    views = [View(scene("test", index)) for index in POPE_SCENES]
    views = [view for view in views if len(view.names) >= 4][:POPE_IMAGES]
    lines = []
    names = [f"COCO_val2014_{view.scene.seed % 10**9:012d}.jpg" for view in views]
    for split, first in POPE_FIRST_ID.items():
        labels: list[dict] = []
        for view, image in zip(views, names, strict=True):
            rng = random.Random(f"{split}-{image}")
            present = random.Random(image).sample(sorted(view.names), 3)
            absent = pope_negatives(sorted(view.names), split, rng, counts)
            for yes, no in zip(present, absent, strict=True):
                for name, answer in ((yes, "yes"), (no, "no")):
                    text = f"Is there {article(name)} in the image?"
                    lines.append(_line(first + len(labels), image, f"{text}\n{SHORT}", split))
                    labels.append({"question_id": len(labels) + 1, "image": image, "text": text, "label": answer})
        _lines(folder / "coco" / f"coco_pope_{split}.json", labels)
    _lines(folder / "llava_pope_test.jsonl", lines)
    for view, image in zip(views, names, strict=True):
        _picture(folder / "val2014" / image, view.scene)


def build_textvqa(folder: Path) -> None:
    """TextVQA: `llava_textvqa_val_v051_ocr.jsonl`, `TextVQA_0.5.1_val.json`, `train_images`; no OCR system was run."""
    lines: list[dict] = []
    records: list[dict] = []
    for index in TEXT_SCENES:
        view, rng = View(scene("test", index)), random.Random(index)
        if view.scene.sign is None or len(records) >= TEXT_QUESTIONS:
            continue
        image = hashlib.md5(f"mini-{index}".encode()).hexdigest()[:16]
        made = {qa.question: qa for qa in (reading(view, rng) for _ in range(rng.choice((1, 1, 2, 2, 2)))) if qa}
        _picture(folder / "train_images" / f"{image}.jpg", view.scene)
        for qa in made.values():
            text = prompt(QA(qa.kind, qa.question, qa.answer, style="read"))
            lines.append(_line(image, f"{image}.jpg", text))
            records.append({
                "question": qa.question, "image_id": image, "image_classes": ["Sign"], "flickr_original_url": "",
                "flickr_300k_url": "", "image_width": view.scene.width * 2, "image_height": view.scene.height * 2,
                "answers": [qa.answer.lower()] * 10, "question_tokens": qa.question.rstrip("?").lower().split(),
                "question_id": 34602 + len(records), "set_name": "val",
            })  # fmt: skip
    head = {"dataset_type": "val", "dataset_name": "textvqa", "dataset_version": "0.5.1"}
    (folder / "TextVQA_0.5.1_val.json").write_text(json.dumps({**head, "data": records}))
    _lines(folder / "llava_textvqa_val_v051_ocr.jsonl", lines)


BUILDERS = {"gqa": build_gqa, "pope": build_pope, "textvqa": build_textvqa}


def build(out: Path = MINI) -> bool:
    """Write `<out>/eval` unless it is complete; True when something was written. A kill leaves no half."""
    target = out / "eval"
    stamp = target / ".complete"
    if stamp.exists() and stamp.read_text() == fingerprint():
        return False
    part = out / f".eval-{os.getpid()}"
    shutil.rmtree(part, ignore_errors=True)
    for name, builder in BUILDERS.items():
        builder(part / name)
    (part / ".complete").write_text(fingerprint())
    if target.exists():
        shutil.rmtree(target)
    os.replace(part, target)
    return True


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MINI, help="folder that gets eval/ (default: playground/mini)")
    out = parser.parse_args().out
    written = build(out)
    print(f"{out / 'eval'}: {'written' if written else 'complete, nothing to do'}")


if __name__ == "__main__":
    main()
