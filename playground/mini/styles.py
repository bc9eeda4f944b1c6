"""The answer styles of LLaVA's benchmarks around the same questions, and the training mix made of them.

One word (GQA, POPE, VQAv2, MME), reading with the empty OCR line (TextVQA), an option letter (MMBench, ScienceQA,
SEED) in English and Chinese, a place, a list and a short description (the wild, MM-Vet), with LLaVA's own suffixes.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping

from playground.mini.catalogue import CATEGORY_CHINESE, CHINESE, COLOURS, NAMES, OBJECTS
from playground.mini.questions import GQA_MIX, QA, SHORT, View, article, write
from playground.mini.scenes import Scene

LETTER = "Answer with the option's letter from the given choices directly."
LETTER_CHINESE = "请直接回答选项字母。"
READ = (
    "What is written on the sign?",
    "What does the sign say?",
    "What text is on the white sign?",
    "What does the small sign read?",
)
EMPTY = "Reference OCR token: "  # before the words that an OCR read


def prompt(qa: QA) -> str:
    """The text of a question file's line: the question with the suffix of its style."""
    tail = {"short": SHORT, "read": f"{EMPTY}\n{SHORT}", "letter": LETTER, "chinese": LETTER_CHINESE}
    return qa.question + ("\n" + tail[qa.style] if qa.style in tail else "")


def reading(view: View, rng: random.Random) -> QA | None:
    """What does the sign say? Its first and last character."""
    sign = view.scene.sign
    if sign is None:
        return None
    style = "read" if rng.random() < 0.6 else "short"
    roll = rng.random()
    if roll < 0.75:
        return QA("reading", rng.choice(READ), sign.text, style=style)
    first = roll < 0.88
    return QA(
        "reading",
        f"What is the {'first' if first else 'last'} character on the sign?",
        sign.text[0 if first else -1],
        style=style,
    )


def place(view: View, rng: random.Random) -> QA | None:
    pool = [k for k in view.nameable() if view.cell(view.items[k], 3)]
    if not pool:
        return None
    index = rng.choice(pool)
    return QA("place", f"Where is the {view.phrase(index, rng)}?", str(view.cell(view.items[index])), named=(index,))


def _options(rng: random.Random, right: str, wrong: list[str], most: int = 4) -> tuple[str, str]:
    """Lines `A. text` and the letter of the right one."""
    texts = [*rng.sample(wrong, min(len(wrong), rng.choice((1, 2, 3, 3)), most - 1)), right]
    rng.shuffle(texts)
    return "\n".join(f"{'ABCD'[i]}. {text}" for i, text in enumerate(texts)), "ABCD"[texts.index(right)]


def letter(view: View, rng: random.Random) -> QA | None:
    """A multiple choice question: what is there, what is not, its colour, how many, where."""
    roll, item = rng.random(), rng.choice(view.items)
    away = [n for n in NAMES if n not in view.names]
    if roll < 0.4:
        question, right, wrong = "Which object is in the picture?", item.name, away
    elif roll < 0.5 and len(view.names) > 3:
        question, right, wrong = "Which object is not in the picture?", rng.choice(away), list(view.names)
    elif roll < 0.65:
        pool = [i for i in view.items if i.colour and view.names[i.name] == 1]
        if not pool:
            return None
        item = rng.choice(pool)
        question, right, wrong = (
            f"What color is the {item.name}?",
            item.colour,
            [c for c in COLOURS if c != item.colour],
        )
    else:
        base = write(view, rng.choice(("count", "category", "relation", "existence")), rng)
        if base is None:
            return None
        question, right = base.question, base.answer
        if right in ("yes", "no"):
            wrong = ["no" if right == "yes" else "yes"]
        elif right in OBJECTS:
            wrong = [n for n in NAMES if n != right and (base.kind != "category" or n not in view.names)]
        elif right in ("left", "right", "above", "below"):
            wrong = [{"left": "right", "right": "left", "above": "below", "below": "above"}[right]]
        else:
            wrong = [str(n) for n in range(6) if str(n) != right]
    lines, mark = _options(rng, right, wrong)
    return QA("letter", f"{question}\n{lines}", mark, style="letter")


