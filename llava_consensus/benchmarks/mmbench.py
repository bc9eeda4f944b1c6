"""MMBench, English (`mmbench`) and Chinese (`mmbench_cn`): questions with options, each asked once per rotation.

Data: DATA/eval/mmbench and DATA/eval/mmbench_cn; one table each from
https://download.openmmlab.com/mmclassification/datasets/mmbench (Apache-2.0; pictures of many origins, inside the
table as base64). `split=test` takes the test table, whose answers are not published: the score is None then, and the
server (https://mmbench.opencompass.org.cn) takes what `export` writes.
Asked as LLaVA does: every row once (the rotations are rows), vicuna_v1, greedy, at most 1,024 new tokens, hint,
question and options, then the option's letter, asked for in Chinese in `mmbench_cn`. Options end at the first empty
one, and pandas takes an option like "None" or "N/A" for empty, there as here. Pictures are turned to RGB first.
Scored by circular accuracy (a question counts if every rotation is right), answers read by the rules of
VLMEvalKit v0.2; a judge for what they cannot read is optional (`judge/mmbench.py`). The questions of a partial run are
judged by the rotations that are there, as there.
Must match: LLaVA-1.5-7B 64.3 and 58.3 (https://arxiv.org/abs/2310.03744, table 4).
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from llava_consensus.benchmarks import base, submission, tables
from llava_consensus.benchmarks.base import Benchmark, Choice, DataFile, Joined, Question, Record
from llava_consensus.errors import DataError
from llava_consensus.scorers import mean
from llava_consensus.scorers import mmbench as scorer

OPTIONS = ("A", "B", "C", "D")
LETTER_CN = "\n请直接回答选项字母。"
DROPPED = ["hint", "category", "source", "image", "comment", "l2-category"]  # not part of a submission
SERVER = "https://download.openmmlab.com/mmclassification/datasets/mmbench/{}"


class Language(NamedTuple):
    """Folder, tables by split, the sentence that asks for a letter."""

    folder: str
    names: Mapping[str, str]
    suffix: str


ENGLISH = Language("mmbench", {"dev": "mmbench_dev_20230712.tsv", "test": "mmbench_test_20230712.tsv"}, base.LETTER)
CHINESE = Language(
    "mmbench_cn", {"dev": "mmbench_dev_cn_20231003.tsv", "test": "mmbench_test_cn_20231003.tsv"}, LETTER_CN
)


def load(data: Path, language: Language = ENGLISH, split: str = "dev") -> list[Question]:
    """The rows in file order; a picture is named by the index of the first row that has it."""
    path = _path(data, language, split)
    named = tables.names(path)
    questions = []
    for number, row in enumerate(tables.rows(path)):
        text = _ask(path, number, row)
        question = Question(number, int(row["index"]), (named[number],), text + language.suffix, prompt=text)
        questions.append(replace(question, category=str(row.get("category", "default"))))
    return questions


def score(records: Sequence[Record], data: Path, language: Language = ENGLISH, split: str = "dev") -> dict[str, Any]:
    """Circular `accuracy` in percent over the questions with an answer, `single` (rows for themselves), and `splits`.

    `questions` counts those judged, `whole` those of them with all rotations answered, `undecided` the answers no rule
    could read. `splits` are fractions by ability, as VLMEvalKit reports them.
    """
    joined, rows = answered(records, data, language, split)
    table = tables.rows(_path(data, language, split))
    read = [scorer.read(row["prediction"], row["options"]) for row in rows]
    extracted: list[dict[str, Any]] = [
        {
            "index": row["at"],
            "extracted": letter or "",
            "correct": letter == row.get("answer"),
            "unit": row["index"] % scorer.ROTATION,
        }
        for row, letter in zip(rows, read, strict=True)
    ]
    numbers: dict[str, Any] = {
        "statistic": "circular",
        "accuracy": None,
        "rules": f"{scorer.RULES}, exact matching",
        "split": split,
    }
    numbers["undecided"] = sum(letter is None for letter in read)
    if any(tables.empty(row.get("answer")) for row in table):
        extracted = [{name: one[name] for name in ("index", "extracted")} for one in extracted]
    else:
        numbers |= _accuracies(rows, table)
        numbers["single"] = base.percent(mean(float(one["correct"]) for one in extracted)) if rows else None
    return base.report(language.folder, joined, numbers, extracted)


def answered(
    records: Sequence[Record], data: Path, language: Language = ENGLISH, split: str = "dev"
) -> tuple[Joined, list[dict[str, Any]]]:
    """The answers by question, and the rows of the table that have one: with options, prediction and line (`at`)."""
    table = tables.rows(_path(data, language, split))
    joined = base.join(records, load(data, language, split))
    rows = []
    for at, record in joined.answers.items():
        options = {letter: table[at][letter] for letter in OPTIONS if not tables.empty(table[at][letter])}
        own = {"index": int(table[at]["index"]), "options": options, "prediction": record["text"], "at": at}
        rows.append({**table[at], **own})
    return joined, rows


def export(
    records: Sequence[Record], data: Path, target: Path, language: Language = ENGLISH, split: str = "dev"
) -> dict[str, Any]:
    """The xlsx sheet LLaVA's converter writes: the table without pictures and hints, predictions as seventh column."""
    questions = load(data, language, split)
    base.join(records, questions)  # stops where the answers are no answers or those of another benchmark
    found = submission.audit(records, questions)
    said = {record["question_id"]: record["text"] for record in records}
    table = tables.read(_path(data, language, split))
    sheet = table.drop(columns=DROPPED, errors="ignore")
    sheet.insert(min(6, len(sheet.columns)), "prediction", [said.get(int(one)) for one in table["index"]])
    content = io.BytesIO()
    from openpyxl.utils.exceptions import IllegalCharacterError  # heavy, like pandas: only now

    try:
        sheet.to_excel(content, index=False, engine="openpyxl")
    except IllegalCharacterError as error:
        raise DataError(f"an answer has a control character, which no xlsx sheet can hold: {error}") from error
    submission.write(target, content.getvalue())
    return found | {"written": len(sheet)}


