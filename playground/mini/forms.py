"""The question forms of MME, MM-Vet and the multiple choice benchmarks, as training questions about training scenes.

The writers are those of the benchmark files, as for GQA, POPE and TextVQA; the scenes never are. `MIX` weighs them
beside the styles of `styles.py`.
"""

from __future__ import annotations

import random

from playground.mini.benchmarks import choices, mme, mmvet, sqa
from playground.mini.benchmarks.mmbench import HINT
from playground.mini.questions import QA, View
from playground.mini.styles import EXTRA, TRAIN_MIX, Writer


def choice(view: View, rng: random.Random) -> QA | None:
    """A question with two to five options, now and then after a hint, as MMBench, SEED-Bench and ScienceQA ask it."""
    made = choices.choose(view, rng.choice(list(choices.WRITERS)), rng, rng.choice((2, 3, 4, 4, 5)))
    if made is None:
        return None
    hint = rng.choice((f"{HINT}\n", f"Context: {sqa.HINT}\n", *[""] * 8))
    return QA("choice", hint + made.text, made.letter, style="letter")


def words(view: View, rng: random.Random) -> QA:
    """A ScienceQA question about words alone, beside a picture that has nothing to do with it."""
    made, hint = sqa.worded(rng)
    return QA("words", (f"Context: {hint}\n" if hint else "") + made.text, made.letter, style="letter")


def pair(view: View, rng: random.Random) -> QA | None:
    """One of the two questions of an MME task."""
    made = mme.TASKS[rng.choice(list(mme.TASKS))](view, rng)
    if made is None:
        return None
    yes = rng.random() < 0.5
    return QA("pair", made[0] if yes else made[1], "yes" if yes else "no")


def open_question(view: View, rng: random.Random) -> QA | None:
    """A question of MM-Vet, answered by its reference."""
    made = rng.choice(mmvet.WRITERS)(view, rng)
    if made is None:
        return None
    question, answer, _ = made
    return QA("open", question, answer.split("<OR>")[0].replace("<AND>", ", "), style="long")


WRITERS: dict[str, Writer] = EXTRA | {
    "choice": choice, "words": words, "pair": pair, "open": open_question,
}  # fmt: skip
MIX = TRAIN_MIX | {"count": 2.4, "chinese": 2.2, "choice": 3.6, "words": 0.5, "pair": 2.6, "open": 0.7}
