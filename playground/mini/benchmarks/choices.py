"""Multiple choice questions about a scene, by what they ask for: MMBench, SEED-Bench and ScienceQA pick from here.

A writer takes a `View` and a random generator and returns a `Choice`, or None when the scene does not support its
question. Wrong options are wrong without doubt, and the margins are those of `questions.py`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from playground.mini.catalogue import CATEGORIES, COLOURS, NAMES, SIGN_ALPHABET, THEMES, VARIANTS, plural
from playground.mini.questions import MARGIN, View, attribute, relation, write

PLACES = [f"{v} {h}".strip() or "center" for v in ("top", "", "bottom") for h in ("left", "", "right")]
LETTERS = "ABCDE"


@dataclasses.dataclass(frozen=True)
class Choice:
    """A question, its options in the order they are shown, and the number of the right one."""

    kind: str
    question: str
    options: tuple[str, ...]
    right: int

    @property
    def letter(self) -> str:
        """The letter of the right option."""
        return LETTERS[self.right]

    @property
    def text(self) -> str:
        """The question with a line `A. text` for each option."""
        return "\n".join([self.question, *(f"{LETTERS[k]}. {text}" for k, text in enumerate(self.options))])

    def rotated(self, by: int) -> Choice:
        """The same with its options turned to the left: what was B becomes A."""
        turned = self.options[by:] + self.options[:by]
        return dataclasses.replace(self, options=turned, right=(self.right - by) % len(self.options))


Draft = tuple[str, str, list[str]]  # question, right answer, wrong answers
Writer = Callable[[View, random.Random], Draft | None]


def absent(view: View) -> list[str]:
    return [name for name in NAMES if name not in view.names]


def identity(view: View, rng: random.Random) -> Draft | None:
    """Which object is in the picture?"""
    return "Which object is in the picture?", rng.choice(view.items).name, absent(view)


def missing(view: View, rng: random.Random) -> Draft | None:
    """Which object is not in the picture?"""
    names = list(view.names)
    return ("Which object is not in the picture?", rng.choice(absent(view)), names) if len(names) > 2 else None


def colour(view: View, rng: random.Random) -> Draft | None:
    """What color is the heart?"""
    pool = [i for i in view.items if i.colour and view.names[i.name] == 1]
    if not pool:
        return None
    item = rng.choice([i for i in pool if i.name in VARIANTS] or pool)
    return f"What color is the {item.name}?", item.colour, [c for c in COLOURS if c != item.colour]


def counting(view: View, rng: random.Random) -> Draft | None:
    """How many dogs are there?"""
    many = [n for n, number in view.names.items() if number > 1]
    name = rng.choice(many if many and rng.random() < 0.6 else list(view.names))
    wrong = [str(n) for n in range(1, 6) if n != view.names[name]]
    return f"How many {plural(name)} are there?", str(view.names[name]), wrong


def place(view: View, rng: random.Random) -> Draft | None:
    """Where is the dog?"""
    pool = [k for k in view.unique if view.cell(view.items[k], 3)]
    if not pool:
        return None
    item = view.items[rng.choice(pool)]
    right = str(view.cell(item))
    return f"Where is the {item.name}?", right, [one for one in PLACES if one != right]


def side(view: View, rng: random.Random) -> Draft | None:
    """What is to the left of the cat? Options are other things in the picture, and some that are not."""
    made = write(view, "relation", rng, 40)
    if made is None or made.detailed != "relObject":
        return None
    others = [n for k, n in enumerate(i.name for i in view.items) if k not in made.named and view.names[n] == 1]
    others = [n for n in others if n not in made.question and n != made.answer]
    return made.question, made.answer, rng.sample(others, min(2, len(others))) + rng.sample(absent(view), 3)


def either(view: View, rng: random.Random) -> Draft | None:
    """Is the dog above or below the cat?"""
    made = relation(view, rng)
    if made is None or made.structural != "choose":
        return None
    wrong = {"left": "right", "right": "left", "above": "below", "below": "above"}[made.answer]
    return made.question, made.answer, [wrong]


def size(view: View, rng: random.Random) -> Draft | None:
    """Is the dog large or small?"""
    made = attribute(view, rng)
    if made is None or made.detailed != "chooseSize":
        return None
    return made.question, made.answer, ["small" if made.answer == "large" else "large"]


def nearest(view: View, rng: random.Random) -> Draft | None:
    """Which object is closest to the cat?"""
    if len(view.unique) < 3:
        return None
    anchor = rng.choice(view.unique)
    x, y = view.items[anchor].centre
    distance = {k: ((i.centre[0] - x) ** 2 + (i.centre[1] - y) ** 2) ** 0.5 for k, i in enumerate(view.items)}
    first, second, *_ = sorted((k for k in distance if k != anchor), key=lambda k: distance[k])
    right = view.items[first].name
    if distance[second] - distance[first] < 2 * MARGIN or view.names[right] > 1:
        return None
    wrong = [n for n in view.names if n not in (right, view.items[anchor].name)]
    return f"Which object is closest to the {view.items[anchor].name}?", right, wrong


def member(view: View, rng: random.Random) -> Draft | None:
    """Which object in the picture is a fruit? The wrong options are in the picture too."""
    single = [i for i in view.items if view.names[i.name] == 1 and i.category not in ("shape", "food", "clothing")]
    single = [i for i in single if view.categories[i.category] == 1]
    if not single:
        return None
    item = rng.choice(single)
    wrong = [n for n in view.names if n != item.name]
    return f"Which object in the picture is {_a(item.category)}?", item.name, wrong


def kind(view: View, rng: random.Random) -> Draft | None:
    """Which kind of thing is in the picture?"""
    wrong = [one for one in CATEGORIES if one not in view.categories]
    return "Which kind of thing is in the picture?", rng.choice(view.items).category, wrong


def sign(view: View, rng: random.Random) -> Draft | None:
    """What does the sign say? Wrong signs differ in one or two characters."""
    if view.scene.sign is None:
        return None
    right = view.scene.sign.text
    wrong = {right[::-1], "".join(rng.sample(SIGN_ALPHABET, len(right)))}
    for number in range(len(right)):
        wrong.add(right[:number] + rng.choice(SIGN_ALPHABET) + right[number + 1 :])
    return "What does the sign say?", right, sorted(wrong - {right})


def theme(view: View, rng: random.Random) -> Draft | None:
    """What place do these things suggest? Only where most things fit one place, and few another."""
    fits = {name: sum(i.name in THEMES[name] for i in view.items) for name in THEMES if name not in ("shapes", "wild")}
    best = max(fits, key=lambda name: fits[name])
    wrong = [name for name, count in fits.items() if count <= 1]
    enough = fits[best] >= 3 and fits[best] >= 0.6 * len(view.items) and len(wrong) >= 3
    return ("Where would you most likely find these things?", best, wrong) if enough else None


def _a(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


WRITERS: dict[str, Writer] = {
    "identity": identity, "missing": missing, "colour": colour, "counting": counting, "place": place, "side": side,
    "either": either, "size": size, "nearest": nearest, "member": member, "kind": kind, "sign": sign, "theme": theme,
}  # fmt: skip


def choose(view: View, name: str, rng: random.Random, most: int = 4, exactly: bool = False) -> Choice | None:
    """A question of a kind with at most (or `exactly`) so many options, or None after some attempts."""
    for _ in range(12):
        draft = WRITERS[name](view, rng)
        if draft is None or (exactly and len(set(draft[2])) < most - 1):
            continue
        question, right, wrong = draft
        pool = sorted(set(wrong) - {right})
        texts = [*rng.sample(pool, min(most - 1, len(pool))), right]
        rng.shuffle(texts)
        return Choice(name, question, tuple(texts), texts.index(right)) if len(texts) > 1 else None
    return None