def picture(data: Path, name: str, language: Language = ENGLISH, split: str = "dev") -> bytes:
    """The picture of that name; ImageError if the table has none or it is damaged."""
    return tables.picture(_path(data, language, split), name)


def _path(data: Path, language: Language, split: str) -> Path:
    folder = Path(data) / "eval" / language.folder
    base.require(folder, _files(language, split))
    return folder / language.names[split]


def _unset(value: Any) -> bool:
    """What LLaVA's script takes for no hint or no option."""
    return tables.empty(value) or (isinstance(value, str) and value.lower() in ("nan", "none"))


def _ask(path: Path, number: int, row: Mapping[str, Any]) -> str:
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
    own = {row["index"]: row for row in rows}
    kept = ("split", "l2-category", "category")
    judged = [
        {"hit": found, **{name: own[key][name] for name in kept if name in own[key]}} for key, found in hits.items()
    ]
    rotations: dict[int, int] = {}
    for row in table:
        question = int(row["index"]) % scorer.ROTATION
        rotations[question] = rotations.get(question, 0) + 1
    for row in rows:
        rotations[row["index"] % scorer.ROTATION] -= 1
    return {
        "accuracy": base.percent(mean(float(found) for found in hits.values())) if hits else None,
        "questions": len(hits),
        "whole": sum(not rotations[question] for question in hits),
        "splits": scorer.accuracies(judged),
    }


def _files(language: Language, split: str) -> tuple[DataFile, ...]:
    name = language.names[split]
    return (DataFile(name, SERVER.format(name)),)


def _vary(language: Language, split: str = "dev") -> Benchmark:
    own: dict[str, Any] = {"language": language, "split": split}
    return replace(
        MMBENCH if language is ENGLISH else MMBENCH_CN,
        questions=language.names[split],
        files=_files(language, split),
        count=None,
        paper=None,
        load=partial(load, **own),
        score=partial(score, **own),
        export=partial(export, **own),
        picture=partial(picture, **own),
    )


MMBENCH = Benchmark(
    name="mmbench",
    line="MMBench dev, English: options in every rotation, circular accuracy without a judge",
    folder=ENGLISH.folder,
    questions=ENGLISH.names["dev"],
    images="",
    files=_files(ENGLISH, "dev"),
    metric="accuracy",
    paper=64.3,
    max_new_tokens=1024,
    conversation="vicuna_v1",
    load=load,
    score=score,
    licence="Apache-2.0; pictures of many origins",
    count=4377,
    export=export,
    picture=picture,
    choices={"split": Choice(("dev", "test"), "the answers of test are not published", asks=True)},
    vary=partial(_vary, ENGLISH),
)

MMBENCH_CN = replace(
    MMBENCH,
    name="mmbench_cn",
    line="MMBench dev, Chinese: options in every rotation, circular accuracy without a judge",
    folder=CHINESE.folder,
    questions=CHINESE.names["dev"],
    files=_files(CHINESE, "dev"),
    paper=58.3,
    load=partial(load, language=CHINESE),
    score=partial(score, language=CHINESE),
    count=4329,
    export=partial(export, language=CHINESE),
    picture=partial(picture, language=CHINESE),
    vary=partial(_vary, CHINESE),
)
