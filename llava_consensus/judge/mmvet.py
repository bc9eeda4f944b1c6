"""MM-Vet judged: the official rounds of questions, tables and grade file.

The official script reads the grade file too: put it where it would write its own, and it computes the same tables
without asking anybody. Arithmetic and reading are in `scorers/mm_vet.py`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llava_consensus.benchmarks import base, judged, mmvet
from llava_consensus.benchmarks.base import Record
from llava_consensus.judge.panel import Dialogue, Outcome, Sample, Turn, Verdicts
from llava_consensus.judge.prompts import MM_VET
from llava_consensus.runs.store import read_answers
from llava_consensus.scorers import mm_vet as scorer


class MMVet:
    """MM-Vet's evaluator: a grade from 0 to 1 out of a table that the judge completes."""

    kind, judge, reply_tokens = MM_VET, scorer.JUDGE, scorer.MAX_TOKENS

    def read(self, path: Path) -> list[Record]:
        """Answers in LLaVA's form, or an official result file."""
        text = base.read_text(path)
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError):
            whole = None
        if not isinstance(whole, dict) or "question_id" in whole:
            return list(read_answers(path))
        return [{"question_id": _number(key), "text": answer} for key, answer in whole.items()]

    def samples(self, records: Sequence[Record], data: Path) -> tuple[list[Sample], dict[str, int]]:
        """The answered questions, in file order."""
        questions = mmvet.load(data)
        gold = mmvet.gold(data, questions)
        joined = base.join(records, questions)
        samples: dict[str, Sample] = {}
        for index, record in joined.answers.items():
            key = mmvet.key_of(questions[index])
            fields = scorer.fields(gold[key]["question"], gold[key]["answer"], record["text"])
            samples[key] = Sample(index, key, fields)
        return list(samples.values()), joined.counts

    def without(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Exact and contained matches."""
        return judged.matches(report)

    def dialogue(self, sample: Sample) -> Dialogue:
        """The official rounds; the model's last unreadable reply is a grade of 0."""
        grading = scorer.grading()
        turn = next(grading)
        while True:
            heard = yield Turn(turn.again, {"max_tokens": self.reply_tokens, "temperature": turn.temperature})
            try:
                turn = grading.send(heard)
            except StopIteration as end:
                return Outcome(*end.value)

    def report(self, samples: Sequence[Sample], verdicts: Verdicts, data: Path, runs: int) -> dict[str, Any]:
        """The official tables over the graded answers."""
        gold = mmvet.gold(data, [])
        grades = {key: [one.value for one in said] for key, said in verdicts.items()}
        capabilities = {one.key: gold[one.key]["capability"] for one in samples if one.key in grades}
        if not capabilities:
            return {"total": None, "extracted": []}
        numbers = scorer.evaluate(capabilities, grades, runs)
        extracted = [
            {"index": one.index, "extracted": str(grades[one.key]), "correct": sum(grades[one.key]) / runs}
            for one in samples
            if one.key in grades
        ]
        return _without_nan({**numbers, "rounded": 1, "extracted": extracted})

    def grades(self, samples: Sequence[Sample], verdicts: Verdicts) -> dict[str, Any]:
        """The official grade file: of each sample the judge's name, what was read and the score, one per run."""
        return {
            key: {
                "model": [one.model for one in said],
                "content": [one.content for one in said],
                "score": [one.value for one in said],
            }
            for key, said in verdicts.items()
        }


def _number(key: str) -> int | str:
    number = key.removeprefix("v1_")
    return int(number) if number.isdecimal() else key


def _without_nan(value: Any) -> Any:
    """JSON knows no nan, which a judge may write as its grade: None."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, dict):
        return {key: _without_nan(one) for key, one in value.items()}
    return [_without_nan(one) for one in value] if isinstance(value, list) else value
