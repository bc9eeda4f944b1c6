"""GQA, testdev-balanced: 12,578 questions on relations, attributes, categories and existence in 398 photographs.

Data: DATA/eval/gqa; questions from LLaVA's eval.zip, images and gold answers from
https://cs.stanford.edu/people/dorarad/gqa/download.html (annotations CC BY 4.0, Visual Genome pictures).
Asked as LLaVA does: vicuna_v1, greedy, at most 128 new tokens, one word or phrase.
Scored by exact match after LLaVA's conversion, with the official script's whole report.
Must match: LLaVA-1.5-7B 62.0 (https://arxiv.org/abs/2310.03744, table 3).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question, option
from llava_consensus.evaluation.files import Record, read_json
from llava_consensus.evaluation.scorers import gqa as scorer

FILES = (
    DataFile("llava_gqa_testdev_balanced.jsonl", base.LLAVA_EVAL_ZIP),
    DataFile("data/testdev_balanced_questions.json", "questions1.2.zip at cs.stanford.edu/people/dorarad/gqa"),
)
CHOICES = "data/testdev_balanced_choices.json"  # optional; not published for testdev, so validity is mostly absent
GOLD_FIELDS = ("question", "answer", "isBalanced", "types", "groups", "semantic")  # that are scored
STEP_FIELDS = ("operation", "argument")  # of an entry of `semantic`


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
        converted = {index: scorer.convert(record["text"]) for index, record in joined.answers.items()}
        predictions = {str(questions[index].question_id): text for index, text in converted.items()}
        choices = read_json(folder / CHOICES, kind=dict) if (folder / CHOICES).is_file() else None
        numbers = scorer.evaluate(gold, predictions, choices, consistency)
        numbers["official_lines"] = scorer.lines(numbers, consistency) if predictions else []
        for name, measured in (("validity", choices), ("plausibility", choices), ("consistency", consistency)):
            if not measured:
                del numbers[name]
        if consistency:
            entailed = {entailed_id for key in predictions for entailed_id in gold[key].get("entailed", ())}
            numbers["entailed_absent"] = len(entailed - predictions.keys())
        for table in scorer.TABLES:
            numbers[table] = {str(key): value for key, value in numbers[table].items()}
        extracted = [
            _extracted_row(index, text, gold[str(questions[index].question_id)]) for index, text in converted.items()
        ]
        result = base.report(self.name, joined, numbers, extracted)
        return result | {"complete": result["complete"] and not scorer.missing(gold, predictions)}


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
    """What is scored of each object of a gold file, equal ones and equal answers in memory once."""

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
