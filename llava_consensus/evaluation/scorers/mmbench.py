"""MMBench: the option's letter out of a free answer, and circular accuracy (every rotation of a question right).

Equal to VLMEvalKit v0.2 (commit e4e0263; the same from 2024-02 to 2025-08) to the last bit. An answer is read by
letter, then by content: exactly one option's text inside it. What neither decides is wrong without a judge ("exact
matching"), or goes to `ask`: one row in, the judge's reply out. After three replies without a letter the official code
picks at random; here the row stays undecided, which is wrong. Used by `benchmarks/mmbench.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llava_consensus.evaluation.scorers.base import mean

RULES = "VLMEvalKit v0.2 (e4e0263)"
NONE = "Z"  # says that no option fits; never right
FAILED = "Failed to obtain answer via API"
REFUSALS = (  # of judges and closed models, as VLMEvalKit lists them
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)
MARKS = str.maketrans(dict.fromkeys(".()[],:;!*#{}", " "))
ROTATION = 1_000_000  # index of a rotated question: that of the question plus a multiple of this
TRIES = 3
SHORT_NAMES = {
    "coarse_perception": "CP",
    "finegrained_perception (instance-level)": "FP-S",
    "finegrained_perception (cross-instance)": "FP-C",
    "logic_reasoning": "LR",
    "relation_reasoning": "RR",
    "attribute_reasoning": "AR",
}

Row = Mapping[str, Any]  # index, answer, prediction, options (letter -> text)
Judge = Callable[[Row], str]


def read(answer: str, options: Mapping[str, Any]) -> str | None:
    """The letter an answer states (Z: none of them), or None where the rules cannot decide."""
    if FAILED in answer:
        return None
    if any(sentence in answer for sentence in REFUSALS):
        return NONE
    pieces = set(answer.translate(MARKS).split())
    letters = [letter for letter in options if letter in pieces]
    if len(letters) == 1:
        return letters[0]
    if not letters and NONE in pieces:
        return NONE
    named = [letter for letter, text in options.items() if str(text).lower() in answer.lower()]
    return named[0] if len(named) == 1 else None


def hit(rows: Sequence[Row], ask: Judge | None = None) -> bool:
    """Whether every rotation of one question is right; no judge is asked once the rules alone find a wrong one."""
    letters = [read(str(row["prediction"]), row["options"]) for row in rows]
    if any(letter not in (None, row["answer"]) for letter, row in zip(letters, rows, strict=True)):
        return False
    undecided = [row for letter, row in zip(letters, rows, strict=True) if letter is None]
    return all(ask is not None and judged(row, ask) == row["answer"] for row in undecided)


def judged(row: Row, ask: Judge) -> str | None:
    """The letter in the first of three replies that has one."""
    for _ in range(TRIES):
        letter = read(ask(row), row["options"])
        if letter is not None:
            return letter
    return None


def circular(rows: Sequence[Row], ask: Judge | None = None) -> dict[int, bool]:
    """Hit or not of every question by its own index, ascending; one whose unrotated row is missing is not scored."""
    groups: dict[int, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["index"]):
        groups.setdefault(row["index"] % ROTATION, []).append(row)
    return {index: hit(rotations, ask) for index, rotations in groups.items() if rotations[0]["index"] == index}


def accuracies(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Fractions by split: Overall, then leaf abilities of level two by short name, then categories, each sorted.

    Rows hold `hit` and, where the table has them, `split`, `l2-category` and `category`. A group that is absent from a
    split is None there.
    """
    splits = sorted({row.get("split", "none") for row in rows})
    report: list[dict[str, Any]] = [{"split": split} for split in splits]
    for fractions in report:
        of_split = [row for row in rows if row.get("split", "none") == fractions["split"]]
        fractions["Overall"] = _mean(of_split)
        for kind in ("l2-category", "category"):
            for name in sorted({row[kind] for row in rows if kind in row}):
                fractions[SHORT_NAMES.get(name, name)] = _mean([row for row in of_split if row.get(kind) == name])
    return report


def _mean(rows: Sequence[Mapping[str, Any]]) -> float | None:
    return mean(float(row["hit"]) for row in rows) if rows else None
