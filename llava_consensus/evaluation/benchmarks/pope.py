"""POPE on COCO: 8,910 yes/no questions on objects that are or are not there; hallucination by category.

Data: DATA/eval/pope; questions from LLaVA's eval.zip, labels from https://github.com/AoiDragon/POPE (MIT) **at commit
e3e3926**, images from COCO val2014. Later label files hold 3,000 other random questions instead of 2,910; the
official script pairs by position and would score them without a word, so here every question text is compared first.
Asked as LLaVA does: vicuna_v1, greedy, at most 128 new tokens, one word or phrase.
Scored by the official parsing; the headline is the mean F1 of random, popular and adversarial.
Equal to the official script to the last bit. If that script dies of a division by zero (a model that never says yes,
for example) the ratio is None here and F1 counts as 0.0 if there was anything to find.
Must match: LLaVA-1.5-7B 85.9 (https://arxiv.org/abs/2310.03744, table 4: 87.3, 86.1, 84.2).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question, mean
from llava_consensus.evaluation.benchmarks.parsing import pope_can_use, pope_word
from llava_consensus.evaluation.files import Record, read_lines
from llava_consensus.evaluation.user_files import read_rows

LABELS = "coco/coco_pope_{}.json"
LABEL_SOURCE = "output/coco of github.com/AoiDragon/POPE at commit e3e39262c85a6a83f26cf5094022a782cb0df58d"
KNOWN = {  # the labels of commit e3e3926
    "random": "c16b65d2df6d70bb0814c8a4375833d39cdb09928fd936d3fc546491efa37f35",
    "popular": "5b16653023bf4f64d57eb0d168259de6627f5cde7538b85ebed3cc33034aa6cc",
    "adversarial": "1d8f0906a9b50c05640f6f23abfac97523be2a1bed28f7eadc63b811699b2d26",
}
FILES = (
    DataFile(
        "llava_pope_test.jsonl",
        base.LLAVA_EVAL_ZIP,
        "1d3b41f0dced74b4f361c659787ef673497cfac54a6be7bde00eb405bab03c70",
    ),
    *(DataFile(LABELS.format(category), LABEL_SOURCE, checksum) for category, checksum in KNOWN.items()),
)
RATIOS = ("accuracy", "precision", "recall", "f1", "yes_ratio")


@dataclass(frozen=True, kw_only=True)
class POPE(Benchmark):
    name = "pope"
    title = "POPE"
    line = "POPE: is the object there? yes or no, mean F1 of three ways to choose absent objects"
    folder = "pope"
    images = "val2014"
    files = FILES
    guess = 50.0  # yes or no at random, half of the right answers being yes
    metric = "f1"
    column = "pope_f1"
    paper = 85.9
    count = 8910
    max_new_tokens = 128
    licence = "MIT; COCO images"

    def references(self, data: Path) -> Mapping[int, str]:
        return _labels(self.place(data), self.load(data))

    def read(self, path: Path, data: Path) -> list[Record]:
        """LLaVA's lines, or POPE's own: `question` and `answer` of all questions or of one category, in their order."""
        rows = [row for _, row in read_rows(path)] if path.is_file() else []
        if not rows or not all("answer" in row and "question" in row and "question_id" not in row for row in rows):
            return super().read(path, data)
        questions = self.load(data)
        parts = [[one for one in questions if one.category == category] for category in KNOWN]
        for part in (questions, *parts):
            pairs = list(zip(part, rows, strict=False))
            if len(part) == len(rows) and all(f"{one.text}\n".startswith(f"{row['question']}\n") for one, row in pairs):
                return [
                    {"question_id": one.question_id, "text": row["answer"], "metadata": {"index": one.index}}
                    for one, row in pairs
                ]
        raise DataError(
            f"{path}: its {len(rows)} questions are neither all {len(questions)} asked nor those of one category, in "
            "their order"
        )

    def score(self, records: Sequence[Record], data: Path) -> dict[str, Any]:
        """F1, accuracy, precision, recall and share of yes in percent: mean over categories, and each category."""
        questions = self.load(data)
        labels = _labels(self.place(data), questions)
        joined = base.join(records, questions)
        answers = {index: pope_word(record["text"]) for index, record in joined.answers.items()}
        categories: dict[str, dict[str, Any]] = {}
        for category in dict.fromkeys(questions[index].category for index in answers):
            of_it = [index for index in answers if questions[index].category == category]
            categories[category] = metrics([answers[index] for index in of_it], [labels[index] for index in of_it])
        numbers: dict[str, Any] = {"f1": base.percent(_mean(categories, "f1"))}
        numbers |= {name: base.percent(_mean(categories, name)) for name in RATIOS if name != "f1"}
        numbers["categories"] = {
            category: ratios | {name: base.percent(ratios[name]) for name in RATIOS}
            for category, ratios in categories.items()
        }
        extracted = [
            {
                "index": index,
                "extracted": answer,
                "correct": (answer == "no") == (labels[index] == "no"),
                "group": questions[index].category,
                # the three categories share their images and their questions about objects that are there
                "unit": questions[index].images[0],
            }
            for index, answer in answers.items()
        ]
        unreadable = sum(not pope_can_use(record["text"]) for record in joined.answers.values())
        return base.report(self.name, joined, numbers | {"statistic": "f1_mean"}, extracted, unreadable)


def _labels(folder: Path, questions: Sequence[Question]) -> dict[int, str]:
    """The label of every question, by its index, once question and label file agree line by line."""
    labels: dict[int, str] = {}
    for category in dict.fromkeys(question.category for question in questions):
        path = folder / LABELS.format(category)
        rows = read_lines(path, ("text", "label"))
        of_category = [question for question in questions if question.category == category]
        if len(rows) != len(of_category):
            raise _mismatch(path, f"it has {len(rows)} lines, but {len(of_category)} {category} questions are asked")
        for number, (question, row) in enumerate(zip(of_category, rows, strict=True), start=1):
            same_image = "image" not in row or (row["image"],) == question.images
            if not same_image or not f"{question.text}\n".startswith(f"{row['text']}\n"):
                ours = f"{', '.join(question.images)}: {question.text.partition(chr(10))[0]!r}"
                theirs = f"{row.get('image')}: {row['text']!r}"
                raise _mismatch(path, f"line {number} is {theirs}, but the question asked is {ours}")
            labels[question.index] = str(row["label"])
    return labels


def _mismatch(path: Path, reason: str) -> DataError:
    text = f"{path} does not belong to {FILES[0].path}: {reason}. Another label version? Get it: {LABEL_SOURCE}"
    return DataError(text)


def metrics(answers: Sequence[str], labels: Sequence[str]) -> dict[str, float | None]:
    """Accuracy, precision, recall, F1 and share of yes as fractions, with the counts; None = nothing to divide by.

    Parsed answers are held against labels pair by pair; anything but `no` is positive.
    """
    counts = {"TP": 0, "FP": 0, "TN": 0, "FN": 0}
    for answer, label in zip(answers, labels, strict=False):
        predicted, actual = answer != "no", label != "no"
        counts[("T" if predicted == actual else "F") + ("P" if predicted else "N")] += 1
    tp, fp, tn, fn = counts.values()
    precision, recall = _ratio(tp, tp + fp), _ratio(tp, tp + fn)
    f1: float | None = 0.0 if tp + fp + fn else None
    if precision and recall:
        f1 = 2 * precision * recall / (precision + recall)
    return {
        **counts,
        "accuracy": _ratio(tp + tn, tp + fp + tn + fn),
        "precision": precision,
        "recall": recall,
        "f1": f1,
        "yes_ratio": _ratio(sum(answer != "no" for answer in answers), len(answers)),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _mean(categories: Mapping[str, Mapping[str, float | None]], name: str) -> float | None:
    """The plain mean over the categories that have the ratio, as papers quote F1; as a fraction."""
    values = [value for ratios in categories.values() if (value := ratios[name]) is not None]
    return mean(values) if values else None
