"""Write twins of GQA, POPE, TextVQA, VQAv2, MMBench, SEED-Bench and RefCOCO about photographs, in their own files.

    python -m playground.photo.build [--out playground/photo]
    python -m playground.photo.build --split unseen --out playground/photo-unseen   # gqa and pope
    python -m playground.photo.build --split crowded --out playground/photo-crowded   # gqa: 12 to 20 things at once

400 pictures each, two to five questions a picture, of compositions and photographs that no training scene shows; the
split `unseen` shows cut-outs that none shows either, `crowded` many small ones. The same files come out every time;
when they are there the command does nothing. The pictures are composed from packages of
Debian (`parts.py` fetches them) and are not to be committed.
"""

from __future__ import annotations

import argparse
import base64
import collections
import dataclasses
import hashlib
import io
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError
from playground.mini.benchmarks.files import line, write_json, write_lines
from playground.mini.benchmarks.gqa import gqa_record
from playground.mini.benchmarks.mmbench import rows_of, write_table
from playground.mini.benchmarks.seed import FIRST_ID, TYPES, annotated, asked
from playground.mini.benchmarks.vqav2 import SUBTYPE, annotation
from playground.mini.questions import QA, SHORT
from playground.photo.catalogue import CATEGORY
from playground.photo.parts import fetch_photographs
from playground.photo.paths import PHOTO
from playground.photo.questions import CHOICES, PhotoView, a, choice, write
from playground.photo.scenes import PIXELS, SCALE, render, scene, shown_in

PICTURES = 400
CROWDED = 70  # of crowded scenes, three questions each
FIRST = {"gqa": 0, "pope": 1000, "textvqa": 2000, "vqav2": 3000, "mmbench": 4000, "seed_bench": 5000, "refcoco": 6000}
SEMANTIC = {"place": "rel", "choose": "obj", "comparison": "attr"}  # GQA's words for kinds the mini one does not have
GQA_KINDS = ("existence", "category", "place", "count", "relation")
CROWD_KINDS = ("existence", "choose", "place")  # about one thing that is named
VQA_KINDS = ("existence", "category", "place", "count", "choose")
SPLITS = {"test": tuple(FIRST), "unseen": ("gqa", "pope"), "crowded": ("gqa",)}  # benchmarks of each


def views(benchmark: str, split: str, signs: float = 0.3) -> Iterator[tuple[int, PhotoView]]:
    """The scenes of a benchmark with their indices."""
    known = [name for name in shown_in(split) if name in shown_in("train")] if split == "unseen" else None
    for index in range(FIRST[benchmark], FIRST[benchmark] + (CROWDED if split == "crowded" else PICTURES)):
        yield index, PhotoView(scene(split, index, signs), known)


