"""Questions about a scene, written from its truth: the same writers make the training mix and the benchmark files.

A writer takes a `View` of a scene and a random generator and returns a `QA`, or None when the scene does not support
its question. Every answer is decided with a margin (`MARGIN` units), so that no person would dispute it.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Callable

from playground.mini.catalogue import CATEGORIES, CATEGORY, COLOURS, NAMES, OBJECTS, THEMES, VARIANTS, plural
from playground.mini.scenes import Item, Scene

SHORT = "Answer the question using a single word or phrase."
MARGIN = 10
SIDES = {"to the left of": (-1, 0), "to the right of": (1, 0), "above": (0, -1), "below": (0, 1)}
OPPOSITE = {
    "to the left of": "to the right of",
    "to the right of": "to the left of",
    "above": "below",
    "below": "above",
}


@dataclasses.dataclass(frozen=True)
class QA:
    """A question and its answer; `group`, `structural` and `detailed` are what GQA's files call them."""

    kind: str
    question: str
    answer: str
    structural: str = "query"
    detailed: str = ""
    group: str = ""
    style: str = "short"
    named: tuple[int, ...] = ()


class View:
    """A scene as the question writers look at it."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.items = scene, scene.items
        self.names = collections.Counter(i.name for i in scene.items)
        self.categories = collections.Counter(i.category for i in scene.items)
        tints = collections.Counter((i.name, i.colour) for i in scene.items)
        self.unique = [k for k, i in enumerate(self.items) if self.names[i.name] == 1]
        self.tinted = [k for k, i in enumerate(self.items) if i.colour and tints[i.name, i.colour] == 1]

    def phrase(self, index: int, rng: random.Random) -> str:
        """How to name an item without ambiguity: by its word, or by colour and word where the word is not enough."""
        item = self.items[index]
        plain = self.names[item.name] == 1
        return item.name if plain and (not item.colour or rng.random() < 0.8) else f"{item.colour} {item.name}"

    def nameable(self) -> list[int]:
        """The items that some phrase names without ambiguity."""
        return sorted({*self.unique, *self.tinted})

    def cell(self, item: Item, margin: float = 0) -> str | None:
        """The third-by-third place of an item's centre, or None within `margin` of a border between places."""
        words = []
        for value, length, names in zip(item.centre[::-1], (self.scene.height, self.scene.width),
                                        (("top", "", "bottom"), ("left", "", "right")), strict=True):  # fmt: skip
            if min(abs(value - length / 3), abs(value - 2 * length / 3)) < margin:
                return None
            words.append(names[min(2, int(3 * value / length))])
        return " ".join(w for w in words if w) or "center"


def article(phrase: str) -> str:
    """The phrase with its indefinite article."""
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def _absent(view: View, rng: random.Random) -> str:
    """A name that is not there, half of the time one that its theme would suggest."""
    pool = THEMES[view.scene.theme] if rng.random() < 0.5 else NAMES
    left = [n for n in pool if n not in view.names] or [n for n in NAMES if n not in view.names]
    return rng.choice(left)


def existence(view: View, rng: random.Random) -> QA | None:
    """Is there a dog? A yes/no question about an object, sometimes with a colour, sometimes about a category."""
    yes = rng.random() < 0.5
    index: tuple[int, ...] = ()
    roll, detailed = rng.random(), "exist"
    if roll < 0.15:
        pool = [c for c in CATEGORIES if (c in view.categories) == yes]
        if not pool:
            return None
        word, detailed = rng.choice(pool), "existCategory"
        question = (
            f"Are there any {word}s in the picture?"
            if word not in ("food", "clothing")
            else f"Is there any {word} in the picture?"
        )
        return QA("existence", question, "yes" if yes else "no", "verify", detailed, word)
    if yes:
        index = (rng.randrange(len(view.items)),)
        word = view.items[index[0]].name
        if view.items[index[0]].colour and roll < 0.45:
            word, detailed = f"{view.items[index[0]].colour} {word}", "existAttr"
    else:
        word = _absent(view, rng)
        shown = [i.name for i in view.items if i.name in VARIANTS]
        if shown and roll < 0.4:
            name = rng.choice(shown)
            tints = set(OBJECTS[name][2]) - {i.colour for i in view.items if i.name == name}
            if tints:
                word, detailed = f"{rng.choice(sorted(tints))} {name}", "existAttr"
    form = rng.choice(("Is there {a} in the picture?", "Do you see {a} in the picture?", "Is there {a} in the image?",
                       "Is there {a} in this image?"))  # fmt: skip
    return QA(
        "existence",
        form.format(a=article(word)),
        "yes" if yes else "no",
        "verify",
        detailed,
        word.split()[-1],
        named=index,
    )


