"""MMBench, English (`mmbench`) and Chinese (`mmbench_cn`): questions with options, each asked once per rotation.

Data: DATA/eval/mmbench and DATA/eval/mmbench_cn; one table each from
https://download.openmmlab.com/mmclassification/datasets/mmbench (Apache-2.0; pictures of many origins, inside the
table as base64). `split=test` takes the test table, whose answers are not published: the score is None then, and the
server (https://mmbench.opencompass.org.cn) takes what `export` writes.
Asked as LLaVA does: every row once (the rotations are rows), vicuna_v1, greedy, at most 1,024 new tokens, hint,
question and options, then the option's letter, asked for in Chinese in `mmbench_cn`. Options end at the first empty
one, and pandas takes an option like "None" or "N/A" for empty, as in LLaVA's script. Pictures are turned to RGB first.
Scored by circular accuracy (a question counts if every rotation is right), answers read by the rules of
VLMEvalKit v0.2; a judge for what they cannot read is optional (`judge/mmbench.py`). The questions of a partial run are
judged by the rotations that were answered, as in VLMEvalKit.
Must match: LLaVA-1.5-7B 64.3 and 58.3 (https://arxiv.org/abs/2310.03744, table 4).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base, submission, tables
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Joined, Question, option
from llava_consensus.evaluation.files import Record, write_out
from llava_consensus.evaluation.scorers import mean
from llava_consensus.evaluation.scorers import mmbench as scorer

SHEET = b"PK"  # how an xlsx file begins
OPTIONS = ("A", "B", "C", "D")
DROPPED = ["hint", "category", "source", "image", "comment", "l2-category"]  # not part of a submission
SERVER = "https://download.openmmlab.com/mmclassification/datasets/mmbench/{}"


@dataclass(frozen=True, kw_only=True)
class MMBench(Benchmark):
    """Questions with options in every rotation, in English, by circular accuracy."""

    name = "mmbench"
    title = "MMB"
    line = "MMBench dev, English: options in every rotation, circular accuracy without a judge"
    folder = "mmbench"
    images = ""
    metric = "accuracy"
    column = "mmb"
    judge = "llava_consensus.evaluation.judge.mmbench:MMBenchGrader"
    max_new_tokens = 1024
    licence = "Apache-2.0; pictures of many origins"

    suffix: ClassVar[str] = base.LETTER  # asks for a letter
    tables: ClassVar[Mapping[str, str]] = {"dev": "mmbench_dev_20230712.tsv", "test": "mmbench_test_20230712.tsv"}
    published: ClassVar[tuple[int, float]] = (4377, 64.3)  # rows of dev, LLaVA-1.5-7B on them

    split: str = option("dev", "test", line="the answers of test are not published", asks=True)

    @property
    def files(self) -> tuple[DataFile, ...]:
        """The table of the split."""
        name = self.tables[self.split]
        return (DataFile(name, SERVER.format(name)),)

    @property
    def count(self) -> int | None:
        """Rows of dev."""
        return self.published[0] if self.split == "dev" else None

    @property
    def paper(self) -> float | None:
        """As published, on dev."""
        return self.published[1] if self.split == "dev" else None

    def load(self, data: Path) -> list[Question]:
        """The rows in file order; a picture is named by the index of the first row that has it."""
        path = self._table(data)
        named = tables.names(path)
        questions = []
        for number, row in enumerate(tables.rows(path)):
            text = _question_text(path, number, row)
            question = Question(number, int(row["index"]), (named[number],), text + self.suffix, prompt=text)
            questions.append(replace(question, category=str(row.get("category", "default"))))
        return questions

    def read(self, path: Path, data: Path) -> list[Record]:
        """LLaVA's answers, or the sheet that the official server takes (xlsx): columns index and prediction."""
        if not path.is_file() or path.read_bytes()[:2] != SHEET:
            return super().read(path, data)
        return [{"question_id": index, "text": text} for index, text in tables.predictions(path)]

    def scored_by(self, data: Path) -> str | None:
        """The server, for test."""
        return None if self.split == "dev" else "its server"

    def score(self, records: Sequence[Record], data: Path) -> dict[str, Any]:
        """Circular `accuracy` in percent over the questions with an answer, `single` (each row by itself), `splits`.

        `questions` counts those judged, `whole` those of them with all rotations answered, `undecided` the answers no
        rule could read. `splits` are fractions by ability, as VLMEvalKit reports them.
        """
        joined, rows = self.answered(records, data)
        table = tables.rows(self._table(data), ("index", *OPTIONS))
        letters = [scorer.read(row["prediction"], row["options"]) for row in rows]
        extracted: list[dict[str, Any]] = [
            {
                "index": row["at"],
                "extracted": letter or "",
                "correct": letter == row.get("answer"),
                "unit": row["index"] % scorer.ROTATION,
            }
            for row, letter in zip(rows, letters, strict=True)
        ]
        numbers: dict[str, Any] = {
            "statistic": "circular",
            "accuracy": None,
            "rules": f"{scorer.RULES}, exact matching",
            "split": self.split,
        }
        numbers["undecided"] = sum(letter is None for letter in letters)
        if any(tables.empty(row.get("answer")) for row in table):
            extracted = [{name: row[name] for name in ("index", "extracted")} for row in extracted]
        else:
            numbers |= _accuracies(rows, table)
            numbers["single"] = base.percent(mean(float(row["correct"]) for row in extracted)) if rows else None
        return base.report(self.name, joined, numbers, extracted)

    def chance(self, questions: Sequence[Question], data: Path) -> float:
        """Mean over questions of the chance to guess every rotation that is asked, in percent."""
        table = tables.rows(self._table(data), ("index", *OPTIONS))
        right: dict[int, float] = {}
        for question in questions:
            options = sum(not tables.empty(table[question.index][letter]) for letter in OPTIONS)
            number = int(question.question_id) % scorer.ROTATION
            right[number] = right.get(number, 1.0) / max(options, 1)
        return 100 * mean(right.values())

    def answered(self, records: Sequence[Record], data: Path) -> tuple[Joined, list[dict[str, Any]]]:
        """The answers by question, and the table's rows that have one: with options, prediction and line (`at`)."""
        table = tables.rows(self._table(data), ("index", *OPTIONS))
        asked = [Question(number, int(row["index"]), (), "") for number, row in enumerate(table)]
        joined = base.join(records, asked)
        rows = []
        for index, record in joined.answers.items():
            options = {letter: table[index][letter] for letter in OPTIONS if not tables.empty(table[index][letter])}
            columns = {
                "index": int(table[index]["index"]),
                "options": options,
                "prediction": record["text"],
                "at": index,
            }
            rows.append({**table[index], **columns})
        return joined, rows

    def export(self, records: Sequence[Record], data: Path, target: Path) -> dict[str, Any]:
        """The xlsx sheet LLaVA's converter writes: no pictures and hints, predictions as the seventh column."""
        questions = self.load(data)
        base.join(records, questions)  # stops where the answers are no answers or those of another benchmark
        audit = submission.audit(records, questions)
        texts = {record["question_id"]: record["text"] for record in records}
        table = tables.read(self._table(data))
        sheet = table.drop(columns=DROPPED, errors="ignore")
        sheet.insert(min(6, len(sheet.columns)), "prediction", [texts.get(int(index)) for index in table["index"]])
        write_out(target, tables.to_xlsx(sheet))
        return audit | {"written": len(sheet)}

    def picture(self, data: Path, name: str) -> bytes:
        """The picture of that name; ImageError if the table has none or it is damaged."""
        return tables.picture(self._table(data), name)

    def _table(self, data: Path) -> Path:
        base.require(self.place(data), self.files)
        return self.place(data) / self.question_file


