"""GQA, testdev-balanced: 12,578 questions on relations, attributes, categories and existence in 398 photographs.

Data: DATA/eval/gqa; questions from LLaVA's eval.zip, images and gold answers from
https://cs.stanford.edu/people/dorarad/gqa/download.html (annotations CC BY 4.0, Visual Genome pictures).
Asked as LLaVA does: vicuna_v1, greedy, at most 128 new tokens, one word or phrase.
Scored by exact match after LLaVA's conversion, with the official script's whole report.
Equal to the script to the last bit: accuracy, binary and open, validity and plausibility (with a choices file),
consistency (when asked), distribution, and accuracy per structural type, semantic type, reasoning steps and words.
Must match: LLaVA-1.5-7B 62.0 (https://arxiv.org/abs/2310.03744, table 3).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question, mean, option
from llava_consensus.evaluation.files import Record, read_json

FILES = (
    DataFile("llava_gqa_testdev_balanced.jsonl", base.LLAVA_EVAL_ZIP),
    DataFile("data/testdev_balanced_questions.json", "questions1.2.zip at cs.stanford.edu/people/dorarad/gqa"),
)
CHOICES = "data/testdev_balanced_choices.json"  # optional; not published for testdev, so validity is mostly absent
GOLD_FIELDS = ("question", "answer", "isBalanced", "types", "groups", "semantic")  # that are scored
STEP_FIELDS = ("operation", "argument")  # of an entry of `semantic`
Questions = Mapping[str, Mapping[str, Any]]
COMMON_CHOICES = ("color", "material", "shape")
HIDDEN_STEPS = ("exist", "query: name", "choose name")
TABLES = {
    "accuracyPerStructuralType": "structural type",
    "accuracyPerSemanticType": "semantic type",
    "accuracyPerSteps": "steps number",
    "accuracyPerLength": "words number",
}


@dataclass(frozen=True, kw_only=True)
class GQA(Benchmark):
    """Compositional questions on photographs, by exact match."""

    name = "gqa"
    title = "GQA"
    line = "GQA testdev-balanced: compositional questions, exact match"
    folder = "gqa"
    images = "data/images"
    files = FILES
    metric = "accuracy"
    result_keys = ("questionId", "prediction")
    column = "gqa"
    paper = 62.0
    count = 12578
    max_new_tokens = 128
    licence = "annotations CC BY 4.0; Visual Genome pictures"

    consistency: str = option("no", "yes", line="of answers to questions that entail each other")

    def references(self, data: Path) -> Mapping[int, str]:
        questions = self.load(data)
        gold = _gold(self.place(data) / FILES[1].path, questions)
        return {question.index: gold[str(question.question_id)]["answer"] for question in questions}

    def score(self, records: Sequence[Record], data: Path) -> dict[str, Any]:
        """The official report over the answered questions; `complete` says whether those are all.

        `consistency` needs entailed questions, which the balanced tier mostly lacks: those absent are left out and
        counted in `entailed_absent`, where the official script stops. `official_lines` is what that script prints.
        """
        folder, consistency = self.place(data), self.consistency == "yes"
        questions = self.load(data)
        gold = _gold(folder / FILES[1].path, questions)
        joined = base.join(records, questions)
        converted = {index: convert(record["text"]) for index, record in joined.answers.items()}
        predictions = {str(questions[index].question_id): text for index, text in converted.items()}
        choices = read_json(folder / CHOICES, kind=dict) if (folder / CHOICES).is_file() else None
        numbers = evaluate(gold, predictions, choices, consistency)
        numbers["official_lines"] = lines(numbers, consistency) if predictions else []
        for name, measured in (("validity", choices), ("plausibility", choices), ("consistency", consistency)):
            if not measured:
                del numbers[name]
        if consistency:
            entailed = {entailed_id for key in predictions for entailed_id in gold[key].get("entailed", ())}
            numbers["entailed_absent"] = len(entailed - predictions.keys())
        for table in TABLES:
            numbers[table] = {str(key): value for key, value in numbers[table].items()}
        extracted = [
            _extracted_row(index, text, gold[str(questions[index].question_id)]) for index, text in converted.items()
        ]
        result = base.report(self.name, joined, numbers, extracted)
        return result | {"complete": result["complete"] and not missing(gold, predictions)}


def _extracted_row(index: int, text: str, gold: Record) -> dict[str, Any]:
    """One answer as it was read; its group is the question's structural type."""
    group = gold["types"].get("structural")
    return {"index": index, "extracted": text, "correct": text == gold["answer"], "group": group}


def _gold(path: Path, questions: Sequence[Question]) -> dict[str, Any]:
    """The gold file, known to have every question that is asked and every field that is scored."""
    gold = read_json(path, kind=dict, of_object=_Scored())
    for key, entry in gold.items():
        absent = [name for name in GOLD_FIELDS if not isinstance(entry, dict) or name not in entry]
        if absent:
            raise DataError(f"{path}: question {key!r} lacks {', '.join(absent)}: not a GQA question file")
    unknown = next((question for question in questions if question.question_id not in gold), None)
    if unknown is not None:
        raise DataError(
            f"{path} does not know question_id {unknown.question_id!r} (line {unknown.index + 1} of {FILES[0].path}): "
            f"another tier or version. Get it: {FILES[1].source}"
        )
    return gold


class _Scored:
    """Keeps the scored fields of each object of a gold file; equal objects and equal answers share memory."""

    def __init__(self) -> None:
        self.once: dict[Any, Any] = {}

    def __call__(self, entry: Record) -> Record:
        if "semantic" in entry and "isBalanced" in entry:
            return {name: self._shared(entry[name]) for name in (*GOLD_FIELDS, "entailed") if name in entry}
        if "operation" in entry:
            entry = {name: entry[name] for name in STEP_FIELDS if name in entry}
        plain = all(value is None or isinstance(value, str) for value in entry.values())
        return self.once.setdefault(tuple(entry.items()), entry) if plain else entry

    def _shared(self, value: Any) -> Any:
        return self.once.setdefault(value, value) if isinstance(value, str) else value


# Scoring: texts in, numbers out.


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
