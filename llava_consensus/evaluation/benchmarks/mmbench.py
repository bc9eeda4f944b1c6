"""MMBench, English (`mmbench`) and Chinese (`mmbench_cn`): questions with options, each asked once per rotation.

Data: DATA/eval/mmbench and DATA/eval/mmbench_cn; one table each from
https://download.openmmlab.com/mmclassification/datasets/mmbench (Apache-2.0; images of many origins, inside the
table as base64). `split=test` takes the test table, whose answers are not published: the score is None then, and the
server (https://mmbench.opencompass.org.cn) accepts the output of `export`.
Asked as LLaVA does: every row once (the rotations are rows), vicuna_v1, greedy, at most 1,024 new tokens, hint,
question and options, then the option's letter, asked for in Chinese in `mmbench_cn`. Options end at the first empty
one, and pandas takes an option like "None" or "N/A" for empty, as in LLaVA's script. Images are turned to RGB first.
Scored by circular accuracy (a question counts if every rotation is right), equal to VLMEvalKit v0.2 (commit e4e0263;
the same from 2024-02 to 2025-08) to the last bit. An answer is read by letter, then by content: exactly one option's
text inside it. If neither decides, it is wrong here; `judge/mmbench.py` has a judge read it. The questions of a partial
run are judged by the rotations that were answered, as in VLMEvalKit.
Must match: LLaVA-1.5-7B 64.3 and 58.3 (https://arxiv.org/abs/2310.03744, table 4).
"""

import base64
import binascii
import io
import zipfile
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from llava_consensus.errors import DataError, ImageError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Joined, Question, mean, option
from llava_consensus.evaluation.benchmarks.parsing import mmbench_option as read
from llava_consensus.evaluation.files import Record, read_text, write_out

if TYPE_CHECKING:
    from pandas import DataFrame

FIELDS = ("index", "question", "hint", "A", "B", "C", "D", "image")
OPTIONS = ("A", "B", "C", "D")
DROPPED = ["hint", "category", "source", "image", "comment", "l2-category"]  # not part of a submission
CELL = 32_767  # characters a cell of an xlsx sheet holds
FORMULA = ("=", "+", "-", "@")  # a spreadsheet may read such a cell as a formula
SHEET = b"PK"  # how an xlsx file begins
SHORTEST = 64  # characters; a shorter image is the index of the row that has it
SERVER = "https://download.openmmlab.com/mmclassification/datasets/mmbench/{}"
RULES = "VLMEvalKit v0.2 (e4e0263)"
ROTATION = 1_000_000  # index of a rotated question: that of the question plus a multiple of this