@dataclass(frozen=True, kw_only=True)
class MMBenchCN(MMBench):
    """The same in Chinese."""

    name = "mmbench_cn"
    title = "MMB-CN"
    line = "MMBench dev, Chinese: options in every rotation, circular accuracy without a judge"
    folder = "mmbench_cn"
    column = "mmb_cn"
    suffix = "\n请直接回答选项字母。"
    tables: ClassVar[Mapping[str, str]] = {"dev": "mmbench_dev_cn_20231003.tsv", "test": "mmbench_test_cn_20231003.tsv"}
    published = (4329, 58.3)


def _unset(value: Any) -> bool:
    """What LLaVA's script takes for no hint or no option."""
    return tables.empty(value) or (isinstance(value, str) and value.lower() in ("nan", "none"))


def _question_text(path: Path, number: int, row: Mapping[str, Any]) -> str:
    """Hint, question and options of a row, without the sentence that asks for a letter."""
    if tables.empty(row["question"]):
        raise DataError(f"{path}, row {number + 1} (index {row['index']}): no question")
    lines = [str(row["question"])] if _unset(row["hint"]) else [str(row["hint"]), str(row["question"])]
    for letter in OPTIONS:
        if _unset(row[letter]):
            break
        lines.append(f"{letter}. {row[letter]}")
    return "\n".join(lines)


def _accuracies(rows: Sequence[dict[str, Any]], table: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Circular accuracy of the questions that can be judged, and by split and ability."""
    hits = scorer.circular(rows)
    row_by_index = {row["index"]: row for row in rows}
    columns = ("split", "l2-category", "category")
    judged = [
        {"hit": hit, **{name: row_by_index[key][name] for name in columns if name in row_by_index[key]}}
        for key, hit in hits.items()
    ]
    rotations: dict[int, int] = {}
    for row in table:
        question = int(row["index"]) % scorer.ROTATION
        rotations[question] = rotations.get(question, 0) + 1
    for row in rows:
        rotations[row["index"] % scorer.ROTATION] -= 1
    return {
        "accuracy": base.percent(mean(float(hit) for hit in hits.values())) if hits else None,
        "questions": len(hits),
        "whole": sum(not rotations[question] for question in hits),
        "splits": scorer.accuracies(judged),
    }
