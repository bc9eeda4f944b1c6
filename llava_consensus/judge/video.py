"""Video QA judged: asked again until a reply can be read, but not for ever; official averages and combined file.

Arithmetic and reading are in `scorers/video_qa.py`. The official script runs once; of several runs the means are given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_consensus import benchmarks
from llava_consensus.benchmarks import base, judged, video_qa
from llava_consensus.benchmarks.base import Record
from llava_consensus.judge.panel import Dialogue, Outcome, Sample, Turn, Verdicts
from llava_consensus.judge.prompts import VIDEO_QA
from llava_consensus.runs.store import read_answers
from llava_consensus.scorers import video_qa as scorer

NEITHER = "neither"  # group of answers that the accuracy leaves out
READINGS = 5  # replies to one question that are read before it is given up; the official script never does


@dataclass(frozen=True)
class VideoQA:
    """Video-ChatGPT's protocol: a dictionary with yes or no and a score from 0 to 5."""

    name: str
    kind: str = VIDEO_QA
    judge: str = scorer.JUDGE
    reply_tokens: int = 20

    def read(self, path: Path) -> list[Record]:
        """Answers in LLaVA's form, or a prediction file of Video-LLaVA."""
        first = base.read_text(path).partition("\n")[0]
        return video_qa.read_predictions(path) if "'pred'" in first or '"pred"' in first else list(read_answers(path))

    def samples(self, records: Sequence[Record], data: Path) -> tuple[list[Sample], dict[str, int]]:
        """The answered questions, in file order; of two with one id the later counts, as in the official script."""
        folder = benchmarks.get(self.name).folder
        joined, references = video_qa.join(records, data, folder)
        questions = video_qa.load(data, folder, "", everything=True)
        samples: dict[str, Sample] = {}
        for index, record in joined.answers.items():
            fields = {"question": questions[index].text, "answer": references[index], "prediction": record["text"]}
            key = str(questions[index].question_id)
            samples[key] = Sample(index, key, fields)
        return list(samples.values()), joined.counts

    def without(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Exact and contained matches."""
        return judged.matches(report)

    def dialogue(self, sample: Sample) -> Dialogue:
        """The same request until its reply can be read, but not for ever."""
        text = None
        for _ in range(READINGS):
            text = (yield Turn(again=False, options={})).text
            try:
                return Outcome(scorer.parse(text), text or "", read=True)
            except scorer.Unreadable:
                pass
        return Outcome(None, text or "", read=False)

    def report(self, samples: Sequence[Sample], verdicts: Verdicts, data: Path, runs: int) -> dict[str, Any]:
        """Accuracy in percent and average score; of several runs, their means, and each run's own."""
        values = [[verdicts[one.key][run].value for one in samples if one.key in verdicts] for run in range(runs)]
        each = [scorer.evaluate(one) for one in values]
        numbers: dict[str, Any] = {name: _mean([one[name] for one in each]) for name in ("accuracy", "average_score")}
        numbers["accuracy"] = base.percent(numbers["accuracy"])
        extracted = []
        for one in samples:
            if one.key in verdicts:
                readings = [scorer.understand(said.value) for said in verdicts[one.key]]
                said = [reading.verdict for reading in readings]
                row = {"index": one.index, "extracted": str(said), "correct": said.count("yes") / runs}
                extracted.append(row | {"group": NEITHER if None in said else "yes or no"})
        return {**numbers, "runs": each, "counted": ["yes or no"], "extracted": extracted}

    def grades(self, samples: Sequence[Sample], verdicts: Verdicts) -> dict[str, Any]:
        """The official combined file: of each sample the parsed reply (of the first run) and what was asked."""
        names = {"q": "question", "a": "answer", "pred": "prediction"}
        return {
            one.key: [verdicts[one.key][0].value, {short: one.fields[name] for short, name in names.items()}]
            for one in samples
            if one.key in verdicts
        }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
