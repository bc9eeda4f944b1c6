"""MMBench: the option's letter out of a free answer, and circular accuracy (every rotation of a question right).

Equal to VLMEvalKit v0.2 (commit e4e0263; the same from 2024-02 to 2025-08) to the last bit. An answer is read by
letter, then by content: exactly one option's text inside it. What neither decides is wrong here; `judge/mmbench.py` has
a judge read it. Used there and by `benchmarks/mmbench.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from llava_consensus.evaluation.scorers import mean

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
SHORT_NAMES = {
    "coarse_perception": "CP",
    "finegrained_perception (instance-level)": "FP-S",
    "finegrained_perception (cross-instance)": "FP-C",
    "logic_reasoning": "LR",
    "relation_reasoning": "RR",
    "attribute_reasoning": "AR",
}

Row = Mapping[str, Any]  # index, answer, prediction, options (letter -> text)


def read(answer: str, options: Mapping[str, Any]) -> str | None:
    """The letter an answer states (Z: none of them), or None where the rules cannot decide."""
    if FAILED not in answer:
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


def circular(rows: Sequence[Row]) -> dict[int, bool]:
    """Whether every rotation of a question is right, by the question's own index, ascending; one whose unrotated row is
    missing is not scored.
    """
    groups: dict[int, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["index"]):
        groups.setdefault(row["index"] % ROTATION, []).append(row)
    return {
        index: all(read(str(row["prediction"]), row["options"]) == row["answer"] for row in rotations)
        for index, rotations in groups.items()
        if rotations[0]["index"] == index
    }


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
