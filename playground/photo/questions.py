"""Questions about a scene, in the forms of the mini playground, written from its truth."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable

from playground.mini.benchmarks.choices import Choice
from playground.mini.questions import QA, SHORT, View, article, relation
from playground.mini.styles import LETTER
from playground.photo.catalogue import CATEGORIES, CATEGORY, SIGNS, plural
from playground.photo.scenes import HALF, QUADRANTS, UNITS, PhotoScene, Thing, shown_in

NUMBERS = ("zero", "one", "two", "three", "four")
CHOICES = ("identity", "place", "counting", "side", "sign")  # what a question with options is about
LARGER = 1.35  # a thing is larger where its longer side is so many times another's
CLEAR = 12  # units from the middle lines within which no place is asked for
MASS = {"fish", "broccoli", "corn", "ginger", "grapes", "lavender", "binoculars", "scissors", "pliers"}


def a(word: str) -> str:
    """A word with its article, where it has one."""
    return word if word in MASS and word != "fish" else article(word)


class PhotoView(View):
    """A scene as the question writers look at it."""

    scene: PhotoScene  # type: ignore[assignment]
    items: tuple[Thing, ...]  # type: ignore[assignment]

    def __init__(self, shown: PhotoScene, known: list[str] | None = None) -> None:
        super().__init__(shown)  # type: ignore[arg-type]
        self.known = known or list(shown_in("train"))  # names that may be asked for

    def quadrant(self, item: Thing) -> str | None:
        """Where the centre of a thing is, or None near the middle lines."""
        x, y = item.centre
        if min(abs(x - HALF), abs(y - HALF)) < CLEAR:
            return None
        return QUADRANTS[int(x > HALF), int(y > HALF)]


def _absent(view: PhotoView, rng: random.Random) -> str:
    """A name that is not there, half of the time of a category that is."""
    missing = [name for name in view.known if name not in view.names]
    near = [name for name in missing if CATEGORY[name] and CATEGORY[name] in view.categories]
    return rng.choice(near if near and rng.random() < 0.5 else missing)


def existence(view: PhotoView, rng: random.Random) -> QA | None:
    """Is there a zebra? Sometimes a category or a sign."""
    yes, roll = rng.random() < 0.5, rng.random()
    named: tuple[int, ...] = ()
    if roll < 0.12:
        pool = [c for c in CATEGORIES if (c in view.categories) == yes]
        if not pool:
            return None
        word, detailed = rng.choice(pool), "existCategory"
    elif roll < 0.18:
        word, yes, detailed = "sign", view.scene.sign is not None, "exist"
    else:
        detailed = "exist"
        present = [k for k, i in enumerate(view.items) if i.name in view.known]
        if yes and not present:
            return None
        named = (rng.choice(present),) if yes else ()
        word = view.items[named[0]].name if named else _absent(view, rng)
    form = rng.choice(("Is there {a} in the picture?", "Do you see {a} in the picture?", "Is there {a} in the image?"))
    return QA("existence", form.format(a=a(word)), "yes" if yes else "no", "verify", detailed, word, named=named)


def name(view: PhotoView, rng: random.Random) -> QA | None:
    """What is in the picture? What is at the top left? What bird is in the picture?"""
    roll = rng.random()
    known = [k for k, i in enumerate(view.items) if i.name in view.known]
    if len(view.items) == 1 and view.scene.sign is None and roll < 0.6:
        if not known:
            return None
        form = rng.choice(("What is in the picture?", "What is shown in the picture?"))
        return QA("category", form, view.items[0].name, "query", "object", "all", named=(0,))
    if roll < 0.35:
        single = [k for k in known if view.items[k].category and view.categories[view.items[k].category] == 1]
        if not single:
            return None
        index = rng.choice(single)
        word = view.items[index].category
        form = rng.choice(("What {c} is in the picture?", "Which {c} is in the picture?"))
        return QA(
            "category", form.format(c=word), view.items[index].name, "query", "categoryThat", word, named=(index,)
        )
    here = collections.defaultdict(list)
    for k, item in enumerate(view.items):
        here[view.quadrant(item)].append(k)
    sign = view.scene.sign
    taken = None if sign is None else QUADRANTS[int(sign.x >= HALF), int(sign.y >= HALF)]
    single = [v[0] for q, v in here.items() if q not in (None, taken) and len(v) == 1 and v[0] in known]
    if not single or None in here:
        return None
    place = view.quadrant(view.items[index := rng.choice(single)])
    form = rng.choice(("What is at the {p} of the picture?", "What is at the {p}?"))
    return QA("category", form.format(p=place), view.items[index].name, "query", "positionObject", str(place),
              named=(index,))  # fmt: skip


def choose(view: PhotoView, rng: random.Random) -> QA | None:
    """Which is in the picture, a zebra or a horse?"""
    known = [k for k, i in enumerate(view.items) if i.name in view.known]
    if not known:
        return None
    index = rng.choice(known)
    pair = rng.sample([view.items[index].name, _absent(view, rng)], 2)
    question = f"Which is in the picture, {a(pair[0])} or {a(pair[1])}?"
    return QA("choose", question, view.items[index].name, "choose", "chooseObject", "choose", named=(index,))


def place(view: PhotoView, rng: random.Random) -> QA | None:
    """Where is the zebra? Is it at the left or at the right?"""
    single = [k for k in view.unique if view.quadrant(view.items[k]) and view.items[k].name in view.known]
    if not single:
        return None
    item = view.items[index := rng.choice(single)]
    where = str(view.quadrant(item))
    roll = rng.random()
    if roll < 0.6:
        form = rng.choice(("Where is the {n}?", "Where is the {n} in the picture?"))
        return QA("place", form.format(n=item.name), where, "query", "place", "place", named=(index,))
    vertical, horizontal = where.split()
    words, answer = (("left", "right"), horizontal) if roll < 0.8 else (("top", "bottom"), vertical)
    pair = rng.sample(words, 2)
    question = f"Is the {item.name} at the {pair[0]} or at the {pair[1]}?"
    return QA("place", question, answer, "choose", "placeChoose", "place", named=(index,))


def count(view: PhotoView, rng: random.Random) -> QA | None:
    """How many things are there? How many zebras? Signs are not counted."""
    roll = rng.random()
    if roll < 0.5 and view.scene.sign is None:
        return QA("count", "How many things are in the picture?", NUMBERS[len(view.items)], "query", "count", "all")
    if roll < 0.65:
        word, number = _absent(view, rng), 0
    elif roll < 0.75:
        word = rng.choice(CATEGORIES)
        number = view.categories[word]
    else:
        present = [n for n in view.names if n in view.known]
        many = [n for n in present if view.names[n] > 1]
        if not present:
            return None
        word = rng.choice(many if many and rng.random() < 0.7 else present)
        number = view.names[word]
    if word in MASS - {"fish"}:
        return None
    form = rng.choice(("How many {w} are there?", "How many {w} are in the picture?"))
    return QA("count", form.format(w=plural(word)), NUMBERS[number], "query", "count", "count")


def comparison(view: PhotoView, rng: random.Random) -> QA | None:
    """Is the zebra larger than the mug? As it is drawn."""
    pool = [k for k in view.unique if view.items[k].name in view.known]
    if len(pool) < 2:
        return None
    one, two = rng.sample(pool, 2)
    ratio = view.items[one].size / view.items[two].size
    if 1 / LARGER < ratio < LARGER:
        return None
    question = f"Does the {view.items[one].name} look larger than the {view.items[two].name}?"
    return QA("comparison", question, "yes" if ratio > 1 else "no", "verify", "compare", "size", named=(one, two))


def beside(view: PhotoView, rng: random.Random) -> QA | None:
    """The mini playground's relations, between things of known names."""
    made = relation(view, rng)
    return made if made and all(view.items[k].name in view.known for k in made.named) else None


