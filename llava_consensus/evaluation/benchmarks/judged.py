"""What benchmarks with a judge share: scores computed without a judge, and agreement with another run's answers.

Exact and contained matches cost nothing and are the same everywhere; the judged metric is None until
`llava-consensus judge` has asked a judge. `agreement(answers, full_answers)` compares a run with that of the unpruned
model, question by question.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Joined
from llava_consensus.evaluation.files import Record
from llava_consensus.evaluation.scorers import match, mean


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
            "extracted": match.plain(record["text"]),
            "exact": match.exact(record["text"], references[index]),
            "correct": match.contains(record["text"], references[index]),
        }
        for index, record in joined.answers.items()
    ]
    numbers = {
        "exact": _share(row["exact"] for row in extracted) if extracted else None,
        "contains": _share(row["correct"] for row in extracted) if extracted else None,
    }
    return base.report(name, joined, {**judged, **numbers, "judge": None}, extracted)


def matches(report: Mapping[str, Any]) -> dict[str, Any]:
    """Of such a report, the scores computed without a judge."""
    return {name: report[name] for name in ("exact", "contains")}


def agreement(answers: Sequence[Record], full_answers: Sequence[Record]) -> dict[str, Any]:
    """How many answers read the same as those of the unpruned model, in percent, over questions both answered.

    Returns:
        `agreement` (None where no question is common) and `compared`, the number of common questions.
    """
    texts, full_texts = _by_question(answers), _by_question(full_answers)
    agreeing = [match.same(text, full_texts[key]) for key, text in texts.items() if key in full_texts]
    return {"agreement": _share(agreeing) if agreeing else None, "compared": len(agreeing)}


def _by_question(answers: Sequence[Record]) -> dict[Hashable, str]:
    """The text of each answer, by its question id and the number of answers with that id before it."""
    answer_counts: Counter[Hashable] = Counter()
    texts: dict[Hashable, str] = {}
    for answer in answers:
        key = answer["question_id"]
        texts[key, answer_counts[key]] = answer["text"]
        answer_counts[key] += 1
    return texts


def _share(values: Iterable[bool]) -> float:
    return 100 * mean(map(float, values))
