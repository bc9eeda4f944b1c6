"""Video QA judged by Video-ChatGPT's protocol: yes or no and a score from 0 to 5, official averages, combined file.

Reading and arithmetic are in `benchmarks/video_qa.py`. The official script asks until a reply can be read; here five
replies are read. Of several runs the means are given.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.video_qa import Unreadable, VideoQA, evaluate, parse, understand
from llava_consensus.evaluation.files import Record
from llava_consensus.evaluation.judge.grader import Candidate, Grader, JudgePrompt, Outcome, Outcomes, Pieces

NEITHER = "neither"  # group of answers that the accuracy leaves out
SLOTS = {"question": "question", "answer": "answer", "pred": "prediction", "prediction": "prediction"}
VERDICT = "'pred'"  # in the wanted prompt, and not in those of Video-ChatGPT's other benchmarks

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
    reply_tokens = 20
    attempts: ClassVar[tuple[Mapping[str, Any], ...]] = ({},) * 5
    script = "videollava/eval/video/eval_video_qa.py of github.com/PKU-YuanGroup/Video-LLaVA"
    wording = JudgePrompt((("system", (_SYSTEM,)), ("user", _USER)))
    known: ClassVar[Mapping[str, str]] = {
        "383aa99b2501da0859ec9a3dd4e07ad22f197fbf82255712da941645c65ba1d5": "Video-LLaVA at 984e65b"
    }

    benchmark: VideoQA

    def official(self, tree: ast.Module) -> JudgePrompt | None:
        """The first list of messages that has a slot for each field."""
        for node in ast.walk(tree):
            messages = tuple(_messages(node)) if isinstance(node, ast.List) else ()
            slots = {piece for _, pieces in messages for piece in pieces[1::2]}
            if slots == set(SLOTS.values()) and any(VERDICT in text for _, pieces in messages for text in pieces[::2]):
                return JudgePrompt(messages)
        return None

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

    def grades(self, candidates: Sequence[Candidate], outcomes: Outcomes) -> dict[str, Any]:
        """The official combined file: of each sample the parsed reply (of the first run) and what was asked."""
        names = {"q": "question", "a": "answer", "pred": "prediction"}
        return {
            one.key: [outcomes[one.key][0].value, {short: one.fields[name] for short, name in names.items()}]
            for one in candidates
            if one.key in outcomes
        }

    def summary(self, metrics: Mapping[str, Any]) -> Iterator[str]:
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
            role, pieces = fields.get("role"), _pieces(fields.get("content"))
            if isinstance(role, ast.Constant) and pieces:
                yield str(role.value), pieces


def _pieces(node: ast.AST | None) -> Pieces:
    """A string constant or an f-string as text and slots in turn; empty for anything else."""
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