def reading(view: PhotoView, rng: random.Random) -> QA | None:
    """What does the sign say?"""
    sign = view.scene.sign
    if sign is None:
        return None
    if rng.random() < 0.7:
        form = rng.choice(("What does the sign say?", "What is written on the sign?"))
        return QA("reading", form, sign.text.lower(), "query", "reading", "sign")
    yes = rng.random() < 0.5
    word = sign.text if yes else rng.choice([w for w in SIGNS if w != sign.text])
    return QA(
        "reading", f"Does the sign say {word.lower()}?", "yes" if yes else "no", "verify", "readingVerify", "sign"
    )


def grounding(view: PhotoView, rng: random.Random) -> QA | None:
    """Give the box of the zebra: left, top, right and bottom in tenths of the picture."""
    pool = [k for k in view.unique if view.items[k].name in view.known]
    if not pool:
        return None
    item = view.items[index := rng.choice(pool)]
    sides = item.x, item.y, item.x + item.width, item.y + item.height
    box = " ".join(str(min(9, int(10 * side / UNITS))) for side in sides)
    return QA("grounding", f"Give the box of the {item.name}.", box, "query", "box", "box", named=(index,))


def description(view: PhotoView, rng: random.Random) -> QA:
    """Describe the picture."""
    parts = []
    for item in sorted(view.items, key=lambda i: (i.centre[1] > HALF, i.centre[0] > HALF)):
        where = view.quadrant(item)
        parts.append(a(item.name) + (f" at the {where}" if where else ""))
    if view.scene.sign is not None:
        parts.append(f"a sign that says {view.scene.sign.text.lower()}")
    text = ", ".join(parts[:-1]) + (" and " if parts[:-1] else "") + parts[-1]
    question = rng.choice(("Describe the picture.", "What do you see?"))
    return QA("description", question, text, style="open")