def category(view: View, rng: random.Random) -> QA | None:
    """What fruit is there? What is at the top left? Is it a dog or a cat? What is the large object?"""
    roll = rng.random()
    if roll < 0.45:
        single = [k for k, i in enumerate(view.items) if i.category != "shape" and view.categories[i.category] == 1]
        if not single:
            return None
        item = view.items[index := rng.choice(single)]
        form = rng.choice(
            ("What {c} is in the picture?", "Which kind of {c} is in the picture?", "What kind of {c} do you see?")
        )
        word = {"clothing": "clothing", "food": "food"}.get(item.category, item.category)
        return QA("category", form.format(c=word), item.name, "query", "categoryThat", item.category, named=(index,))
    if roll < 0.7:
        cells = collections.defaultdict(list)
        for k, item in enumerate(view.items):
            cells[view.cell(item)].append(k)
        single = [v[0] for v in cells.values() if len(v) == 1 and view.cell(view.items[v[0]], 6)]
        if not single:
            return None
        item = view.items[index := rng.choice(single)]
        place = view.cell(item)
        form = rng.choice(("What is at the {p} of the picture?", "What object is at the {p} of the picture?"))
        return QA("category", form.format(p=place), item.name, "query", "positionObject", str(place), named=(index,))
    if roll < 0.85:
        item = view.items[index := rng.randrange(len(view.items))]
        others = [n for n in NAMES if n not in view.names and (CATEGORY[n] == item.category or rng.random() < 0.1)]
        if not others:
            return None
        pair = rng.sample([item.name, rng.choice(others)], 2)
        question = f"Which is in the picture, {article(pair[0])} or {article(pair[1])}?"
        return QA("category", question, item.name, "choose", "chooseObject", item.category, named=(index,))
    large = [k for k, i in enumerate(view.items) if i.large]
    if len(large) != 1:
        return None
    return QA(
        "category",
        "What is the large object in the picture?",
        view.items[large[0]].name,
        "query",
        "largeObject",
        "large",
        named=(large[0],),
    )


def attribute(view: View, rng: random.Random) -> QA | None:
    """What color is the heart? Is it red or blue? Is it red? Is the dog large or small?"""
    if rng.random() < 0.25:
        pool = [k for k in view.unique if view.items[k].large or view.items[k].size <= 30]
        large = [k for k in pool if view.items[k].large]
        pool = large if large and rng.random() < 0.5 else pool
        if not pool:
            return None
        item = view.items[index := rng.choice(pool)]
        form = rng.choice(("Is the {n} large or small?", "Is the {n} small or large?"))
        return QA(
            "attribute",
            form.format(n=item.name),
            "large" if item.large else "small",
            "choose",
            "chooseSize",
            "size",
            named=(index,),
        )
    pool = [k for k in view.unique if view.items[k].colour]
    variants = [k for k in pool if view.items[k].name in VARIANTS]
    pool = variants if variants and rng.random() < 0.8 else pool
    if not pool:
        return None
    item, roll = view.items[index := rng.choice(pool)], rng.random()
    if roll < 0.5:
        form = rng.choice(("What color is the {n}?", "Which color is the {n}?", "What is the color of the {n}?"))
        return QA("attribute", form.format(n=item.name), item.colour, "query", "color", "color", named=(index,))
    other = rng.choice(
        sorted((set(OBJECTS[item.name][2]) if item.name in VARIANTS else set(COLOURS)) - {item.colour, ""})
    )
    if roll < 0.75:
        pair = rng.sample([item.colour, other], 2)
        return QA(
            "attribute",
            f"Is the {item.name} {pair[0]} or {pair[1]}?",
            item.colour,
            "choose",
            "chooseColor",
            "color",
            named=(index,),
        )
    yes = rng.random() < 0.5
    return QA(
        "attribute",
        f"Is the {item.name} {item.colour if yes else other}?",
        "yes" if yes else "no",
        "verify",
        "verifyColor",
        "color",
        named=(index,),
    )


