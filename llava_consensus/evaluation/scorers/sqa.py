"""ScienceQA: the option's letter out of a free answer, and the official accuracies over all and over picture questions.

Equal to LLaVA's script to the last bit. It reads a lone letter, `A. text`, or exactly one `The answer is A.` (one more
character must follow the letter); nothing is stripped, no case is folded, everything else is FAILED.
Used by `benchmarks/sqa.py`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

LETTERS = ("A", "B", "C", "D", "E")
FAILED = "FAILED"
_STATED = re.compile(r"The answer is ([A-Z]).")


class Answer(NamedTuple):
    """One answer and whether its prompt showed a picture."""

    text: str
    picture: bool


def parse(text: str) -> str:
    """The letter an answer states, or FAILED."""
    if text in LETTERS:
        return text
    if len(text) >= 3 and text[0] in LETTERS and text[1:3] == ". ":
        return text[0]
    stated = _STATED.findall(text)
    return stated[0] if len(stated) == 1 else FAILED


def index_of(letter: str, choices: int) -> int:
    """Position of a letter among the first `choices` options, -1 if it is none of them."""
    options = LETTERS[:choices]
    return options.index(letter) if letter in options else -1


def evaluate(
    problems: Mapping[str, Mapping[str, Any]], ids: Sequence[str], answers: Mapping[str, Answer]
) -> dict[str, Any]:
    """Percentages over `ids`, each once: all (`accuracy`) and those asked with a picture (`img_accuracy`).

    An id without an answer counts as wrong, and as a question without a picture. A percentage of nothing is None.
    Raises ValueError for an id that is no problem and for an answer index beyond E, naming the id.
    """
    extracted: dict[str, str] = {}
    results: dict[str, int] = {}
    counts = {"correct": 0, "count": 0, "img_correct": 0, "img_count": 0}
    for key in dict.fromkeys(ids):
        if key not in problems:
            raise ValueError(f"problem {key!r} is in the split but not among the problems")
        right_index, choices = problems[key]["answer"], len(problems[key]["choices"])
        if right_index >= len(LETTERS):
            raise ValueError(
                f"problem {key!r}: the right answer is option {right_index + 1}, only A to E can be answered"
            )
        answer = answers.get(key)
        extracted[key] = parse(answer.text) if answer else FAILED
        results[key] = index_of(extracted[key], choices)
        right, picture = results[key] == right_index, answer is not None and answer.picture
        for name, value in (("correct", right), ("img_count", picture), ("img_correct", right and picture)):
            counts[name] += value
    counts["count"] = len(results)
    return {
        "accuracy": _percent(counts["correct"], counts["count"]),
        "img_accuracy": _percent(counts["img_correct"], counts["img_count"]),
        **counts,
        "results": results,
        "parsed": extracted,
    }


def _percent(part: int, whole: int) -> float | None:
    return part / whole * 100 if whole else None
