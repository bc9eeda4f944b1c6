"""MME: yes or no out of the first four characters, and acc + acc+ of each task.

Equal to the official tool to the last bit. A task's score is 100 times the share of right answers plus 100 times the
share of pictures with both questions right. The tool takes its lines two by two and never compares the pictures'
names; here the pairs are given. Where the tool stops because no answer of a task is yes or no, the score is 0 and
`unreadable` names the task. Used by `benchmarks/mme.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

PERCEPTION = (
    *("existence", "count", "position", "color", "posters"),
    *("celebrity", "scene", "landmark", "artwork", "OCR"),
)
COGNITION = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")
PARTS = {"perception": PERCEPTION, "cognition": COGNITION}


class Pair(NamedTuple):
    """The two questions about one picture: their right answers, `yes` or `no`, and those given, also `other`."""

    right: tuple[str, str]
    answers: tuple[str, str]


def parse(answer: str) -> str:
    """`yes`, `no` or `other`: the whole answer, else yes before no among its first four characters; case is ignored."""
    text = answer.lower()
    if text in ("yes", "no"):
        return text
    return next((word for word in ("yes", "no") if word in text[:4]), "other")


def label(text: str) -> str:
    """A ground truth: yes or no whatever the case; ValueError for anything else, a blank at its end included."""
    if text.lower() not in ("yes", "no"):
        raise ValueError(f"the right answer is {text!r}, which is neither yes nor no")
    return text.lower()


def task(pairs: Sequence[Pair]) -> dict[str, Any]:
    """`acc` and `acc_plus` as fractions and the task's `score` (0 to 200)."""
    if not pairs:
        raise ValueError("no picture in it")
    right = [[expected == answer for expected, answer in zip(pair.right, pair.answers, strict=True)] for pair in pairs]
    acc = sum(map(sum, right)) / (2 * len(pairs))
    acc_plus = sum(map(all, right)) / len(pairs)
    return {"acc": acc, "acc_plus": acc_plus, "score": acc * 100 + acc_plus * 100, "pictures": len(pairs)}


def evaluate(tasks: Mapping[str, Sequence[Pair]]) -> dict[str, Any]:
    """Totals over the tasks that are there, in the tool's order, and `tasks`; the total of none is None."""
    report: dict[str, Any] = {}
    scored = {}
    for part, names in PARTS.items():
        total = 0.0
        for name in (task_name for task_name in names if tasks.get(task_name)):
            scored[name] = task(tasks[name])
            total += scored[name]["score"]
        report[part] = total if any(tasks.get(task_name) for task_name in names) else None
    unreadable = [name for name in scored if all(answer == "other" for pair in tasks[name] for answer in pair.answers)]
    return report | {"tasks": scored, "unreadable": unreadable}
