"""GQA: LLaVA's converter and the whole report of the official evaluation script.

Equal to the script to the last bit: accuracy, binary and open, validity and plausibility (with a choices file),
consistency (when asked), distribution, and accuracy per structural type, semantic type, reasoning steps and words.
Used by `benchmarks/gqa.py`.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from llava_consensus.evaluation.scorers import mean

Questions = Mapping[str, Mapping[str, Any]]
COMMON_CHOICES = ("color", "material", "shape")
HIDDEN_STEPS = ("exist", "query: name", "choose name")
TABLES = {
    "accuracyPerStructuralType": "structural type",
    "accuracyPerSemanticType": "semantic type",
    "accuracyPerSteps": "steps number",
    "accuracyPerLength": "words number",
}


def convert(text: str) -> str:
    """LLaVA's step from an answer to a prediction: no final periods, lower case, nothing else."""
    return text.rstrip(".").lower()


def missing(questions: Questions, predictions: Mapping[str, str], everything: bool = False) -> list[str]:
    """Ids of balanced questions (of all, if `everything`) without a prediction; the official script refuses any."""
    return [
        key for key, question in questions.items() if (everything or question["isBalanced"]) and key not in predictions
    ]


def evaluate(
    questions: Questions,
    predictions: Mapping[str, str],
    choices: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
    consistency: bool = False,
) -> dict[str, Any]:
    """The official scores in percent (details as [percent, count]) over balanced questions that have a prediction.

    Call `missing` first where only a complete set counts. What the script does not measure (validity without choices,
    consistency unless asked) is 0.0 as there; what it cannot divide (no question, no global group) is None.
    """
    scored = {key: question for key, question in questions.items() if question["isBalanced"] and key in predictions}
    right = {key: float(predictions[key] == question["answer"]) for key, question in scored.items()}
    is_open = {key: question["types"]["structural"] == "query" for key, question in scored.items()}
    report: dict[str, Any] = {
        "accuracy": mean(right.values()) * 100 if scored else None,
        "binary": mean(value for key, value in right.items() if not is_open[key]) * 100,
        "open": mean(value for key, value in right.items() if is_open[key]) * 100,
        "validity": _percent_allowed(scored, predictions, choices, "valid"),
        "plausibility": _percent_allowed(scored, predictions, choices, "plausible"),
        "consistency": _consistency(questions, predictions, right) if consistency else 0.0,
    }
    for table in TABLES:
        report[table] = _per_group(scored, right, table)
    return report | {"distribution": _distribution(scored, predictions)}


def steps(question: Mapping[str, Any]) -> int:
    """Reasoning steps of a question: its operations less those that only name or check existence."""
    return sum(_is_step(f"{step['operation']}: {step['argument']}") for step in question["semantic"])


@lru_cache(maxsize=1 << 16)
def _is_step(operation: str) -> bool:
    return not any(hidden in operation for hidden in HIDDEN_STEPS)


def lines(report: Mapping[str, Any], consistency: bool = False) -> list[str]:
    """The report as the official script prints it."""
    names = ["binary", "open", "accuracy", *(["consistency"] if consistency else []), "validity", "plausibility"]
    output = [f"{name.capitalize()}: {_two_decimals(report[name])}%" for name in names]
    output += [f"Distribution: {_two_decimals(report['distribution'])} (lower is better)", ""]
    for table, title in TABLES.items():
        output.append(f"Accuracy / {title}:")
        output += [
            f"  {key}: {value:.2f}% ({count} questions)" for key, (value, count) in sorted(report[table].items())
        ]
        output.append("")
    return output


def _two_decimals(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _group(table: str, question: Mapping[str, Any]) -> str | int:
    if table == "accuracyPerSteps":
        return steps(question)
    if table == "accuracyPerLength":
        return len(question["question"].split())
    return question["types"]["structural" if table == "accuracyPerStructuralType" else "semantic"]


def _per_group(scored: Questions, right: Mapping[str, float], table: str) -> dict[str | int, list[float]]:
    groups: dict[str | int, list[float]] = {}
    for key, question in scored.items():
        groups.setdefault(_group(table, question), []).append(right[key])
    return {group: [mean(values) * 100, len(values)] for group, values in groups.items()}


def _percent_allowed(
    scored: Questions, predictions: Mapping[str, str], choices: Mapping[str, Any] | None, kind: str
) -> float:
    """Percentage of predictions that are among the `valid` or `plausible` answers of their question."""
    if choices is None:
        return 0.0

    def allowed(key: str) -> Sequence[str]:
        return COMMON_CHOICES if "Common" in scored[key]["types"]["detailed"] else choices[key][kind]

    return mean(float(predictions[key] in allowed(key)) for key in scored) * 100


def _consistency(questions: Questions, predictions: Mapping[str, str], right: Mapping[str, float]) -> float:
    """Over questions answered correctly: how many of the questions they entail are correct as well."""
    scores = []
    for key, value in right.items():
        entailed = [
            other_key for other_key in questions[key]["entailed"] if other_key != key and other_key in predictions
        ]
        if value and entailed:
            scores.append(
                mean(float(predictions[other_key] == questions[other_key]["answer"]) for other_key in entailed)
            )
    return mean(scores) * 100


def _distribution(scored: Questions, predictions: Mapping[str, str]) -> float | None:
    """Chi-square between gold and predicted answers, weighted over global groups; groups in order of appearance."""
    gold: dict[str, dict[str, int]] = {}
    predicted: dict[str, dict[str, int]] = {}
    for key, question in scored.items():
        group = question["groups"]["global"]
        if group is not None:
            for counts, answer in ((gold, question["answer"]), (predicted, predictions[key])):
                of_group = counts.setdefault(group, {})
                of_group[answer] = of_group.get(answer, 0) + 1
    total, weight = 0.0, 0
    for group, expected in gold.items():
        chi = 0.0
        for answer, count in expected.items():
            chi += float(predicted[group].get(answer, 0) - count) ** 2 / count
        total += chi * sum(expected.values())
        weight += sum(expected.values())
    return total / weight / 100 if weight else None
