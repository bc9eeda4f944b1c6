"""Mini MME: fourteen tasks, in each a few pictures with one question to be answered yes and one no.

All fourteen folders are there because the official tool wants them. Where the mini world has nothing of the kind
(celebrities, landmarks, posters, artworks, code), the task asks something of the same flavour: who is largest, what
stands where, what a poster shows, of what an artwork is, what a line of code makes of the text on the sign. The
embedded model is taught the wording of all of them, on training scenes (`forms.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from playground.mini.benchmarks.choices import absent
from playground.mini.benchmarks.files import TEST, line, picture, write_lines
from playground.mini.catalogue import CATEGORIES, CHINESE, COLOURS, OBJECTS, SIGN_ALPHABET, THEMES, VARIANTS, plural
from playground.mini.questions import MARGIN, OPPOSITE, SHORT, SIDES, View, _side, article
from playground.mini.scenes import scene

PER_TASK = 10
PLEASE = "Please answer yes or no."
Pair = tuple[str, str] | None  # the question that is answered yes, the question that is answered no
USES = {"fruit": "eat", "food": "eat", "clothing": "wear", "vehicle": "travel with", "tool": "work with"}


def existence(view: View, rng: random.Random) -> Pair:
    """Is there a dog in this image?"""
    there, away = rng.choice(view.items).name, rng.choice(absent(view))
    return f"Is there {article(there)} in this image?", f"Is there {article(away)} in this image?"


def count(view: View, rng: random.Random) -> Pair:
    """Are there 2 dogs in this image?"""
    many = [n for n, number in view.names.items() if number > 1]
    if not many:
        return None
    name = rng.choice(many)
    wrong = view.names[name] + rng.choice((-1, 1))
    there = "Are there" if wrong != 1 else "Is there"
    return (f"Are there {view.names[name]} {plural(name)} in this image?",
            f"{there} {wrong} {plural(name) if wrong != 1 else name} in this image?")  # fmt: skip


def position(view: View, rng: random.Random) -> Pair:
    """Is the dog to the left of the cat?"""
    if len(view.unique) < 2:
        return None
    (one, two), side = rng.sample(view.unique, 2), rng.choice(list(SIDES))
    distance = _side(view.items[one], view.items[two], side)
    if abs(distance) < MARGIN:
        return None
    true = side if distance > 0 else OPPOSITE[side]
    first, second = view.items[one].name, view.items[two].name
    return f"Is the {first} {true} the {second}?", f"Is the {first} {OPPOSITE[true]} the {second}?"


def color(view: View, rng: random.Random) -> Pair:
    """Is the heart red?"""
    pool = [view.items[k] for k in view.unique if view.items[k].colour]
    if not pool:
        return None
    item = rng.choice([i for i in pool if i.name in VARIANTS] or pool)
    known = OBJECTS[item.name][2] if item.name in VARIANTS else COLOURS
    wrong = rng.choice(sorted(set(known) - {item.colour, ""}))
    return f"Is the {item.name} {item.colour}?", f"Is the {item.name} {wrong}?"


def posters(view: View, rng: random.Random) -> Pair:
    """Does this poster show a dog? Only of pictures with writing on them."""
    if view.scene.sign is None:
        return None
    there, away = rng.choice(view.items).name, rng.choice(absent(view))
    return f"Does this poster show {article(there)}?", f"Does this poster show {article(away)}?"


def celebrity(view: View, rng: random.Random) -> Pair:
    """Is the large object in the picture a dog?"""
    large = [i for i in view.items if i.large]
    if len(large) != 1:
        return None
    wrong = rng.choice([i.name for i in view.items if i.name != large[0].name] or absent(view))
    start = "Is the large object in the picture"
    return f"{start} {article(large[0].name)}?", f"{start} {article(wrong)}?"


def place(view: View, rng: random.Random) -> Pair:
    """Is this picture captured in a kitchen? By the things in it."""
    fits = {name: sum(i.name in THEMES[name] for i in view.items) for name in THEMES if name not in ("shapes", "wild")}
    best = max(fits, key=lambda name: fits[name])
    wrong = [name for name, number in fits.items() if number == 0]
    if fits[best] < 4 or fits[best] < 0.6 * len(view.items) or not wrong:
        return None
    start = "Judging by the things in it, is this picture captured in a place of"
    return f"{start} {best}?", f"{start} {rng.choice(wrong)}?"


def landmark(view: View, rng: random.Random) -> Pair:
    """Is there a tree at the top left of the picture?"""
    pool = [k for k in view.unique if view.cell(view.items[k], 6)]
    if not pool:
        return None
    item = view.items[rng.choice(pool)]
    where = view.cell(item)
    others = [i.name for i in view.items if view.cell(i, -6) != where and i.name != item.name]
    others = [n for n in others if view.names[n] == 1] or absent(view)
    return (f"Is there {article(item.name)} at the {where} of the picture?",
            f"Is there {article(rng.choice(others))} at the {where} of the picture?")  # fmt: skip


def artwork(view: View, rng: random.Random) -> Pair:
    """Are there any animals in this artwork?"""
    words = [c for c in CATEGORIES if c not in ("food", "clothing")]
    there, away = ([c for c in words if (c in view.categories) == shown] for shown in (True, False))
    if not there or not away:
        return None
    return (f"Are there any {rng.choice(there)}s in this artwork?",
            f"Are there any {rng.choice(away)}s in this artwork?")  # fmt: skip


def ocr(view: View, rng: random.Random) -> Pair:
    """Is the word on the sign "K7P"? The wrong one differs in one character."""
    if view.scene.sign is None:
        return None
    text = view.scene.sign.text
    at = rng.randrange(len(text))
    wrong = text[:at] + rng.choice([c for c in SIGN_ALPHABET if c not in text]) + text[at + 1 :]
    return f'Is the word on the sign "{text}"?', f'Is the word on the sign "{wrong}"?'


def commonsense(view: View, rng: random.Random) -> Pair:
    """Is there something to eat in the picture?"""
    shown = {USES[c] for c in view.categories if c in USES}
    missing = sorted(set(USES.values()) - shown)
    if not shown or not missing:
        return None
    start = "Is there anything in the picture that people usually"
    return f"{start} {rng.choice(sorted(shown))}?", f"{start} {rng.choice(missing)}?"


def numerical(view: View, rng: random.Random) -> Pair:
    """Is the number of dogs plus the number of cats 3?"""
    if len(view.names) < 2:
        return None
    one, two = rng.sample(sorted(view.names), 2)
    total = view.names[one] + view.names[two]
    start = f"Is the number of {plural(one)} plus the number of {plural(two)} equal to"
    return f"{start} {total}?", f"{start} {total + rng.choice((-1, 1, 2))}?"


def translation(view: View, rng: random.Random) -> Pair:
    """Is there a 狗 (Chinese) in the picture?"""
    there, away = CHINESE[rng.choice(view.items).name], CHINESE[rng.choice(absent(view))]
    start = "Does the picture show what is called"
    return f"{start} {there} in Chinese?", f"{start} {away} in Chinese?"


def code(view: View, rng: random.Random) -> Pair:
    """The sign holds a Python string s: is s[0] 'K'?"""
    if view.scene.sign is None:
        return None
    text = view.scene.sign.text
    at = rng.choice((0, -1))
    wrong = rng.choice([c for c in SIGN_ALPHABET if c not in text])
    start = f"The sign shows a python string s. Is the output of print(s[{at}])"
    return f"{start} '{text[at]}'?", f"{start} '{wrong}'?"


TASKS: dict[str, Callable[[View, random.Random], Pair]] = {
    "existence": existence, "count": count, "position": position, "color": color, "posters": posters,
    "celebrity": celebrity, "scene": place, "landmark": landmark, "artwork": artwork, "OCR": ocr,
    "commonsense_reasoning": commonsense, "numerical_calculation": numerical, "text_translation": translation,
    "code_reasoning": code,
}  # fmt: skip
SPLIT_FOLDERS = ("artwork", "celebrity", "landmark", "posters", "scene")  # pictures and texts in folders of their own


def build_mme(folder: Path) -> None:
    """MME: `llava_mme.jsonl`, `MME_Benchmark_release_version/<task>` with a text of two lines beside each picture."""
    release = folder / "MME_Benchmark_release_version"
    lines = []
    indices = list(TEST["MME"])
    for number, (task, writer) in enumerate(TASKS.items()):
        share, found = indices[number :: len(TASKS)], 0
        for index in share:
            view, rng = View(scene("test", index)), random.Random(f"{task}-{index}")
            pair = next((pair for pair in (writer(view, rng) for _ in range(6)) if pair), None)
            if pair is None or found == PER_TASK:
                continue
            found += 1
            images, texts = ("images/", "questions_answers_YN") if task in SPLIT_FOLDERS else ("", ".")
            name = f"{task}/{images}{found:04d}.jpg"
            picture(release / name, view.scene)
            (release / task / texts).mkdir(exist_ok=True)
            rows = "".join(f"{text} {PLEASE}\t{said}\n" for text, said in zip(pair, ("Yes", "No"), strict=True))
            (release / task / texts / f"{found:04d}.txt").write_text(rows, encoding="utf-8")
            lines += [line(name, name, f"{text}\n{SHORT}", task) for text in pair]
    write_lines(folder / "llava_mme.jsonl", lines)
