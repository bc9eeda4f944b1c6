"""MM-Vet judged: the rounds and tables of `mm-vet_evaluator.py` (yuweihao/MM-Vet, commit acde843)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.mmvet import MMVet, key_of, tables
from llava_consensus.evaluation.files import Record
from llava_consensus.evaluation.judge.grader import Candidate, Grader, Grades


@dataclass(frozen=True)
class MMVetGrader(Grader):
    # warmer each time; the official script does not read the last reply, and grades 0
    attempts = tuple({"max_tokens": 3, "temperature": warmth} for warmth in (0.0, 0.0, 0.5, 1.0, 1.5, 2.0))
    fallback = 0.0
    wording = Path(__file__).with_suffix(".json")
    known: ClassVar[Mapping[str, str]] = {
        "854799be14be8bf599ac96179e8f8edd3b5325ea29731d7d1fb850e7877d4591": "MM-Vet at acde843"
    }

    benchmark: MMVet

    def candidates(self, records: Sequence[Record], data: Path) -> tuple[list[Candidate], dict[str, int]]:
        questions = self.benchmark.load(data)
        gold = self.benchmark.gold(data, questions)
        joined = base.join(records, questions)
        found: dict[str, Candidate] = {}
        for index, record in joined.answers.items():
            key = key_of(questions[index])
            found[key] = Candidate(index, key, cells(gold[index]["question"], gold[index]["answer"], record["text"]))
        return list(found.values()), joined.counts

    def read(self, text: str | None, candidate: Candidate, attempt: int) -> float | None:
        """The grade. NaN, which the official code accepts and no total survives, counts as unreadable."""
        grade = read_grade(text) if attempt < len(self.attempts) - 1 else None
        return None if grade is None or math.isnan(grade[0]) else grade[0]

    def report(self, candidates: Sequence[Candidate], grades: Grades, data: Path, runs: int) -> dict[str, Any]:
        gold = self.benchmark.gold(data, self.benchmark.load(data))
        graded = [one for one in candidates if one.key in grades]
        if not graded:
            return {"total": None, "extracted": []}
        numbers = tables({one.key: gold[one.index]["capability"] for one in graded}, grades, runs)
        extracted = [
            {"index": one.index, "extracted": str(grades[one.key]), "correct": sum(grades[one.key]) / runs}
            for one in graded
        ]
        return {**numbers, "rounded": 1, "extracted": extracted}


def cells(question: str, truth: str, prediction: str) -> dict[str, str]:
    """The three cells of the message: `<AND>` and `<OR>` of the truth get spaces, nothing else is touched."""
    truth = truth.replace("<AND>", " <AND> ").replace("<OR>", " <OR> ")
    return {"question": question, "answer": truth, "prediction": prediction}


def read_grade(reply: str | None) -> tuple[float, str] | None:
    """The grade in a reply and the text it was read from; None if the official code asks again."""
    first = (reply or "").split(" ")[0].strip()
    try:
        score = float(first)
    except ValueError:
        return None
    return None if score > 1.0 or score < 0.0 else (score, first)
