"""POPE: yes or no out of a free answer, and the counts and ratios of one category.

Equal to the official script to the last bit. Where that script dies of a division by zero (a model that never says
yes, for example) the ratio is None here and F1 counts as 0.0 if there was anything to find.
Used by `benchmarks/pope.py`.
"""

from collections.abc import Sequence

from llava_consensus.evaluation.scorers import mean

NEGATIONS = frozenset(("No", "not", "no"))


def parse(text: str) -> str:
    """`no` if a negation is a word of the first sentence, else `yes`; spelling and spacing as the official script."""
    words = text.partition(".")[0].replace(",", "").split(" ")
    return "yes" if NEGATIONS.isdisjoint(words) else "no"


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


def mean_f1(categories: Sequence[dict[str, float | None]]) -> float | None:
    """The number papers quote: the plain mean of the categories' F1, as a fraction."""
    values = [category["f1"] for category in categories]
    defined = [value for value in values if value is not None]
    return mean(defined) if defined else None
