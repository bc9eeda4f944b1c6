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
from llava_consensus.evaluation.judge.grader import Candidate, Grader, JudgePrompt, Outcome, Outcomes

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
_ENGLISH = (_CHOOSE + "Question: ", "question", " Options: ", "options", "Answer: ", "prediction", "\nLetter: ")
_CHINESE = (_CHOOSE_CN + "题目：", "question", " 选项：", "options", "回答：", "prediction", "\n字母：")


@dataclass(frozen=True)
class MMBenchGrader(Grader):
    attempts = ({"temperature": 0},) * 3
    fallback = ""  # no letter: never right
    wording = JudgePrompt((("user", _ENGLISH),), chinese=(("user", _CHINESE),))
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
            settled = letter is not None or row["index"] % ROTATION in wrong
            outcome = Outcome(letter or self.fallback, row["prediction"]) if settled else None
            options = {key: str(text) for key, text in row["options"].items()}
            block = "There are several options: \n" + "".join(f"{key}. {text}\n" for key, text in options.items())
            fields = {"question": str(row["question"]), "options": block, "prediction": row["prediction"]}
            candidates.append(Candidate(row["at"], str(row["index"]), fields, options, outcome))
        return candidates, joined.counts

    def read(self, text: str | None, candidate: Candidate, attempt: int) -> Outcome | None:
        letter = read(text or "", candidate.options)
        return None if letter is None else Outcome(letter, text or "")

    def report(self, candidates: Sequence[Candidate], outcomes: Outcomes, data: Path, runs: int) -> dict[str, Any]:
        """The benchmark's own report on the letters that rules and judge read; of several runs the mean accuracy."""
        keys = [one.key for one in candidates if one.key in outcomes]
        answers = [[{"question_id": int(key), "text": outcomes[key][run].value} for key in keys] for run in range(runs)]
        reports = [self.benchmark.score(records, data) for records in answers]
        accuracies = [one["accuracy"] for one in reports]
        names = ("rules", "undecided", "single", "statistic", "extracted")
        numbers = {name: reports[0][name] for name in names if name in reports[0]}
        return {"accuracy": None if None in accuracies else mean(accuracies), "runs": accuracies, **numbers}
