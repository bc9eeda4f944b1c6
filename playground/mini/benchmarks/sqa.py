"""Mini ScienceQA: school questions with two to five options, three in five about a picture, the others about words.

A question without a picture asks what a word means (which of these is an animal?); the embedded model has never been
asked anything without a picture, so its answers to those are no better than chance. A hint becomes a line `Context:`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from playground.mini.benchmarks.choices import Choice, choose
from playground.mini.benchmarks.files import TEST, picture, write_json
from playground.mini.catalogue import CATEGORIES, CATEGORY, NAMES, OBJECTS
from playground.mini.questions import View, article
from playground.mini.scenes import scene

PICTURED = ("identity", "colour", "counting", "member", "missing", "place")
PER_PICTURE, TEXT_QUESTIONS = 2, 120
FIRST_ID = 4  # ids are texts and have gaps, as the real ones
TOPICS = {"identity": "biology", "member": "biology", "kind": "biology", "colour": "physics", "counting": "physics",
          "place": "geography", "missing": "biology"}  # fmt: skip
NATURAL = (
    "frog",
    "pig",
    "fox",
    "turtle",
    "banana",
    "grape",
    "cherry",
    "lemon",
    "strawberry",
    "carrot",
    "cheese",
    "sunflower",
    "tree",
    "cactus",
    "clover",
)  # things with one colour that everybody knows
HINT = "The picture shows several things that do not belong together."
SPLIT_NAMES = ("train", "val", "test", "trainval", "minitrain", "minival", "minitest")


def worded(rng: random.Random) -> tuple[Choice, str]:
    """A question about words alone, and its hint."""
    count = rng.choice((2, 2, 3, 4, 5))
    if rng.random() < 0.5:
        category = rng.choice([one for one in CATEGORIES if one not in ("shape", "food", "clothing")])
        right = rng.choice([n for n in NAMES if CATEGORY[n] == category])
        wrong = rng.sample([n for n in NAMES if CATEGORY[n] not in (category, "food", "fruit", "plant")], count - 1)
        question, hint = f"Which of these is {article(category)}?", ""
    else:
        right = rng.choice(NATURAL)
        tint = next(iter(OBJECTS[right][2]))
        wrong = rng.sample([n for n in NATURAL if tint not in OBJECTS[n][2]], count - 1)
        question, hint = f"Which of these is {tint}?", "Think of the usual color of each thing."
    options = [*wrong, right]
    rng.shuffle(options)
    return Choice("words", question, tuple(options), options.index(right)), hint


def problem(choice: Choice, hint: str, image: str | None) -> dict[str, Any]:
    """An entry of `problems.json`."""
    topic = TOPICS.get(choice.kind, "vocabulary")
    return {
        "question": choice.question, "choices": list(choice.options), "answer": choice.right, "hint": hint,
        "image": image, "task": "closed choice", "grade": "grade2",
        "subject": "language science" if topic == "vocabulary" else "natural science", "topic": topic,
        "category": choice.kind, "skill": choice.kind, "lecture": "", "solution": "", "split": "test",
    }  # fmt: skip


def asked(problem_id: str, choice: Choice, hint: str, image: str | None) -> dict[str, Any]:
    """An item of LLaVA's `llava_test_CQM-A.json`: context, question, options; the answer is a bare letter."""
    text = ("<image>\n" if image else "") + (f"Context: {hint}\n" if hint else "") + choice.text
    item: dict[str, Any] = {"id": problem_id}
    if image:
        item["image"] = f"{problem_id}/{image}"
    turns = [{"from": "human", "value": text}, {"from": "gpt", "value": choice.letter}]
    return {**item, "conversations": turns}


def build_sqa(folder: Path) -> None:
    """ScienceQA: `llava_test_CQM-A.json`, `problems.json`, `pid_splits.json`, `images/test/<id>/image.png`."""
    problems: dict[str, dict[str, Any]] = {}
    items: list[dict[str, Any]] = []
    rng, left, next_id = random.Random("scienceqa"), TEXT_QUESTIONS, FIRST_ID
    for number, index in enumerate(TEST["scienceqa"]):
        view = View(scene("test", index))
        rows: list[tuple[Choice, str, str | None]] = []
        for turn in range(PER_PICTURE * number, PER_PICTURE * (number + 1)):
            choice = choose(view, PICTURED[turn % len(PICTURED)], rng, rng.choice((2, 2, 3, 4)))
            rows += [(choice, "" if turn % 4 else HINT, "image.png")] if choice else []
        if left:
            rows.append((*worded(rng), None))
            left -= 1
        for one, said, image in rows:
            problem_id, next_id = str(next_id), next_id + rng.randint(1, 9)
            problems[problem_id] = problem(one, said, image)
            items.append(asked(problem_id, one, said, image))
            if image:
                picture(folder / "images" / "test" / problem_id / image, view.scene)
    write_json(folder / "llava_test_CQM-A.json", items, indent=2)
    write_json(folder / "problems.json", problems, indent=2)
    splits: dict[str, list[str]] = {name: [] for name in SPLIT_NAMES}
    write_json(folder / "pid_splits.json", {**splits, "test": list(problems), "minitest": list(problems)[:20]})
