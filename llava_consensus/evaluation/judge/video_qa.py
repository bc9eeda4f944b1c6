"""Video QA judged: asked again until a reply can be read, but not for ever; official averages and combined file.

What is read out of a reply and the arithmetic are in `benchmarks/video_qa.py`. The official script runs once; of
several runs the means are given.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.video_qa import Unreadable, VideoQA, evaluate, parse, understand
from llava_consensus.evaluation.files import Record
from llava_consensus.evaluation.judge.grader import (
    Candidate,
    Dialogue,
    Grader,
    JudgePrompt,
    Outcome,
    Outcomes,
    Pieces,
    Turn,
)

NEITHER = "neither"  # group of answers that the accuracy leaves out
READINGS = 5  # replies to one question that are read before it is given up; the official script never does
SLOTS = {"question": "question", "answer": "answer", "pred": "prediction", "prediction": "prediction"}
VERDICT = "'pred'"  # what the wanted prompt asks for, and those of Video-ChatGPT's other benchmarks do not

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
WORDING = JudgePrompt(
    (
        ("system", (_SYSTEM,)),
        (
            "user",
            ("Question: ", "question", "\nCorrect answer: ", "answer", "\nAnswer of the model: ", "prediction", _ASK),
        ),
    )
)


@dataclass(frozen=True)
class VideoQAGrader(Grader):
    """Video-ChatGPT's protocol: a dictionary with yes or no and a score from 0 to 5."""

    reply_tokens = 20
    script = "videollava/eval/video/eval_video_qa.py of github.com/PKU-YuanGroup/Video-LLaVA"
    wording = WORDING
    known: ClassVar[Mapping[str, str]] = {
        "383aa99b2501da0859ec9a3dd4e07ad22f197fbf82255712da941645c65ba1d5": "Video-LLaVA at 984e65b"
    }

    benchmark: VideoQA

    def official(self, tree: ast.Module, origin: str) -> JudgePrompt | None:
        """The first list of messages that has a slot for each field."""
        for node in ast.walk(tree):
            if not isinstance(node, ast.List):
                continue
            messages = tuple(_messages(node))
            slots = {piece for _, pieces in messages for piece in pieces[1::2]}
            if slots == set(SLOTS.values()) and any(VERDICT in text for _, pieces in messages for text in pieces[::2]):
                return JudgePrompt(messages, origin=origin)
        return None

    def candidates(self, records: Sequence[Record], data: Path) -> tuple[list[Candidate], dict[str, int]]:
        """The answered questions, in file order; of two with one id the later counts, as in the official script."""
        joined, references = self.benchmark.join(records, data)
        questions = self.benchmark.all(data)
        candidates: dict[str, Candidate] = {}
        for index, record in joined.answers.items():
            fields = {"question": questions[index].text, "answer": references[index], "prediction": record["text"]}
            key = str(questions[index].question_id)
            candidates[key] = Candidate(index, key, fields)
        return list(candidates.values()), joined.counts

    def dialogue(self, candidate: Candidate) -> Dialogue:
        """Repeats one request until its reply can be read, up to a limit."""
        text = None
        for _ in range(READINGS):
            text = (yield Turn(again=False, options={})).text
            try:
                return Outcome(parse(text), text or "", read=True)
            except Unreadable:
                pass
        return Outcome(None, text or "", read=False)

    def report(self, candidates: Sequence[Candidate], outcomes: Outcomes, data: Path, runs: int) -> dict[str, Any]:
        """Accuracy in percent and average score; of several runs, their means, and each run's own."""
        values = [[outcomes[one.key][run].value for one in candidates if one.key in outcomes] for run in range(runs)]
        each = [evaluate(one) for one in values]
        numbers: dict[str, Any] = {name: _mean([one[name] for one in each]) for name in ("accuracy", "average_score")}
        numbers["accuracy"] = base.percent(numbers["accuracy"])
        extracted = []
        for one in candidates:
            if one.key in outcomes:
                readings = [understand(said.value) for said in outcomes[one.key]]
                said = [reading.verdict for reading in readings]
                row = {"index": one.index, "extracted": str(said), "correct": said.count("yes") / runs}
                extracted.append(row | {"group": NEITHER if None in said else "yes or no"})
        return {**numbers, "runs": each, "counted": ["yes or no"], "extracted": extracted}

    def grades(self, candidates: Sequence[Candidate], outcomes: Outcomes) -> dict[str, Any]:
        """The official combined file: of each sample the parsed reply (of the first run) and what was asked."""
        names = {"q": "question", "a": "answer", "pred": "prediction"}
        return {
            one.key: [outcomes[one.key][0].value, {short: one.fields[name] for short, name in names.items()}]
            for one in candidates
            if one.key in outcomes
        }

    def summary(self, metrics: Mapping[str, Any]) -> Iterator[str]:
        """The average score, and the verdicts of the first run."""
        if metrics.get("average_score") is not None:
            first = metrics["runs"][0]
            told = f"yes {first['yes_count']}, no {first['no_count']}, neither {first['neither']}"
            yield f"average score {metrics['average_score']:.2f} of 5; {told}, fields missing {first['unsound']}"


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _messages(node: ast.List) -> Iterator[tuple[str, Pieces]]:
    for one in node.elts:
        if isinstance(one, ast.Dict):
            pairs = zip(one.keys, one.values, strict=True)
            fields = {key.value: value for key, value in pairs if isinstance(key, ast.Constant)}
            role, content = fields.get("role"), fields.get("content")
            pieces = _pieces(content)
            if isinstance(role, ast.Constant) and pieces:
                yield str(role.value), pieces


def _pieces(node: ast.AST | None) -> Pieces:
    """A string constant or an f-string as text and slots in turn; nothing where it holds anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return (node.value,)
    if not isinstance(node, ast.JoinedStr):
        return ()
    pieces = [""]
    for one in node.values:
        if isinstance(one, ast.Constant):
            pieces[-1] += str(one.value)
        elif isinstance(one, ast.FormattedValue) and isinstance(one.value, ast.Name) and one.value.id in SLOTS:
            pieces += [SLOTS[one.value.id], ""]
        else:
            return ()
    return tuple(pieces)
