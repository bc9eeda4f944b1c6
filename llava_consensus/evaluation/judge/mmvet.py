"""MM-Vet judged: the official rounds of questions, tables and grade file, and the prompt.

The official script reads the grade file too: put it where it would write its own, and it computes the same tables
without asking anybody. The fields of the message, the grade in a reply and the two tables are equal to those of
`mm-vet_evaluator.py` (yuweihao/MM-Vet, commit acde843) to the last bit: scores by capability and by exact set of
capabilities are rounded as numpy rounds.
"""

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.mmvet import MMVet, key_of, tables
from llava_consensus.evaluation.files import Record
from llava_consensus.evaluation.judge.grader import (
    Candidate,
    Dialogue,
    Grader,
    JudgePrompt,
    Outcome,
    Outcomes,
    Reply,
    Turn,
)

NO_NUMBER = "(NaN: no number)"  # what the dialogue hears in its place
TRIES = 5  # replies that are read; the one after them is not

_TABLE = """\
You grade the answers of an AI model. Each row of the table below holds a question, the correct answer, the model's \
answer, and a grade from 0.0 (wrong) to 1.0 (fully correct) in steps of 0.1. Where the correct answer joins parts with \
<AND>, the model's answer must contain all of them for the full grade, and earns a share for some; where it joins them \
with <OR>, any one is enough. Other words that mean the same are as good. Complete the last row: write its grade, a \
number, and nothing else.

Question | Correct answer | Model's answer | Grade
--- | --- | --- | ---
Which fruits lie on the table? | apple <AND> pear | a pear and an apple | 1.0
Which fruits lie on the table? | apple <AND> pear | only apples | 0.5
Which fruits lie on the table? | apple <AND> pear | a bowl of grapes | 0.0
What time is it on the clock? | 3:15 <OR> a quarter past three | It is quarter past 3. | 1.0
What time is it on the clock? | 3:15 <OR> a quarter past three | shortly after three | 0.4
Why is the boy laughing? | The dog beside him wears his hat and looks very serious. | There is a dog near him. | 0.3
Why is the boy laughing? | The dog beside him wears his hat and looks very serious. | His dog has got his hat on. | 0.8
"""
WORDING = JudgePrompt(
    (("user", (_TABLE + "\n", "question", " | ", "answer", " | ", "prediction", " | ")),),
    "\nThe grade, as a number from 0.0 to 1.0: ",
)


@dataclass(frozen=True)
class MMVetGrader(Grader):
    """MM-Vet's evaluator: a grade from 0 to 1 out of a table that the judge completes."""

    reply_tokens = 3
    script = "mm-vet_evaluator.py of github.com/yuweihao/MM-Vet"
    wording = WORDING
    known: ClassVar[Mapping[str, str]] = {
        "854799be14be8bf599ac96179e8f8edd3b5325ea29731d7d1fb850e7877d4591": "MM-Vet at acde843"
    }

    benchmark: MMVet

    def official(self, tree: ast.Module, origin: str) -> JudgePrompt | None:
        """The constant named `prompt`, and the text added after the joined cells after an unreadable reply."""
        tables = [
            node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            if any(isinstance(target, ast.Name) and target.id == "prompt" for target in node.targets)
        ]
        reminders = [
            node.right.value
            for node in ast.walk(tree)
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and _joins(node.left)
            if isinstance(node.right, ast.Constant) and isinstance(node.right.value, str)
        ]
        if not tables or not reminders:
            return None
        pieces = (tables[-1] + "\n", "question", " | ", "answer", " | ", "prediction", " | ")
        return JudgePrompt((("user", pieces),), reminders[0], origin)

    def candidates(self, records: Sequence[Record], data: Path) -> tuple[list[Candidate], dict[str, int]]:
        """The answered questions, in file order."""
        questions = self.benchmark.load(data)
        gold = self.benchmark.gold(data, questions)
        joined = base.join(records, questions)
        candidates: dict[str, Candidate] = {}
        for index, record in joined.answers.items():
            key = key_of(questions[index])
            fields = cells(gold[key]["question"], gold[key]["answer"], record["text"])
            candidates[key] = Candidate(index, key, fields)
        return list(candidates.values()), joined.counts

    def hear(self, reply: Reply) -> Reply:
        """Treats a grade of NaN, which the official code accepts and no total survives, as an unreadable reply."""
        grade = read_grade(reply.text)
        return reply if grade is None or not math.isnan(grade[0]) else reply._replace(text=NO_NUMBER)

    def dialogue(self, candidate: Candidate) -> Dialogue:
        """The official rounds; the model's last unreadable reply is a grade of 0.

        An unreadable reply is followed by the message with its reminder, warmer each time; the fifth such reply is not
        read.
        """
        again, temperature, tries = False, 0.0, 1
        while True:
            heard = yield Turn(again, {"max_tokens": self.reply_tokens, "temperature": temperature})
            if again:
                tries += 1
                temperature += 0.5
            if tries > TRIES:
                return Outcome(0.0, heard.text or "", read=False)
            found = read_grade(heard.text)
            if found is not None:
                return Outcome(*found, read=True)
            again = True

    def report(self, candidates: Sequence[Candidate], outcomes: Outcomes, data: Path, runs: int) -> dict[str, Any]:
        """The official tables over the graded answers."""
        gold = self.benchmark.gold(data, [])
        grades = {key: [one.value for one in said] for key, said in outcomes.items()}
        capabilities = {one.key: gold[one.key]["capability"] for one in candidates if one.key in grades}
        if not capabilities:
            return {"total": None, "extracted": []}
        numbers = tables(capabilities, grades, runs)
        extracted = [
            {"index": one.index, "extracted": str(grades[one.key]), "correct": sum(grades[one.key]) / runs}
            for one in candidates
            if one.key in grades
        ]
        return {**numbers, "rounded": 1, "extracted": extracted}

    def grades(self, candidates: Sequence[Candidate], outcomes: Outcomes) -> dict[str, Any]:
        """The official grade file: of each sample the judge's name, what was read and the score, one per run."""
        return {
            key: {
                "model": [one.model for one in said],
                "content": [one.content for one in said],
                "score": [one.value for one in said],
            }
            for key, said in outcomes.items()
        }

    def summary(self, metrics: Mapping[str, Any]) -> Iterator[str]:
        """Capabilities, and each run."""
        if "capability" in metrics:
            yield "by capability: " + ", ".join(f"{name} {value}" for name, value in metrics["capability"].items())
            yield f"runs: {metrics['runs']}, std {metrics['std']}"


def _joins(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == "join" for one in ast.walk(node))


# Scoring: texts in, numbers out.


def cells(question: str, truth: str, prediction: str) -> dict[str, str]:
    """The three cells of the message: `<AND>` and `<OR>` of the truth get spaces, nothing else is touched."""
    truth = truth.replace("<AND>", " <AND> ").replace("<OR>", " <OR> ")
    return {"question": question, "answer": truth, "prediction": prediction}


def read_grade(reply: str | None) -> tuple[float, str] | None:
    """The grade in a reply and the text it was read from; None where the official code asks again."""
    if reply is None:
        return None
    first = reply.split(" ")[0].strip()
    try:
        score = float(first)
    except ValueError:
        return None
    return None if score > 1.0 or score < 0.0 else (score, first)
