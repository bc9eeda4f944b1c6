"""MMBench judged: what VLMEvalKit's rules cannot read goes to a judge, who names the option an answer means.

As there, a question that the rules alone find wrong is not sent to a judge, and a judge who names no letter in three
replies is not asked again. There, rows of a question are asked one after the other until one is wrong, and the letter
is drawn at random after three replies; here all undecided rows are asked, which changes no number, and a row without a
letter is wrong. Reading and circular accuracy are in `benchmarks/mmbench.py`.
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from llava_consensus.evaluation.benchmarks.base import mean
from llava_consensus.evaluation.benchmarks.mmbench import ROTATION, MMBench, read
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

TRIES = 3  # replies of a judge that are read
UNREAD = ""  # no letter: never right
MATCHING = ("question", "options", "prediction")  # what a template has slots for, in this order

_CHOOSE = """\
Somebody answered a multiple-choice question in free words. Say which option those words stand for: reply with its \
letter alone. If they fit none of the options, reply with Z.

Question: Which animal sits on the roof? Options: A. a pigeon B. a squirrel C. a tabby D. a hen
Answer: some kind of cat
Letter: C

Question: Which animal sits on the roof? Options: A. a pigeon B. a squirrel C. a tabby D. a hen
Answer: a weathervane
Letter: Z

"""
_CHOOSE_CN = """\
有人用自己的话回答了一道选择题。请指出这个回答对应哪一个选项，并且只写该选项的字母；若与各选项都不符，就写 Z。

题目：屋顶上是什么动物？ 选项：A. 鸽子 B. 松鼠 C. 花猫 D. 母鸡
回答：好像是一只猫咪
字母：C

题目：屋顶上是什么动物？ 选项：A. 鸽子 B. 松鼠 C. 花猫 D. 母鸡
回答：风向标
字母：Z

"""
WORDING = JudgePrompt(
    (("user", (_CHOOSE + "Question: ", "question", " Options: ", "options", "Answer: ", "prediction", "\nLetter: ")),),
    chinese=(("user", (_CHOOSE_CN + "题目：", "question", " 选项：", "options", "回答：", "prediction", "\n字母：")),),
)


@dataclass(frozen=True)
class MMBenchGrader(Grader):
    """VLMEvalKit's option matching, in English and Chinese."""

    reply_tokens = 1
    script = "vlmeval/dataset/utils/multiple_choice.py of github.com/open-compass/VLMEvalKit"
    wording = WORDING
    known: ClassVar[Mapping[str, str]] = {
        "d89f709f371ee46d37d435d006c8c3576dc7fe24df7f52d2ee50c18858afbb83": "VLMEvalKit at e4e0263"
    }

    benchmark: MMBench

    def official(self, tree: ast.Module, origin: str) -> JudgePrompt | None:
        """The templates in the functions `build_prompt` and `build_prompt_cn`: three empty slots each."""
        templates = {
            function.name: _template(function)
            for function in tree.body
            if isinstance(function, ast.FunctionDef) and function.name in ("build_prompt", "build_prompt_cn")
        }
        english, chinese = templates.get("build_prompt"), templates.get("build_prompt_cn")
        if not (english and chinese):
            return None
        return JudgePrompt((("user", english),), origin=origin, chinese=(("user", chinese),))

    def candidates(self, records: Sequence[Record], data: Path) -> tuple[list[Candidate], dict[str, int]]:
        """Every answered row in file order; settled are those the rules read, and all of a question they find wrong."""
        joined, rows = self.benchmark.answered(records, data)
        letters = [read(row["prediction"], row["options"]) for row in rows]
        wrong = {
            row["index"] % ROTATION
            for row, letter in zip(rows, letters, strict=True)
            if letter not in (None, row.get("answer"))
        }
        candidates = []
        for row, letter in zip(rows, letters, strict=True):
            settled = letter is not None or row["index"] % ROTATION in wrong
            outcome = Outcome(letter or UNREAD, row["prediction"], read=True) if settled else None
            options = {key: str(text) for key, text in row["options"].items()}
            candidates.append(Candidate(row["at"], str(row["index"]), _fields(row, options), options, outcome))
        return candidates, joined.counts

    def dialogue(self, candidate: Candidate) -> Dialogue:
        """Repeats one request until its reply has a letter, three times at most."""
        text = None
        for _ in range(TRIES):
            text = (yield Turn(again=False, options={"temperature": 0})).text
            letter = read(text or "", candidate.options)
            if letter is not None:
                return Outcome(letter, text or "", read=True)
        return Outcome(UNREAD, text or "", read=False)

    def report(self, candidates: Sequence[Candidate], outcomes: Outcomes, data: Path, runs: int) -> dict[str, Any]:
        """The benchmark's own report on the letters that rules and judge read; of several runs the mean accuracy."""
        graded = [one for one in candidates if one.key in outcomes]
        reports = [self._score(graded, [outcomes[one.key][run] for one in graded], data) for run in range(runs)]
        accuracies = [one["accuracy"] for one in reports]
        accuracy = None if None in accuracies else mean(accuracies)
        names = ("rules", "undecided", "single", "statistic", "extracted")
        numbers = {name: reports[0][name] for name in names if name in reports[0]}
        return {"accuracy": accuracy, "runs": accuracies, **numbers}

    def grades(self, candidates: Sequence[Candidate], outcomes: Outcomes) -> dict[str, Any]:
        """Grade of each row: the letter (of the first run), the text it was read from, and the judge if one was
        asked.
        """
        return {
            key: {"opt": said[0].value or None, "log": said[0].content, "judge": said[0].model}
            for key, said in outcomes.items()
        }

    def _score(self, candidates: Sequence[Candidate], outcomes: Sequence[Outcome], data: Path) -> dict[str, Any]:
        answers = [
            {"question_id": int(one.key), "text": said.value} for one, said in zip(candidates, outcomes, strict=True)
        ]
        return self.benchmark.score(answers, data)


def _fields(row: Mapping[str, Any], options: Mapping[str, str]) -> dict[str, str]:
    """Question, block of options and answer; the question mark after the question is the prompt's own."""
    block = "There are several options: \n" + "".join(f"{letter}. {text}\n" for letter, text in options.items())
    return {"question": str(row["question"]), "options": block, "prediction": row["prediction"]}


def _template(function: ast.FunctionDef) -> Pieces:
    """The first text with three slots, in the order in which they are filled: question, options, prediction."""
    for node in ast.walk(function):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count("{}") == len(MATCHING):
            head, *tail = node.value.split("{}")
            return (head, *(piece for pair in zip(MATCHING, tail, strict=True) for piece in pair))
    return ()
