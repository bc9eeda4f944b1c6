"""Base of benchmarks with a judge: scores computed without a judge.

Exact and contained matches stand beside a judge's number (MM-Vet, video QA): free, the same on every machine and date,
and too strict for long answers; the judged metric is None until `llava-consensus judge` has asked a judge. Texts are
compared in lower case, without marks around them and with single spaces; references may hold MM-Vet's `<OR>` (one of
them is enough) and `<AND>` (all of them are needed).
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Joined, mean

_EDGES = " \t.,;:!?\"'`()[]*"


def report(name: str, joined: Joined, references: Mapping[int, str], judged: Mapping[str, None]) -> dict[str, Any]:
    """The report of a benchmark before a judge was asked.

    Args:
        name: of the benchmark.
        joined: its answers by question.
        references: the right answer of each question, by its index.
        judged: the numbers a judge would give, all None.
    """
    extracted: list[dict[str, Any]] = [
        {
            "index": index,
            "extracted": plain(record["text"]),
            "exact": exact(record["text"], references[index]),
            "correct": contains(record["text"], references[index]),
        }
        for index, record in joined.answers.items()
    ]
    numbers = {
        "exact": _share(row["exact"] for row in extracted) if extracted else None,
        "contains": _share(row["correct"] for row in extracted) if extracted else None,
    }
    return base.report(name, joined, {**judged, **numbers, "judge": None}, extracted)


def _share(values: Iterable[bool]) -> float:
    return 100 * mean(map(float, values))


# Scoring: texts in, numbers out.


def plain(text: str) -> str:
    """Lower case, single spaces, no marks at either end."""
    return " ".join(text.lower().split()).strip(_EDGES)


def alternatives(reference: str) -> list[list[str]]:
    """The alternatives of a reference, each as the list of its parts, all of which an answer needs."""
    lists = [[plain(part) for part in alternative.split("<AND>")] for alternative in reference.split("<OR>")]
    return [parts for parts in lists if all(parts)]


def exact(answer: str, reference: str) -> bool:
    """True if the whole answer is one of the accepted texts. A reference of several parts is met by no single one."""
    text = plain(answer)
    return any(parts == [text] for parts in alternatives(reference))


def contains(answer: str, reference: str) -> bool:
    """True if every part of one of the accepted texts occurs in the answer, as whole words."""
    text = plain(answer)
    return any(all(_occurs(part, text) for part in parts) for parts in alternatives(reference))


def _occurs(part: str, text: str) -> bool:
    """True if `part` occurs between characters other than Latin letters and digits; other scripts write no spaces
    between words.
    """
    return re.search(rf"(?<![a-z0-9]){re.escape(part)}(?![a-z0-9])", text) is not None
