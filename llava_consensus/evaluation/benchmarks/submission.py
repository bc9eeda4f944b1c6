"""What every submission shares: which ids are missing, duplicate or unknown.

Used by the `export` functions of the benchmarks; `llava-consensus score NAME --answers FILE --export FILE` prints it.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks.base import Question
from llava_consensus.evaluation.files import Record

SHOWN = 10  # ids named in a message


def audit(
    records: Sequence[Record],
    questions: Sequence[Question],
    key_of_question: Callable[[Question], Hashable] = lambda question: question.question_id,
    key_of_record: Callable[[Record], Hashable] = lambda record: record["question_id"],
) -> dict[str, Any]:
    """How many `answers` there are, and the ids that are `missing`, `duplicate` (the last counts) or `unknown`."""
    groups: dict[Hashable, list[Question]] = {}
    for question in questions:
        groups.setdefault(key_of_question(question), []).append(question)
    counts = Counter(key_of_record(record) for record in records)
    missing = [question.question_id for key, group in groups.items() for question in group[counts[key] :]]
    duplicate = [group[0].question_id for key, group in groups.items() if counts[key] > len(group)]
    unknown = [record["question_id"] for record in records if key_of_record(record) not in groups]
    return {"answers": len(records), "missing": missing, "duplicate": duplicate, "unknown": unknown}


def name(ids: Sequence[Any]) -> str:
    """The first ids, and how many more there are."""
    more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
    return ", ".join(map(repr, ids[:SHOWN])) + more


def refuse_missing(result: Mapping[str, Any], why: str) -> None:
    """Stops an export that needs every answer; `why` names the official tool's rule."""
    if result["missing"]:
        raise DataError(f"{len(result['missing'])} questions have no answer, and {why}: {name(result['missing'])}")
