"""Mini MM-Vet: open questions that need one or several capabilities, with reference answers for a judge.

Capabilities are those of the official file: rec, ocr, know, gen, spat, math. `<AND>` joins what an answer must have,
`<OR>` what it may say instead.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playground.mini.benchmarks.choices import choose
from playground.mini.benchmarks.files import TEST, picture, write_json, write_lines
from playground.mini.catalogue import CHINESE, plural
from playground.mini.questions import View
from playground.mini.scenes import scene
from playground.mini.styles import READ, describe, ordered

QUESTIONS = 60
Open = tuple[str, str, list[str]] | None  # question, answer, capabilities


def naming(view: View, rng: random.Random) -> Open:
    """List the objects in the picture."""
    names = dict.fromkeys(view.items[k].name for k in ordered(view))
    return "List the objects in the picture.", "<AND>".join(names), ["rec"]


def telling(view: View, rng: random.Random) -> Open:
    """Describe the picture."""
    made = describe(view, rng)
    return (made.question, made.answer, ["rec", "gen", "spat"]) if made else None


def reading(view: View, rng: random.Random) -> Open:
    """What does the sign say?"""
    return (rng.choice(READ), view.scene.sign.text, ["ocr"]) if view.scene.sign else None


def first_character(view: View, rng: random.Random) -> Open:
    """What is the first character on the sign?"""
    if view.scene.sign is None:
        return None
    end = rng.choice(("first", "last"))
    return (
        f"What is the {end} character on the sign?",
        view.scene.sign.text[0 if end == "first" else -1],
        ["ocr", "spat"],
    )


def colour(view: View, rng: random.Random) -> Open:
    """What color is the heart?"""
    made = choose(view, "colour", rng)
    return (made.question, made.options[made.right], ["rec"]) if made else None


def placing(view: View, rng: random.Random) -> Open:
    """Where is the dog?"""
    made = choose(view, "place", rng)
    return (made.question, made.options[made.right], ["rec", "spat"]) if made else None


def beside(view: View, rng: random.Random) -> Open:
    """What is to the left of the cat?"""
    made = choose(view, "side", rng)
    return (made.question, made.options[made.right], ["rec", "spat"]) if made else None


def kind(view: View, rng: random.Random) -> Open:
    """Which kind of fruit is in the picture? Also right in Chinese."""
    single = [i for i in view.items if i.category != "shape" and view.categories[i.category] == 1]
    if not single:
        return None
    item = rng.choice(single)
    answer = f"{item.name}<OR>{CHINESE[item.name]}"
    return f"Which kind of {item.category} is in the picture?", answer, ["rec", "know"]


def summing(view: View, rng: random.Random) -> Open:
    """How many dogs and cats are there together?"""
    if len(view.names) < 2:
        return None
    one, two = rng.sample(sorted(view.names), 2)
    total = view.names[one] + view.names[two]
    return f"How many {plural(one)} and {plural(two)} are there together?", str(total), ["rec", "math"]


def adding(view: View, rng: random.Random) -> Open:
    """What do the digits on the sign add up to?"""
    digits = [int(c) for c in view.scene.sign.text if c.isdigit()] if view.scene.sign else []
    return ("What do the digits on the sign add up to?", str(sum(digits)), ["ocr", "math"]) if digits else None


WRITERS: tuple[Callable[[View, random.Random], Open], ...] = (
    naming, telling, reading, colour, placing, kind, first_character, beside, summing, telling, adding, reading,
)  # fmt: skip


def build_mmvet(folder: Path) -> None:
    """MM-Vet: `llava-mm-vet.jsonl`, `mm-vet.json`, `images`; two questions a picture."""
    lines: list[dict[str, Any]] = []
    truth: dict[str, dict[str, Any]] = {}
    turn = 0
    for index in TEST["mm-vet"]:
        view, rng = View(scene("test", index)), random.Random(index)
        image = f"v1_{len(lines)}.png"
        for _ in range(2 if len(lines) < QUESTIONS else 0):
            made = None
            while made is None:
                made, turn = WRITERS[turn % len(WRITERS)](view, rng), turn + 1
            question, answer, capability = made
            truth[f"v1_{len(lines)}"] = {
                "imagename": image, "question": question, "answer": answer, "imagesource": "playground/mini",
                "capability": capability,
            }  # fmt: skip
            lines.append({"image": image, "text": question, "category": "conv", "question_id": len(lines)})
            if not (folder / "images" / image).exists():
                picture(folder / "images" / image, view.scene)
    write_lines(folder / "llava-mm-vet.jsonl", lines)
    write_json(folder / "mm-vet.json", truth, indent=4)
