"""Video QA judged by Video-ChatGPT's protocol: yes or no and a score from 0 to 5, official averages.

Reading and arithmetic are in `benchmarks/video_qa.py`. The official script asks until a reply can be read; here five
replies are read. Of several runs the means are given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.video_qa import Unreadable, VideoQA, evaluate, parse, understand
from llava_consensus.evaluation.files import Record
from llava_consensus.evaluation.judge.grader import Candidate, Grader, Grades

NEITHER = "neither"  # group of answers that the accuracy leaves out


@dataclass(frozen=True)
class VideoQAGrader(Grader):
    attempts: ClassVar[tuple[Mapping[str, Any], ...]] = ({},) * 5
    wording = Path(__file__).with_suffix(".json")
    known: ClassVar[Mapping[str, str]] = {
        "383aa99b2501da0859ec9a3dd4e07ad22f197fbf82255712da941645c65ba1d5": "Video-LLaVA at 984e65b"
    }

    benchmark: VideoQA

    def candidates(self, records: Sequence[Record], data: Path) -> tuple[list[Candidate], dict[str, int]]:
        """The answered questions, in file order; of two with one id the later counts, as in the official script."""
        joined, references = self.benchmark.join(records, data)
        questions = self.benchmark.all(data)
        found: dict[str, Candidate] = {}
        for index, record in joined.answers.items():
            fields = {"question": questions[index].text, "answer": references[index], "prediction": record["text"]}
            key = str(questions[index].question_id)
            found[key] = Candidate(index, key, fields)
        return list(found.values()), joined.counts

    def read(self, text: str | None, candidate: Candidate, attempt: int) -> Any:
        try:
            return parse(text)
        except Unreadable:
            return None

    def report(self, candidates: Sequence[Candidate], grades: Grades, data: Path, runs: int) -> dict[str, Any]:
        """Accuracy in percent and average score; of several runs, their means, and each run's own."""
        graded = [one for one in candidates if one.key in grades]
        each = [evaluate([grades[one.key][run] for one in graded]) for run in range(runs)]
        numbers: dict[str, Any] = {name: _mean([one[name] for one in each]) for name in ("accuracy", "average_score")}
        extracted = []
        for one in graded:
            said = [understand(grade).verdict for grade in grades[one.key]]
            row = {"index": one.index, "extracted": str(said), "correct": said.count("yes") / runs}
            extracted.append(row | {"group": NEITHER if None in said else "yes or no"})
        numbers["accuracy"] = base.percent(numbers["accuracy"])
        return {**numbers, "runs": each, "counted": ["yes or no"], "extracted": extracted}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