def picture(path: Path, view: PhotoView) -> None:
    """The picture as a JPEG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    render(view.scene)[0].save(path, format="JPEG", quality=92)


def questions(view: PhotoView, kinds: tuple[str, ...], rng: random.Random) -> list[QA]:
    """One question of each kind the scene supports."""
    made = [write(view, kind, rng) for kind in kinds]
    return [qa for qa in made if qa]


def build_gqa(folder: Path, split: str) -> None:
    """GQA: `llava_gqa_testdev_balanced.jsonl`, `data/testdev_balanced_questions.json`, `data/images`."""
    records: dict[str, dict[str, Any]] = {}
    lines = []
    for index, view in views("gqa", split):
        image = f"n{700000 + index}"
        picture(folder / "data" / "images" / f"{image}.jpg", view)
        for qa in questions(view, CROWD_KINDS if split == "crowded" else GQA_KINDS, random.Random(index)):
            key = str(20_000_000 + len(records))
            kind = qa if qa.kind not in SEMANTIC else QA(**{**vars(qa), "kind": "relation"})
            records[key] = gqa_record(kind, view, image)
            records[key]["groups"]["local"] = f"{qa.kind}-{qa.detailed}-{qa.group}"
            lines.append(line(key, f"{image}.jpg", f"{qa.question}\n{SHORT}"))
    write_json(folder / "data" / "testdev_balanced_questions.json", records)
    write_lines(folder / "llava_gqa_testdev_balanced.jsonl", lines)


def negative(view: PhotoView, kind: str, rng: random.Random, common: list[str]) -> str:
    """A name that is not there: any, one of the most frequent, or one of a category that is there."""
    absent = [name for name in view.known if name not in view.names]
    alike = [name for name in absent if CATEGORY[name] and CATEGORY[name] in view.categories]
    near = {"random": [], "popular": [name for name in common if name in absent], "adversarial": alike}
    return rng.choice(near[kind] or absent)


def build_pope(folder: Path, split: str) -> None:
    """POPE: `llava_pope_test.jsonl`, `coco/coco_pope_*.json`, `val2014`; two questions in two of the three splits."""
    shown = collections.Counter(item.name for index in range(2000) for item in scene("train", index, 0.3).items)
    common, lines = [name for name, _ in shown.most_common(12)], []
    every = [(index, view) for index, view in views("pope", split) if any(n in view.known for n in view.names)]
    for place, (kind, first) in enumerate({"adversarial": 1, "random": 10_000_001, "popular": 20_000_001}.items()):
        labels: list[dict[str, Any]] = []
        for number, (index, view) in enumerate(every):
            rng, image = random.Random(f"{kind}-{index}"), f"COCO_val2014_{index:012d}.jpg"
            if number % 3 == place:
                continue
            present = rng.choice([name for name in view.names if name in view.known])
            for name, answer in ((present, "yes"), (negative(view, kind, rng, common), "no")):
                text = f"Is there {a(name)} in the image?"
                lines.append(line(first + len(labels), image, f"{text}\n{SHORT}", kind))
                labels.append({"question_id": len(labels) + 1, "image": image, "text": text, "label": answer})
        write_lines(folder / "coco" / f"coco_pope_{kind}.json", labels)
    write_lines(folder / "llava_pope_test.jsonl", lines)
    for index, view in every:
        picture(folder / "val2014" / f"COCO_val2014_{index:012d}.jpg", view)


def build_textvqa(folder: Path, split: str) -> None:
    """TextVQA: `llava_textvqa_val_v051_ocr.jsonl`, `TextVQA_0.5.1_val.json`, `train_images`; the OCR line is empty."""
    lines: list[Any] = []
    records: list[dict[str, Any]] = []
    for index, view in views("textvqa", split, signs=1.0):
        if view.scene.sign is None:  # four things leave no room for one
            continue
        image = hashlib.md5(f"photo-{index}".encode()).hexdigest()[:16]
        picture(folder / "train_images" / f"{image}.jpg", view)
        for form in ("What does the sign say?", "What is written on the sign?"):
            lines.append(line(image, f"{image}.jpg", f"{form}\nReference OCR token: \n{SHORT}"))
            records.append({
                "question": form, "image_id": image, "image_classes": ["Sign"], "flickr_original_url": "",
                "flickr_300k_url": "", "image_width": 336, "image_height": 336,
                "answers": [view.scene.sign.text.lower()] * 10, "question_tokens": form.rstrip("?").lower().split(),
                "question_id": 34602 + len(records), "set_name": "val",
            })  # fmt: skip
    head = {"dataset_type": "val", "dataset_name": "textvqa", "dataset_version": "0.5.1"}
    write_json(folder / "TextVQA_0.5.1_val.json", {**head, "data": records})
    write_lines(folder / "llava_textvqa_val_v051_ocr.jsonl", lines)


def build_vqav2(folder: Path, split: str) -> None:
    """VQAv2: the lists of test-dev and test2015, which are the same here, annotations and questions, `test2015`."""
    lines, listed, annotations = [], [], []
    for index, view in views("vqav2", split):
        rng, image_id = random.Random(index), 100_000 + index
        image = f"COCO_test2015_{image_id:012d}.jpg"
        picture(folder / "test2015" / image, view)
        for number, qa in enumerate(questions(view, VQA_KINDS, rng)):
            key = image_id * 1000 + number
            lines.append(line(key, image, f"{qa.question}\n{SHORT}"))
            listed.append({"image_id": image_id, "question": qa.question, "question_id": key})
            annotations.append(annotation(key, qa, rng))
    for name in ("test-dev2015", "test2015"):
        write_lines(folder / f"llava_vqav2_mscoco_{name}.jsonl", lines)
    head = {"info": {"description": "Photograph twin of VQA v2.0", "version": "2.0", "year": 2026},
            "license": {"name": "GPL-2.0", "url": "https://www.gnu.org/licenses/old-licenses/gpl-2.0.html"},
            "data_subtype": SUBTYPE, "data_type": "mscoco", "task_type": "Open-Ended"}  # fmt: skip
    write_json(folder / f"v2_OpenEnded_mscoco_{SUBTYPE}_questions.json", {**head, "questions": listed})
    write_json(folder / f"v2_mscoco_{SUBTYPE}_annotations.json", {**head, "annotations": annotations})


def build_mmbench(folder: Path, split: str) -> None:
    """MMBench dev: `mmbench_dev_20230712.tsv`, all rotations of two questions a picture."""
    groups = []
    for index, view in views("mmbench", split):
        rng, file = random.Random(index), io.BytesIO()
        render(view.scene)[0].save(file, format="JPEG", quality=85)
        image = base64.b64encode(file.getvalue()).decode("ascii")
        found = [made for kind in rng.sample(CHOICES, len(CHOICES)) if (made := choice(view, kind, rng))]
        for number, made in enumerate(found[:2]):
            kind = {"place": "either"}.get(made.kind, made.kind)  # whose ability is spatial relationship
            groups.append(rows_of(dataclasses.replace(made, kind=kind), 241 + 4 * index + number, image, ""))
    write_table(folder / "mmbench_dev_20230712.tsv", groups)


def build_seed(folder: Path, split: str) -> None:
    """SEED-Bench: `llava-seed-bench.jsonl`, `SEED-Bench.json`, `SEED-Bench-image`; five types about pictures."""
    rows: list[tuple[dict[str, Any], str]] = []
    kinds = {2: "identity", 4: "place", 5: "counting", 6: "side", 9: "sign"}
    for index, view in views("seed_bench", split):
        rng, name = random.Random(index), f"{index}_{index * 7919 % 10**6}"
        picture(folder / "SEED-Bench-image" / name, view)
        found = [(number, made) for number in rng.sample(list(kinds), 5) if (made := choice(view, kinds[number], rng))]
        for number, made in found[:2]:
            entry = annotated(str(FIRST_ID + len(rows)), number, made, name)
            rows.append((entry, f"SEED-Bench-image/{name}"))
    write_json(folder / "SEED-Bench.json", {"question_type": TYPES, "questions": [entry for entry, _ in rows]})
    write_lines(folder / "llava-seed-bench.jsonl", [asked(entry, image) for entry, image in rows])


def build_refcoco(folder: Path, split: str) -> None:
    """RefCOCO: `refcoco_val.jsonl` in the form of Qwen-VL's evaluation with the model's own words, `train2014`."""
    rows = []
    for index, view in views("refcoco", split):
        image, rng = f"COCO_train2014_{index:012d}.jpg", random.Random(index)
        found = {qa.question: qa for qa in (write(view, "grounding", rng) for _ in range(4)) if qa}
        for qa in found.values():
            item = view.items[qa.named[0]]
            box = [round(side * SCALE) for side in (item.x, item.y, item.x + item.width, item.y + item.height)]
            rows.append({"image": image, "sent": item.name, "bbox": box, "width": PIXELS, "height": PIXELS,
                         "text": f"{qa.question}\n{SHORT}", "boxes": "tenths"})  # fmt: skip
        if found:
            picture(folder / "train2014" / image, view)
    write_lines(folder / "refcoco_val.jsonl", rows)


BUILDERS = {"gqa": build_gqa, "pope": build_pope, "textvqa": build_textvqa, "vqav2": build_vqav2,
            "mmbench": build_mmbench, "seed_bench": build_seed, "refcoco": build_refcoco}  # fmt: skip


def fingerprint(split: str) -> str:
    """A hash of everything the files depend on beside the pictures, whose checksums `parts.py` holds."""
    names = ("catalogue.py", "scenes.py", "questions.py", "build.py", "parts.py")
    digest = hashlib.sha256(split.encode())
    for name in names:
        digest.update((PHOTO / name).read_bytes())
    return digest.hexdigest()


def build(out: Path = PHOTO, split: str = "test") -> bool:
    """Write `<out>/eval` unless it is complete; True when something was written. A kill leaves no half."""
    target, stamp = out / "eval", out / "eval" / ".complete"
    if stamp.exists() and stamp.read_text() == fingerprint(split):
        return False
    fetch_photographs()
    part = out / f".eval-{os.getpid()}"
    shutil.rmtree(part, ignore_errors=True)
    for name in SPLITS[split]:
        BUILDERS[name](part / name, split)
    (part / ".complete").write_text(fingerprint(split))
    if target.exists():
        shutil.rmtree(target)
    os.replace(part, target)
    return True


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PHOTO, help="folder that gets eval/ (default: playground/photo)")
    parser.add_argument("--split", choices=SPLITS, default="test", help="which scenes (default: test)")
    given = parser.parse_args()
    try:
        written = build(given.out, given.split)
    except DataError as error:
        raise SystemExit(f"error: {error}") from error
    print(f"{given.out / 'eval'}: {'written' if written else 'complete, nothing to do'}")


if __name__ == "__main__":
    main()
