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


def evaluate(questions: Sequence[Mapping[str, Any]], said: Mapping[int | str, str]) -> dict[str, Any]:
    """Percentages over `questions`, of which those without an answer count as wrong.

    `accuracy`, `image` and `video`, `types` (accuracy by type id, ascending) and `stops`: what makes the script stop.
    """
    whole = _per_type(questions, said)
    report: dict[str, Any] = {"accuracy": _percent(_joined(whole))}
    stops = _stops(whole, "all")
    for kind in KINDS:
        of_kind = _per_type([one for one in questions if one["data_type"] == kind], said)
        report[kind] = _percent(_joined(of_kind))
        stops += [] if of_kind else [f"{kind}: no question"]
        stops += [one for one in _stops(of_kind, kind) if one.partition(":")[2] not in "".join(stops)]
    report["types"] = {number: _percent([bool(one) for one in found]) for number, found in whole.items()}
    return report | {"stops": stops}


def lines(report: Mapping[str, Any], names: Mapping[int, str]) -> list[str]:
    """The report as LLaVA's script prints it."""
    found = [(names.get(number, str(number)), value) for number, value in report["types"].items()]
    found += [("Total accuracy", report["accuracy"]), *((f"{kind} accuracy", report[kind]) for kind in KINDS)]
    return [f"{name}: {'-' if value is None else f'{value:.2f}%'}" for name, value in found]


def _per_type(questions: Sequence[Mapping[str, Any]], said: Mapping[int | str, str]) -> dict[int, list[bool | None]]:
    """Right or wrong by type id, ascending; None is a missing answer."""
    found: dict[int, list[bool | None]] = {}
    for one in questions:
        text = said.get(key(one["question_id"]))
        found.setdefault(one["question_type_id"], []).append(None if text is None else text == one["answer"])
    return dict(sorted(found.items()))


def _stops(types: Mapping[int, list[bool | None]], kind: str) -> list[str]:
    return [f"{kind}: type {number} has only wrong answers" for number, found in types.items() if set(found) == {False}]


def _joined(types: Mapping[int, list[bool | None]]) -> list[bool]:
    return [bool(one) for found in types.values() for one in found]


def _percent(right: Sequence[bool]) -> float | None:
    return sum(right) / len(right) * 100 if right else None
