"""Mini MMBench, English and Chinese: the dev table with its pictures in base64 and every question in all rotations.

A question with N options has N rows: index i and, with the options turned to the left once more each time, i plus
1,000,000, 2,000,000 ... All first rows come first. A cell without content is empty.
"""

from __future__ import annotations

import base64
import csv
import io
import random
from pathlib import Path

from playground.mini.benchmarks.choices import LETTERS, Choice, choose
from playground.mini.benchmarks.files import TEST
from playground.mini.questions import View
from playground.mini.scenes import render, scene
from playground.mini.styles import chinese

COLUMNS = ("index", "question", "hint", "A", "B", "C", "D", "answer", "category", "image", "source", "l2-category",
           "comment", "split")  # fmt: skip
STEP = 1_000_000
FIRST_INDEX = 241
PER_PICTURE = 3  # English questions; Chinese ones are one a picture
ABILITIES = {  # kind of question: category, l2-category
    "identity": ("object_localization", "finegrained_perception (instance-level)"),
    "missing": ("image_topic", "coarse_perception"),
    "theme": ("image_scene", "coarse_perception"),
    "colour": ("attribute_recognition", "finegrained_perception (instance-level)"),
    "sign": ("ocr", "finegrained_perception (instance-level)"),
    "either": ("spatial_relationship", "finegrained_perception (cross-instance)"),
    "side": ("spatial_relationship", "finegrained_perception (cross-instance)"),
    "size": ("attribute_comparison", "finegrained_perception (cross-instance)"),
    "counting": ("structuralized_imagetext_understanding", "logic_reasoning"),
    "member": ("identity_reasoning", "attribute_reasoning"),
    "nearest": ("physical_relation", "relation_reasoning"),
    "kind": ("function_reasoning", "attribute_reasoning"),
}
HINT = "The objects were drawn on a plain background."
ENGLISH = ("identity", "colour", "either", "identity", "missing", "counting", "member", "colour", "size", "sign",
           "side", "nearest", "theme")  # fmt: skip


def encoded(view: View) -> str:
    """The picture as base64 of a JPEG of one pixel a unit: the table holds it once for every row."""
    file = io.BytesIO()
    render(view.scene, scale=1).save(file, format="JPEG", quality=92)
    return base64.b64encode(file.getvalue()).decode("ascii")


def rows_of(choice: Choice, index: int, image: str, hint: str) -> list[dict[str, str]]:
    """All rotations of a question."""
    category, second = ABILITIES[choice.kind]
    rows = []
    for turn in range(len(choice.options)):
        turned = choice.rotated(turn)
        options = dict(zip(LETTERS, turned.options, strict=False))
        rows.append({
            "index": str(index + turn * STEP), "question": choice.question, "hint": hint, **options,
            "answer": turned.letter, "category": category, "image": image, "source": "mini", "l2-category": second,
            "split": "dev",
        })  # fmt: skip
    return rows


def write_table(path: Path, groups: list[list[dict[str, str]]]) -> None:
    """The table, first rows of all questions first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, restval="", delimiter="\t", lineterminator="\n")
        table.writeheader()
        for turn in range(len(LETTERS)):
            table.writerows(group[turn] for group in groups if turn < len(group))


def in_chinese(view: View, rng: random.Random) -> Choice | None:
    """A Chinese question with its options, of the kind its wording shows."""
    made = chinese(view, rng)
    if made is None:
        return None
    question, *options = made.question.split("\n")
    kinds = {"图中有什么？": "identity", "图中有哪一类东西？": "kind"}
    kind = kinds.get(question, "counting" if question.startswith("图中有多少") else "colour")
    return Choice(kind, question, tuple(text[3:] for text in options), LETTERS.index(made.answer))


def build_mmbench(folder: Path) -> None:
    """MMBench dev: `mmbench_dev_20230712.tsv`."""
    groups = []
    for number, scene_index in enumerate(TEST["mmbench"]):
        view, rng = View(scene("test", scene_index)), random.Random(scene_index)
        image = encoded(view)
        for turn in range(PER_PICTURE * number, PER_PICTURE * (number + 1)):
            most = rng.choice((2, 3, 4, 4))
            choice = choose(view, ENGLISH[turn % len(ENGLISH)], rng, most)
            if choice:
                groups.append(rows_of(choice, FIRST_INDEX + 11 * turn, image, HINT if turn % 6 == 5 else ""))
    write_table(folder / "mmbench_dev_20230712.tsv", groups)


def build_mmbench_cn(folder: Path) -> None:
    """MMBench-CN dev: `mmbench_dev_cn_20231003.tsv`."""
    groups = []
    for number, scene_index in enumerate(TEST["mmbench_cn"]):
        view, rng = View(scene("test", scene_index)), random.Random(scene_index)
        choice = in_chinese(view, rng)
        if choice:
            groups.append(rows_of(choice, FIRST_INDEX + 11 * number, encoded(view), ""))
    write_table(folder / "mmbench_dev_cn_20231003.tsv", groups)
