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
from llava_consensus.evaluation.judge.grader import Candidate, Grader, JudgePrompt, Outcome, Outcomes

NEITHER = "neither"  # group of answers that the accuracy leaves out

_SYSTEM = """\
You check answers to questions about videos. For each you are given the question, the correct answer and the answer of \
a model; decide whether the model's answer means the same as the correct one.
- What counts is the meaning, not the wording: synonyms and paraphrases are right.
- More detail than asked for is fine as long as it contradicts nothing.
- Judge against the correct answer only, not against what you think the video shows."""
_ASK = """

Reply with a Python dictionary and nothing else, no explanation and no code fence. Its key 'pred' holds 'yes' if the \
answers match and 'no' if they do not; its key 'score' holds an integer from 0 (nothing in common) to 5 (the same \
meaning). For example: {'pred': 'no', 'score': 1}"""
_USER = ("Question: ", "question", "\nCorrect answer: ", "answer", "\nAnswer of the model: ", "prediction", _ASK)


@dataclass(frozen=True)
class VideoQAGrader(Grader):
    attempts: ClassVar[tuple[Mapping[str, Any], ...]] = ({},) * 5
    wording = JudgePrompt((("system", (_SYSTEM,)), ("user", _USER)))
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

    def read(self, text: str | None, candidate: Candidate, attempt: int) -> Outcome | None:
        try:
            return Outcome(parse(text), text or "")
        except Unreadable:
            return None

    def report(self, candidates: Sequence[Candidate], outcomes: Outcomes, data: Path, runs: int) -> dict[str, Any]:
        """Accuracy in percent and average score; of several runs, their means, and each run's own."""
        graded = [one for one in candidates if one.key in outcomes]
        each = [evaluate([outcomes[one.key][run].value for one in graded]) for run in range(runs)]
        numbers: dict[str, Any] = {name: _mean([one[name] for one in each]) for name in ("accuracy", "average_score")}
        extracted = []
        for one in graded:
            said = [understand(outcome.value).verdict for outcome in outcomes[one.key]]
            row = {"index": one.index, "extracted": str(said), "correct": said.count("yes") / runs}
            extracted.append(row | {"group": NEITHER if None in said else "yes or no"})
        numbers["accuracy"] = base.percent(numbers["accuracy"])
        return {**numbers, "runs": each, "counted": ["yes or no"], "extracted": extracted}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
