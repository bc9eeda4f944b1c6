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

LABELS = "coco/coco_pope_{}.json"
LABEL_SOURCE = "output/coco of github.com/AoiDragon/POPE at commit e3e39262c85a6a83f26cf5094022a782cb0df58d"
KNOWN = {  # the labels of commit e3e3926
    "random": "c16b65d2df6d70bb0814c8a4375833d39cdb09928fd936d3fc546491efa37f35",
    "popular": "5b16653023bf4f64d57eb0d168259de6627f5cde7538b85ebed3cc33034aa6cc",
    "adversarial": "1d8f0906a9b50c05640f6f23abfac97523be2a1bed28f7eadc63b811699b2d26",
}
FILES = (
    DataFile(
        "llava_pope_test.jsonl", base.LLAVA_EVAL_ZIP, "1d3b41f0dced74b4f361c659787ef673497cfac54a6be7bde00eb405bab03c70"
    ),
    *(DataFile(LABELS.format(category), LABEL_SOURCE, checksum) for category, checksum in KNOWN.items()),
)
RATIOS = ("f1", "accuracy", "precision", "recall", "yes_ratio")
OTHER = {"yes": "no", "no": "yes"}


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
        return self.gold(data, self.load(data))

    def gold(self, data: Path, questions: Sequence[Question]) -> Mapping[int, str]:
        """The label of every question, once question and label file agree line by line."""
        labels: dict[int, str] = {}
        for category in dict.fromkeys(question.category for question in questions):
            path = self.place(data) / LABELS.format(category)
            rows = read_lines(path, ("text", "label"))
            asked = [question for question in questions if question.category == category]
            if len(rows) != len(asked):
                raise _mismatch(path, f"it has {len(rows)} lines, but {len(asked)} {category} questions are asked")
            for number, (question, row) in enumerate(zip(asked, rows, strict=True), start=1):
                same_image = "image" not in row or (row["image"],) == question.images
                if not same_image or not f"{question.text}\n".startswith(f"{row['text']}\n"):
                    ours = f"{', '.join(question.images)}: {question.text.partition(chr(10))[0]!r}"
                    theirs = f"{row.get('image')}: {row['text']!r}"
                    raise _mismatch(path, f"line {number} is {theirs}, but the question asked is {ours}")
                labels[question.index] = "no" if row["label"] == "no" else "yes"
        return labels

    def grade(self, text: str, question: Question, gold: str) -> Record:
        said = pope_word(text)
        # the three categories share their images and their questions about objects that are there
        return {"extracted": said, "correct": said == gold, "group": question.category, "unit": question.images[0]}

    def readable(self, text: str, row: Record) -> bool:
        return pope_can_use(text)

    def totals(self, rows: Sequence[Record]) -> Record:
        """Ratios in percent: the mean over the categories that have the ratio, as papers quote F1, and of each."""
        categories: dict[str, dict[str, Any]] = {}
        for category in dict.fromkeys(row["group"] for row in rows):
            of_it = [row for row in rows if row["group"] == category]
            said = [row["extracted"] for row in of_it]
            right = [row["extracted"] if row["correct"] else OTHER[row["extracted"]] for row in of_it]
            categories[category] = metrics(said, right)
        every = {name: [ratios[name] for ratios in categories.values() if ratios[name] is not None] for name in RATIOS}
        return {
            **{name: 100 * mean(values) if values else None for name, values in every.items()},
            "categories": {
                category: ratios | {name: base.percent(ratios[name]) for name in RATIOS}
                for category, ratios in categories.items()
            },
            "statistic": "f1_mean",
        }


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