def chinese(view: View, rng: random.Random) -> QA | None:
    """A Chinese multiple choice question, as MMBench-CN asks it."""
    roll, item = rng.random(), rng.choice(view.items)
    if roll < 0.55:
        question, right = "图中有什么？", CHINESE[item.name]
        wrong = [CHINESE[n] for n in NAMES if n not in view.names]
    elif roll < 0.8:
        pool = [i for i in view.items if i.colour and view.names[i.name] == 1]
        if not pool:
            return None
        item = rng.choice(pool)
        question, right = f"{CHINESE[item.name]}是什么颜色的？", COLOURS[item.colour]
        wrong = [zh for name, zh in COLOURS.items() if name != item.colour]
    elif roll < 0.9:
        right_name = rng.choice(list(view.names))
        question, right = f"图中有多少个{CHINESE[right_name]}？", str(view.names[right_name])
        wrong = [str(n) for n in range(6) if n != view.names[right_name]]
    else:
        question, right = "图中有哪一类东西？", CATEGORY_CHINESE[item.category]
        wrong = [zh for name, zh in CATEGORY_CHINESE.items() if name not in view.categories]
    lines, mark = _options(rng, right, wrong)
    return QA("chinese", f"{question}\n{lines}", mark, style="chinese")


def judge(view: View, rng: random.Random) -> QA | None:
    """An MME style question: `Please answer yes or no.`"""
    base = write(view, rng.choice(("existence", "attribute", "relation", "existence")), rng)
    if base is None or base.structural != "verify":
        return None
    return dataclasses.replace(base, kind="judge", question=f"{base.question} Please answer yes or no.")


DESCRIBE = ("Describe the picture.", "Describe the image concisely.", "Provide a brief description of the given image.",
            "What do you see in the picture?")  # fmt: skip


def ordered(view: View) -> list[int]:
    """Items from top to bottom and, within a third, from left to right."""
    rows = {k: min(2, int(3 * i.centre[1] / view.scene.height)) for k, i in enumerate(view.items)}
    return sorted(rows, key=lambda k: (rows[k], view.items[k].centre[0]))


def describe(view: View, rng: random.Random) -> QA | None:
    """Say what is where: a short text that names everything."""
    parts = []
    for k in ordered(view):
        item = view.items[k]
        words = [w for w in ("large" if item.large else "", item.colour, item.name) if w]
        parts.append(f"{article(' '.join(words))} at the {view.cell(item)}")
    if view.scene.sign:
        parts.append(f"a sign that says {view.scene.sign.text}")
    text = "There is " + ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
    return QA("describe", rng.choice(DESCRIBE), text + ".", style="long")


def listing(view: View, rng: random.Random) -> QA | None:
    """Name everything, one word each."""
    names = [view.items[k].name for k in ordered(view)]
    return QA("list", "List the objects in the picture.", ", ".join(names), style=rng.choice(("short", "long")))


Writer = Callable[[View, random.Random], QA | None]
EXTRA: dict[str, Writer] = {
    "reading": reading,
    "place": place,
    "letter": letter,
    "chinese": chinese,
    "judge": judge,
    "describe": describe,
    "list": listing,
}
TRAIN_MIX = {name: 6.0 * share for name, share in GQA_MIX.items()} | {
    "relation": 1.8, "count": 1.6, "reading": 4.0, "place": 0.8,
    "letter": 1.1, "chinese": 0.7, "judge": 0.4, "describe": 0.9, "list": 0.5,
}  # fmt: skip


def training_questions(
    scene: Scene,
    rng: random.Random,
    number: int,
    mix: Mapping[str, float],
    writers: Mapping[str, Writer],
) -> list[QA]:
    """`number` questions about a scene, as `mix` weighs their kinds; `writers` knows those that GQA's do not."""
    view = View(scene)
    made: list[QA] = []
    for kind in rng.choices(list(mix), weights=list(mix.values()), k=3 * number):
        qa = writers[kind](view, rng) if kind in writers else write(view, kind, rng, tries=4)
        if qa is not None and all(qa.question != other.question for other in made):
            made.append(qa)
        if len(made) == number:
            break
    return made