@dataclass(frozen=True, kw_only=True)
class MMBench(Benchmark):
    name = "mmbench"
    title = "MMB"
    line = "MMBench dev, English: options in every rotation, circular accuracy without a judge"
    folder = "mmbench"
    images = ""
    metric = "accuracy"
    column = "mmb"
    judge = "llava_consensus.evaluation.judge.mmbench:MMBenchGrader"
    max_new_tokens = 1024
    licence = "Apache-2.0; images of many origins"
    whole = "its server would count each as wrong"

    suffix: ClassVar[str] = base.LETTER  # asks for a letter
    tables: ClassVar[Mapping[str, str]] = {"dev": "mmbench_dev_20230712.tsv", "test": "mmbench_test_20230712.tsv"}
    published: ClassVar[tuple[int, float]] = (4377, 64.3)  # rows of dev, LLaVA-1.5-7B on them

    split: str = option("dev", "test", line="the answers of test are not published", asks=True)

    @property
    def files(self) -> tuple[DataFile, ...]:
        name = self.tables[self.split]
        return (DataFile(name, SERVER.format(name)),)

    @property
    def count(self) -> int | None:
        return self.published[0] if self.split == "dev" else None

    @property
    def paper(self) -> float | None:
        return self.published[1] if self.split == "dev" else None

    def load(self, data: Path) -> list[Question]:
        """The rows in file order; an image is named by the index of the first row that has it."""
        table = self._table(data)
        questions = []
        for number, (row, name) in enumerate(zip(table.rows, table.names, strict=True)):
            text = _question_text(self.place(data) / self.question_file, number, row)
            category = str(row.get("category", "default"))
            questions.append(Question(number, int(row["index"]), (name,), text + self.suffix, category, text))
        return questions

    def together(self, question: Question) -> Hashable:
        return int(question.question_id) % ROTATION

    def read(self, path: Path, data: Path) -> list[Record]:
        """LLaVA's answers, or the sheet that the official server takes (xlsx): columns index and prediction. An empty
        cell reads `nan`, as in VLMEvalKit.
        """
        if not path.is_file() or path.read_bytes()[:2] != SHEET:
            return super().read(path, data)
        import pandas

        try:
            table = pandas.read_excel(path, dtype={"prediction": str})
            pairs = zip(table["index"], table["prediction"], strict=True)
            return [{"question_id": int(index), "text": str(text)} for index, text in pairs]
        except (KeyError, ValueError, TypeError, OSError, zipfile.BadZipFile) as error:
            raise DataError(f"{path}: not a sheet with columns index and prediction ({error})") from error

    def scored_by(self, data: Path) -> str | None:
        return None if self.split == "dev" else "its server"

    def gold(self, data: Path, questions: Sequence[Question]) -> Mapping[int, Any]:
        """Options and answer of every row; the answer is None if it is not published."""
        rows = self._table(data).rows
        published = not any(_empty(row.get("answer")) for row in rows)
        return {
            one.index: (_options(rows[one.index]), rows[one.index]["answer"] if published else None)
            for one in questions
        }

    def grade(self, text: str, question: Question, gold: Any) -> Record:
        options, right = gold
        letter = read(text, options)
        if right is None:
            return {"extracted": letter or ""}
        turn, unit = divmod(int(question.question_id), ROTATION)
        return {"extracted": letter or "", "correct": letter == right, "unit": unit, "turn": turn}

    def readable(self, text: str, row: Record) -> bool:
        return bool(row["extracted"])

    def totals(self, rows: Sequence[Record]) -> Record:
        """Circular `accuracy` in percent over the `questions` whose unrotated row has an answer, `single` (each row),
        and how many answers no rule could read (`undecided`). Accuracy by ability is VLMEvalKit's, of an export.
        """
        numbers: Record = {
            "statistic": "circular",
            "rules": f"{RULES}, exact matching",
            "split": self.split,
            "accuracy": None,
        }
        numbers["undecided"] = sum(not row["extracted"] for row in rows)
        if any("correct" not in row for row in rows):
            return numbers
        asked = {row["unit"]: True for row in sorted(rows, key=itemgetter("unit")) if row["turn"] == 0}
        for row in rows:
            if row["unit"] in asked:
                asked[row["unit"]] &= row["correct"]
        hits = [{"correct": hit} for hit in asked.values()]
        return numbers | {"accuracy": base.share(hits), "questions": len(hits), "single": base.share(rows)}

    def chance(self, questions: Sequence[Question], data: Path) -> float:
        """Mean over questions of the chance to guess every rotation that is asked, in percent."""
        table = self._table(data).rows
        right: dict[int, float] = {}
        for question in questions:
            number = int(question.question_id) % ROTATION
            right[number] = right.get(number, 1.0) / max(len(_options(table[question.index])), 1)
        return 100 * mean(right.values())

    def answered(self, records: Sequence[Record], data: Path) -> tuple[Joined, list[dict[str, Any]]]:
        """The answers by question, and the table's rows that have one: with options, prediction and line (`at`)."""
        table, joined = self._table(data).rows, base.join(records, self.load(data))
        rows = []
        for index, record in joined.answers.items():
            row = table[index]
            more = {"index": int(row["index"]), "options": _options(row), "prediction": record["text"], "at": index}
            rows.append({**row, **more})
        return joined, rows

    def export(self, records: Sequence[Record], data: Path, target: Path) -> dict[str, Any]:
        """The xlsx sheet LLaVA's converter writes: no images and hints, predictions as the seventh column."""
        audit = base.join(records, self.load(data)).audit
        texts = {record["question_id"]: record["text"] for record in records}
        table = self._table(data).frame
        sheet = table.drop(columns=DROPPED, errors="ignore")
        sheet.insert(min(6, len(sheet.columns)), "prediction", [texts.get(int(index)) for index in table["index"]])
        write_out(target, to_xlsx(sheet))
        return audit | {"written": len(sheet)}

    def read_image(self, data: Path, name: str) -> bytes:
        """The image of that name; ImageError if the table has none or it is damaged."""
        table, path = self._table(data), self.place(data) / self.question_file
        if name not in table.images:
            raise ImageError(f"{path}: no image named {name!r}")
        try:
            return base64.b64decode(table.images[name])
        except binascii.Error as error:
            raise ImageError(f"{path}, index {name}: the image is no base64 ({error})") from error

    def _table(self, data: Path) -> "QuestionTable":
        base.require(self.place(data), self.files)
        path = self.place(data) / self.question_file
        return _read_table(path, path.stat().st_mtime_ns, path.stat().st_size)


