"""MMBench judged: a judge names the option that an answer means, if VLMEvalKit's rules cannot read it.

As there, a question that the rules already find wrong is not sent to a judge, and a judge who names no letter in three
replies is not asked again. There the letter is then drawn at random; here a row without a letter is wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from llava_consensus.evaluation.benchmarks.base import mean
from llava_consensus.evaluation.benchmarks.mmbench import ROTATION, MMBench, read
from llava_consensus.evaluation.files import Record
from llava_consensus.evaluation.judge.grader import Candidate, Grader, Grades


@dataclass(frozen=True)
class MMBenchGrader(Grader):
    attempts = ({"temperature": 0},) * 3
    fallback = ""  # no letter: never right
    wording = Path(__file__).with_suffix(".json")
    known: ClassVar[Mapping[str, str]] = {
        "d89f709f371ee46d37d435d006c8c3576dc7fe24df7f52d2ee50c18858afbb83": "VLMEvalKit at e4e0263"
    }

    benchmark: MMBench

    def candidates(self, records: Sequence[Record], data: Path) -> tuple[list[Candidate], dict[str, int]]:
        """Every answered row in file order; settled are those the rules read, and all of a question they find wrong."""
        joined, rows = self.benchmark.answered(records, data)
        letters = [read(row["prediction"], row["options"]) for row in rows]
        pairs = list(zip(rows, letters, strict=True))
        wrong = {row["index"] % ROTATION for row, letter in pairs if letter not in (None, row.get("answer"))}
        candidates = []
        for row, letter in pairs:
            settled = letter or (self.fallback if row["index"] % ROTATION in wrong else None)
            options = {key: str(text) for key, text in row["options"].items()}
            block = "There are several options: \n" + "".join(f"{key}. {text}\n" for key, text in options.items())
            fields = {"question": str(row["question"]), "options": block, "prediction": row["prediction"]}
            candidates.append(Candidate(row["at"], str(row["index"]), fields, options, settled))
        return candidates, joined.counts

    def read(self, text: str | None, candidate: Candidate, attempt: int) -> str | None:
        return read(text or "", candidate.options)

    def report(self, candidates: Sequence[Candidate], grades: Grades, data: Path, runs: int) -> dict[str, Any]:
        """The benchmark's own report on the letters that rules and judge read; of several runs the mean accuracy."""
        keys = [one.key for one in candidates if one.key in grades]
        answers = [[{"question_id": int(key), "text": grades[key][run]} for key in keys] for run in range(runs)]
        reports = [self.benchmark.score(records, data) for records in answers]
        accuracies = [one["accuracy"] for one in reports]
        names = ("rules", "undecided", "single", "statistic", "extracted")
        numbers = {name: reports[0][name] for name in names if name in reports[0]}
        return {"accuracy": None if None in accuracies else mean(accuracies), "runs": accuracies, **numbers}
