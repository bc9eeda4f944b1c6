"""VQA v2: an open answer against ten people, by the rules of the official evaluation of 2021 or of 2017.

Equal to the official code under Python 2.7 to the last bit, its rounding of exact halves included. Rules 2021 (commit
a013f00): answer and references are normalised only where the references differ, so `Yes` against ten `yes` is wrong.
Rules 2017 (a4f1afd, by which most published validation numbers were made): the answer is always normalised, references
only lose their marks, and only where they differ. Used by `benchmarks/vqav2.py`.
"""

import re
from collections.abc import Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from llava_consensus.evaluation.scorers import Score, mean, vqa_text

RULES = ("2021", "2017")
Reference = Mapping[str, Any]  # answer, answer_confidence, answer_id
_COMMA_IN_NUMBER = re.compile(r"\d,\d", re.ASCII)
_LONE_PERIOD = re.compile(r"\.(?!\d)", re.ASCII)


def strip_marks(text: str) -> str:
    """The punctuation step: as TextVQA's, but one comma between two ASCII digits is what makes all marks vanish."""
    return vqa_text.strip_marks(text, _COMMA_IN_NUMBER, _LONE_PERIOD)


def unify_words(text: str) -> str:
    """The step of number words, articles and contractions; lower case letter by letter, as Python 2.7 did it."""
    lower = text.lower() if text.isascii() else "".join("i" if letter == "İ" else letter.lower() for letter in text)
    return vqa_text.unify_words(lower)


def score(answer: str, references: Sequence[Reference], rules: str = "2021") -> Score:
    """One answer: the mean over references of min(1, other references equal to it / 3)."""
    prediction, texts = _flat(answer), [reference["answer"] for reference in references]
    if rules == "2021":
        texts = [_flat(text) for text in texts]
        if len(set(texts)) > 1:
            prediction, texts = unify_words(strip_marks(prediction)), [unify_words(strip_marks(text)) for text in texts]
    else:
        prediction = unify_words(strip_marks(prediction))
        if len(set(texts)) > 1:
            texts = [strip_marks(text) for text in texts]
    normalised = [{**reference, "answer": text} for reference, text in zip(references, texts, strict=True)]
    equal = [reference for reference in normalised if reference["answer"] == prediction]
    # as in the official code, every copy of the same record is left out, not the one at hand alone
    matches = (sum(other != reference for other in equal) for reference in normalised)
    return Score(mean(min(1, float(count) / 3) for count in matches), prediction)


def evaluate(
    annotations: Sequence[Mapping[str, Any]], answers: Mapping[int | str, str], rules: str = "2021"
) -> dict[str, Any]:
    """Rounded percentages as the official code gives them, over the annotations that have an answer.

    `accuracy`, `unrounded`, `per_question_type`, `per_answer_type`, and `scores`: what each question got, by id.
    """
    scores: dict[int | str, Score] = {}
    groups: dict[str, dict[str, list[float]]] = {"question_type": {}, "answer_type": {}}
    for annotation in annotations:
        key = annotation["question_id"]
        if key in answers:
            scores[key] = score(answers[key], annotation["answers"], rules)
            for kind, of_kind in groups.items():
                of_kind.setdefault(annotation[kind], []).append(scores[key].value)
    values = [result.value for result in scores.values()]
    report: dict[str, Any] = {
        "accuracy": percentage(values) if values else None,
        "unrounded": 100 * mean(values) if values else None,
    }
    for kind, of_kind in groups.items():
        report[f"per_{kind}"] = {name: percentage(accuracies) for name, accuracies in sorted(of_kind.items())}
    return report | {"scores": scores}


def percentage(values: Sequence[float]) -> float:
    """100 times the mean, rounded to two decimals as Python 2.7 rounds: exact halves away from zero."""
    total = 0.0
    for value in values:
        total += value
    return half_up(100 * total / len(values))


def half_up(value: float) -> float:
    """Two decimals; the exact binary value decides, exact halves go away from zero."""
    return float(Decimal(value).quantize(Decimal("0.01"), ROUND_HALF_UP))


def _flat(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ").strip()
