"""SEED-Bench: is the answer exactly the right letter? Accuracy per type, for pictures, for videos and in all.

Equal to LLaVA's script to the last bit: nothing is stripped, no case is folded. Where that script stops (a type all
of whose answers are wrong and none missing; no picture or no video at all) the accuracy here is 0 or None.
Used by `benchmarks/seed.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

KINDS = ("image", "video")


def key(question_id: str) -> int | str:
    """How answers name a question: a number where the annotation's text is one (pictures), else as it is (videos)."""
    try:
        return int(question_id)
    except ValueError:
        return question_id


def evaluate(questions: Sequence[Mapping[str, Any]], answers: Mapping[int | str, str]) -> dict[str, Any]:
    """Percentages over `questions`, of which those without an answer count as wrong.

    `accuracy`, `image` and `video`, `types` (accuracy by type id, ascending) and `stops`: what makes the script stop.
    """
    of_all = _per_type(questions, answers)
    report: dict[str, Any] = {"accuracy": _percent(_all_results(of_all))}
    stops = _stops(of_all, "all")
    for kind in KINDS:
        of_kind = _per_type([question for question in questions if question["data_type"] == kind], answers)
        report[kind] = _percent(_all_results(of_kind))
        stops += [] if of_kind else [f"{kind}: no question"]
        stops += [stop for stop in _stops(of_kind, kind) if stop.partition(":")[2] not in "".join(stops)]
    report["types"] = {number: _percent([bool(right) for right in results]) for number, results in of_all.items()}
    return report | {"stops": stops}


def _per_type(questions: Sequence[Mapping[str, Any]], answers: Mapping[int | str, str]) -> dict[int, list[bool | None]]:
    """Right or wrong by type id, ascending; None is a missing answer."""
    results: dict[int, list[bool | None]] = {}
    for question in questions:
        text = answers.get(key(question["question_id"]))
        results.setdefault(question["question_type_id"], []).append(
            None if text is None else text == question["answer"]
        )
    return dict(sorted(results.items()))


def _stops(types: Mapping[int, list[bool | None]], kind: str) -> list[str]:
    return [
        f"{kind}: type {number} has only wrong answers" for number, results in types.items() if set(results) == {False}
    ]


def _all_results(types: Mapping[int, list[bool | None]]) -> list[bool]:
    return [bool(right) for results in types.values() for right in results]


def _percent(right: Sequence[bool]) -> float | None:
    return sum(right) / len(right) * 100 if right else None
