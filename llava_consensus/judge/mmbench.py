"""MMBench judged: what VLMEvalKit's rules cannot read goes to a judge, who names the option an answer means.

As there, nobody is asked about a question that the rules alone find wrong, and a judge who names no letter in three
replies is not asked again. There, rows of a question are asked one after the other until one is wrong, and the letter
is drawn at random after three replies; here all undecided rows are asked, which changes no number, and a row without a
letter is wrong. Reading and circular accuracy are in `scorers/mmbench.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_consensus import benchmarks
from llava_consensus.benchmarks import mmbench
from llava_consensus.benchmarks.base import Record
from llava_consensus.benchmarks.mmbench import Language
from llava_consensus.judge.panel import Dialogue, Outcome, Sample, Turn, Verdict, Verdicts
from llava_consensus.judge.prompts import MMBENCH
from llava_consensus.runs.store import read_answers
from llava_consensus.scorers import mean
from llava_consensus.scorers import mmbench as scorer

UNREAD = ""  # no letter: never right


@dataclass(frozen=True)
class MMBench:
    """VLMEvalKit's option matching, for the benchmark of that name."""

    name: str
    kind: str = MMBENCH
    judge: str = "gpt-3.5-turbo-0125"
    reply_tokens: int = 1

    def read(self, path: Path) -> list[Record]:
        """Answers in LLaVA's form."""
        return list(read_answers(path))

    def samples(self, records: Sequence[Record], data: Path) -> tuple[list[Sample], dict[str, int]]:
        """Every answered row in file order; settled are those the rules read, and all of a question they find wrong."""
        joined, rows = mmbench.answered(records, data, self._language)
        letters = [scorer.read(row["prediction"], row["options"]) for row in rows]
        wrong = {
            row["index"] % scorer.ROTATION
            for row, letter in zip(rows, letters, strict=True)
            if letter not in (None, row.get("answer"))
        }
        samples = []
        for row, letter in zip(rows, letters, strict=True):
            settled = letter is not None or row["index"] % scorer.ROTATION in wrong
            outcome = Outcome(letter or UNREAD, row["prediction"], read=True) if settled else None
            options = {key: str(text) for key, text in row["options"].items()}
            samples.append(Sample(row["at"], str(row["index"]), _fields(row, options), options, outcome))
        return samples, joined.counts

    def without(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Circular accuracy by the rules alone, and how many answers they cannot read."""
        return {"by_rules": report["accuracy"], "undecided_by_rules": report["undecided"]}

    def dialogue(self, sample: Sample) -> Dialogue:
        """The same request until its reply has a letter, three times at most."""
        text = None
        for _ in range(scorer.TRIES):
            text = (yield Turn(again=False, options={"temperature": 0})).text
            letter = scorer.read(text or "", sample.options)
            if letter is not None:
                return Outcome(letter, text or "", read=True)
        return Outcome(UNREAD, text or "", read=False)

    def report(self, samples: Sequence[Sample], verdicts: Verdicts, data: Path, runs: int) -> dict[str, Any]:
        """The benchmark's own report on the letters that rules and judge read; of several runs the mean accuracy."""
        graded = [one for one in samples if one.key in verdicts]
        reports = [self._score(graded, [verdicts[one.key][run] for one in graded], data) for run in range(runs)]
        accuracies = [one["accuracy"] for one in reports]
        accuracy = None if None in accuracies else mean(accuracies)
        names = ("rules", "undecided", "single", "statistic", "splits", "extracted")
        numbers = {name: reports[0][name] for name in names if name in reports[0]}
        return {"accuracy": accuracy, "runs": accuracies, **numbers}

    def grades(self, samples: Sequence[Sample], verdicts: Verdicts) -> dict[str, Any]:
        """Of each row the letter (of the first run), the text it was read from, and the judge where one was asked."""
        return {
            key: {"opt": said[0].value or None, "log": said[0].content, "judge": said[0].model}
            for key, said in verdicts.items()
        }

    @property
    def _language(self) -> Language:
        return mmbench.ENGLISH if self.name == "mmbench" else mmbench.CHINESE

    def _score(self, samples: Sequence[Sample], verdicts: Sequence[Verdict], data: Path) -> dict[str, Any]:
        answers = [
            {"question_id": int(one.key), "text": verdict.value} for one, verdict in zip(samples, verdicts, strict=True)
        ]
        return benchmarks.get(self.name).score(answers, data)


def _fields(row: Mapping[str, Any], options: Mapping[str, str]) -> dict[str, str]:
    """Question, block of options and answer; the question mark behind the question is the prompt's own."""
    block = "There are several options: \n" + "".join(f"{letter}. {text}\n" for letter, text in options.items())
    return {"question": str(row["question"]), "options": block, "prediction": row["prediction"]}