def count(view: View, rng: random.Random) -> QA | None:
    """How many dogs are there? How many animals?"""
    many = [n for n, c in view.names.items() if c > 1]
    roll = rng.random()
    if roll < 0.14:
        word, number = plural(_absent(view, rng)), 0
    elif roll < 0.30:
        name = rng.choice([c for c in view.categories if view.categories[c] < 6] or ["animal"])
        word, number = (name if name in ("food", "clothing") else name + "s"), view.categories[name]
        if name in ("food", "clothing"):
            return None
    else:
        name = rng.choice(many if many and roll < 0.85 else list(view.names))
        word, number = plural(name), view.names[name]
    named = tuple(k for k, i in enumerate(view.items) if word in (plural(i.name), i.category + "s"))
    form = rng.choice(("How many {w} are there?", "How many {w} are in the picture?", "How many {w} do you see?"))
    return QA("count", form.format(w=word), str(number), "query", "count", "count", named=named)


def _side(first: Item, second: Item, side: str) -> float:
    """How far `first` lies on that side of `second` (negative: on the other side)."""
    sx, sy = SIDES[side]
    return (first.centre[0] - second.centre[0]) * sx + (first.centre[1] - second.centre[1]) * sy


PAIRS = {
    True: ("to the left or to the right of", "to the right or to the left of"),
    False: ("above or below", "below or above"),
}


def relation(view: View, rng: random.Random) -> QA | None:
    """Is the dog to the left of the cat? On which side? What is to the left of the cat?"""
    pool = view.nameable()
    if len(pool) < 2:
        return None
    one, two = rng.sample(pool, 2)
    side, roll = rng.choice(list(SIDES)), rng.random()
    if roll >= 0.65:
        return _relation_object(view, rng, two, side)
    distance = _side(view.items[one], view.items[two], side)
    if abs(distance) < MARGIN:
        return None
    first, second = view.phrase(one, rng), view.phrase(two, rng)
    true = side if distance > 0 else OPPOSITE[side]
    if roll < 0.4:
        answer = "yes" if true == side else "no"
        text = f"Is the {first} {side} the {second}?"
        return QA("relation", text, answer, "verify", "relVerify", side, named=(one, two))
    word = {"to the left of": "left", "to the right of": "right"}.get(true, true)
    pair = rng.choice(PAIRS[SIDES[side][0] != 0])
    return QA("relation", f"Is the {first} {pair} the {second}?", word, "choose", "relChoose", pair, named=(one, two))


def _relation_object(view: View, rng: random.Random, anchor: int, side: str) -> QA | None:
    """What (animal) is to the left of the cat? Only where exactly one thing is."""
    b = view.items[anchor]
    kinds = [c for c in view.categories if c != b.category] if rng.random() < 0.5 else []
    kind = rng.choice(kinds) if kinds else ""
    fitting = [k for k, i in enumerate(view.items) if k != anchor and (not kind or i.category == kind)]
    there = [k for k in fitting if _side(view.items[k], b, side) >= MARGIN]
    if len(there) != 1 or any(-MARGIN / 2 < _side(view.items[k], b, side) < MARGIN for k in fitting):
        return None
    question = f"What{' ' + kind if kind else ''} is {side} the {view.phrase(anchor, rng)}?"
    name = view.items[there[0]].name
    return QA("relation", question, name, "query", "relObject", side, named=(anchor, there[0]))


WRITERS: dict[str, Callable[[View, random.Random], QA | None]] = {
    "existence": existence, "category": category, "attribute": attribute, "count": count, "relation": relation,
}  # fmt: skip
GQA_MIX = {"existence": 0.22, "category": 0.25, "attribute": 0.20, "count": 0.13, "relation": 0.20}


def write(view: View, kind: str, rng: random.Random, tries: int = 12) -> QA | None:
    """A question of a kind, or None when the scene does not support one."""
    for _ in range(tries):
        made = WRITERS[kind](view, rng)
        if made is not None:
            return made
    return None
