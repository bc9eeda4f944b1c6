"""Video QA with a judge (Video-ChatGPT's protocol): what is read out of a reply, and the averages over them.

Equal to Video-LLaVA's `eval_video_qa.py` (commit 984e65b) to the last bit: a reply is a Python literal that JSON can
hold, scores are cut towards zero, `yes` is looked for before `no`. Where that script would ask for ever or end with an
exception, a reply is unreadable here, and counted. The prompt is in
`llava_consensus/evaluation/judge/video_qa.py`. Used there and by `benchmarks/video_qa.py`.
"""

import ast
import json
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

PREDICTION = ("id", "question", "answer", "pred")


class Reading(NamedTuple):
    """What one parsed reply says."""

    score: int | None  # cut towards zero; None: it adds nothing to the sum but counts in the average
    verdict: str | None  # `yes`, `no`, or None where it says neither
    sound: bool  # both fields could be read


class Unreadable(ValueError):
    """A reply that is no Python literal, or one that JSON cannot hold."""


def parse(reply: str | None) -> Any:
    """The value of a reply as the official script saves it: a Python literal, then through JSON.

    Raises:
        Unreadable: with the rule that was broken.
    """
    if not isinstance(reply, str):
        raise Unreadable("no text")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes and numbers glued to words
            value = ast.literal_eval(reply)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise Unreadable(f"not a Python literal ({type(error).__name__})") from None
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        raise Unreadable("a literal that JSON cannot hold") from None


def understand(value: Any) -> Reading:
    """Score and verdict of a parsed reply: the score is read first, and without it the verdict does not count."""
    try:
        score = int(value["score"])
    except (KeyError, TypeError, ValueError, OverflowError, IndexError):
        return Reading(None, None, sound=False)
    word = value.get("pred")
    if not isinstance(word, str):
        return Reading(score, None, sound=False)
    verdict = next((candidate for candidate in ("yes", "no") if candidate in word.lower()), None)
    return Reading(score, verdict, sound=True)


def evaluate(values: Sequence[Any]) -> dict[str, Any]:
    """The official averages over parsed replies. What the script cannot divide is None.

    Returns:
        `accuracy` yes/(yes+no), 0 to 1; `average_score`; `count`, `yes_count`, `no_count`; `neither` (a verdict that
        is neither), `unsound` (a field missing or of the wrong kind).
    """
    readings = [understand(value) for value in values]
    verdicts = [reading.verdict for reading in readings]
    yes, no = verdicts.count("yes"), verdicts.count("no")
    return {
        "accuracy": yes / (yes + no) if yes + no else None,
        "average_score": _average([reading.score or 0 for reading in readings]),
        "count": len(readings),
        "yes_count": yes,
        "no_count": no,
        "neither": sum(reading.sound and reading.verdict is None for reading in readings),
        "unsound": sum(not reading.sound for reading in readings),
    }


def _average(scores: Sequence[int]) -> float | None:
    try:
        return sum(scores) / len(scores) if scores else None
    except OverflowError:  # an absurd score; the official script ends here
        return None


def read_predictions(text: str) -> list[dict[str, Any]]:
    """The lines of a prediction file, each a Python literal as the official script evaluates them.

    Raises:
        ValueError: with the line's number and what is wrong with it (a blank line, JSON's null or true, a lacking
            field); the official script ends there.
    """
    rows = []
    for number, line in enumerate(text.removesuffix("\n").split("\n"), start=1):
        try:
            row = ast.literal_eval(line.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            raise ValueError(f"line {number}: not a Python literal: {line[:60]!r}") from None
        lacking = [name for name in PREDICTION if not isinstance(row, dict) or name not in row]
        if lacking:
            raise ValueError(f"line {number}: no {', '.join(lacking)}: {line[:60]!r}")
        rows.append(row)
    return rows