def choice(view: PhotoView, kind: str, rng: random.Random, most: int = 4) -> Choice | None:
    """A multiple choice question with `most` options, or None where the scene does not support it."""
    names, absent = list(view.names), [name for name in view.known if name not in view.names]
    single = [k for k in view.unique if view.quadrant(view.items[k])]
    if kind == "identity":
        question, right, wrong = "Which object is in the picture?", rng.choice(names), absent
    elif kind == "counting":
        name = rng.choice(names)
        question, right = f"How many {plural(name)} are there?", NUMBERS[view.names[name]]
        wrong = [number for number in NUMBERS if number != right]
    elif kind == "place" and single:
        item = view.items[rng.choice(single)]
        question, right = f"Where is the {item.name}?", str(view.quadrant(item))
        wrong = [place for place in QUADRANTS.values() if place != right]
    elif kind == "side" and (made := write(view, "relation", rng, 40)) and made.structural == "query":
        question, right, wrong = made.question, made.answer, absent
    elif kind == "sign" and view.scene.sign:
        question, right = "What does the sign say?", view.scene.sign.text.lower()
        wrong = [word.lower() for word in SIGNS if word.lower() != right]
    else:
        return None
    options = [*rng.sample(wrong, most - 1), right]
    rng.shuffle(options)
    return Choice(kind, question, tuple(options), options.index(right))


def letter(view: PhotoView, rng: random.Random) -> QA | None:
    """A question with four options, answered by a letter, in the words of LLaVA's MMBench and SEED-Bench."""
    made = choice(view, rng.choice(CHOICES), rng)
    if made is None:
        return None
    return QA("letter", f"{made.text}\n{LETTER}", made.letter, "query", "letter", made.kind, style="letter")


WRITERS: dict[str, Callable[[PhotoView, random.Random], QA | None]] = {
    "existence": existence, "category": name, "choose": choose, "place": place, "count": count, "relation": beside,
    "comparison": comparison, "reading": reading, "grounding": grounding, "description": description,
    "letter": letter,
}  # fmt: skip


def write(view: PhotoView, kind: str, rng: random.Random, tries: int = 8) -> QA | None:
    """A question of a kind, or None where the scene does not support one."""
    for _ in range(tries):
        made = WRITERS[kind](view, rng)
        if made is not None:
            return made
    return None


def prompt(qa: QA) -> str:
    """What the model is asked, with LLaVA's words for a short answer."""
    return f"{qa.question}\n{SHORT}" if qa.style == "short" else qa.question