@dataclass(frozen=True, kw_only=True)
class MMBenchCN(MMBench):
    name = "mmbench_cn"
    title = "MMB-CN"
    line = "MMBench dev, Chinese: options in every rotation, circular accuracy without a judge"
    folder = "mmbench_cn"
    column = "mmb_cn"
    suffix = "\n请直接回答选项字母。"
    tables: ClassVar[Mapping[str, str]] = {"dev": "mmbench_dev_cn_20231003.tsv", "test": "mmbench_test_cn_20231003.tsv"}
    published = (4329, 58.3)


def _empty(value: object) -> bool:
    """True for a cell that pandas reads as empty: only NaN differs from itself."""
    return value is None or value != value


def _options(row: Mapping[str, Any]) -> dict[str, Any]:
    return {letter: row[letter] for letter in OPTIONS if not _empty(row[letter])}


def _unset(value: object) -> bool:
    """True for cells that LLaVA's script reads as no hint or no option."""
    return _empty(value) or (isinstance(value, str) and value.lower() in ("nan", "none"))


def _question_text(path: Path, number: int, row: Mapping[str, Any]) -> str:
    """Hint, question and options of a row, without the sentence that asks for a letter."""
    if _empty(row["question"]):
        raise DataError(f"{path}, row {number + 1} (index {row['index']}): no question")
    lines = [str(row["question"])] if _unset(row["hint"]) else [str(row["hint"]), str(row["question"])]
    for letter in OPTIONS:
        if _unset(row[letter]):
            break
        lines.append(f"{letter}. {row[letter]}")
    return "\n".join(lines)


def to_xlsx(table: "DataFrame") -> bytes:
    """A table as an xlsx sheet in which every text stays text, a formula too; control characters are left out."""
    import pandas
    from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE  # heavy, like pandas: only now

    table = table.map(lambda value: ILLEGAL_CHARACTERS_RE.sub("", value) if isinstance(value, str) else value)
    longest = max((len(value) for value in table.to_numpy().ravel() if isinstance(value, str)), default=0)
    if longest > CELL:
        raise DataError(
            f"an answer has {longest:,} characters, and a cell of an xlsx sheet holds {CELL:,}. Answer it again with a "
            "smaller --max-new-tokens"
        )
    content = io.BytesIO()
    with pandas.ExcelWriter(content, engine="openpyxl") as writer:
        table.to_excel(writer, index=False)
        for cell in (cell for row in writer.book.active.iter_rows() for cell in row):
            if isinstance(cell.value, str) and cell.value.startswith(FORMULA):
                cell.data_type, cell.quotePrefix = "s", True
    return content.getvalue()


class QuestionTable(NamedTuple):
    """A table of tab-separated cells with the images inside; it is cached, so it must not be changed."""

    frame: "DataFrame"
    rows: list[dict[str, Any]]
    names: list[str]  # of each row's image: the index of the first row that has it
    images: dict[str, str]  # by name, as base64


@lru_cache(maxsize=2)
def _read_table(path: Path, *_stamp: int) -> QuestionTable:
    import pandas

    read_text(path)  # says which byte is no UTF-8
    try:
        table = pandas.read_table(path)
    except (ValueError, pandas.errors.ParserError) as error:
        raise DataError(f"{path}: not a table of tabs ({error}): damaged or cut off, fetch it again") from error
    absent = [name for name in FIELDS if name not in table]
    if absent:
        raise DataError(f"{path}: no column {', '.join(absent)}: not an MMBench table")
    if not table["index"].map(lambda index: isinstance(index, int)).all():
        raise DataError(f"{path}: an index is no whole number: damaged or cut off, fetch it again")
    rows = table.to_dict("records")
    images = {str(row["index"]): str(row.get("image")) for row in rows}
    images |= {name: images[image] for name, image in images.items() if len(image) <= SHORTEST and image in images}
    first: dict[str, str] = {}
    for name, image in images.items():
        first.setdefault(image, name)
    names = [first[images[str(row["index"])]] for row in rows]
    return QuestionTable(table, rows, names, {name: images[name] for name in names})
