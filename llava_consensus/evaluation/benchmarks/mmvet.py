"""MM-Vet: 218 open questions on 200 images that need several capabilities at once, graded 0 to 1 by a judge model.

Data: DATA/eval/mm-vet; questions from LLaVA's eval.zip, `mm-vet.json` (answers and capabilities) and the images from
mm-vet.zip of https://github.com/yuweihao/MM-Vet (data CC BY-NC 4.0).
Asked as LLaVA does: vicuna_v1, greedy, at most 1024 new tokens, the bare question.
Scored by a judge (`llava-consensus judge mmvet`): mean grade, per capability, over runs. Without one, only by matches.
`export` writes the official result file.
Must match: LLaVA-1.5-7B 31.1 with gpt-4-0613 (https://arxiv.org/abs/2310.03744); that judge is gone, and today's give
the same answers other grades (LLaVA issue 1905: 27.9), so compare only numbers of one judge.
"""

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question
from llava_consensus.evaluation.files import Record, read_json, write_out

FILES = (
    DataFile("llava-mm-vet.jsonl", base.LLAVA_EVAL_ZIP),
    DataFile("mm-vet.json", "mm-vet.zip at github.com/yuweihao/MM-Vet/releases"),
)
GOLD_FIELDS = {"question": str, "answer": str, "capability": list}


@dataclass(frozen=True, kw_only=True)
class MMVet(Benchmark):
    name = "mmvet"
    title = "MM-Vet"
    line = "MM-Vet: open questions that need several capabilities, graded by a judge model"
    folder = "mm-vet"
    images = "images"
    files = FILES
    metric = "total"
    column = "mmvet"
    judge = "llava_consensus.evaluation.judge.mmvet:MMVetGrader"
    paper = 31.1
    count = 218
    max_new_tokens = 1024
    whole = "the official evaluator stops at the first of them"
    licence = "CC BY-NC 4.0; images from the web"

    def score_file(self, path: Path, data: Path) -> dict[str, Any]:
        """`score`, or of a finished grade file of the official evaluator the official tables, in percent."""
        grades = _grades(path)
        if grades is None:
            return super().score_file(path, data)
        questions = self.load(data)
        gold = self.gold(data, questions)
        capabilities = {key_of(one): gold[one.index]["capability"] for one in questions if key_of(one) in grades}
        if not capabilities:
            raise DataError(f"{path}: grades of other samples than those of {self.place(data)}")
        numbers = tables(capabilities, grades, min(len(grades[key]) for key in capabilities))
        counts = {"asked": len(gold), "graded": len(capabilities), "missing": len(gold) - len(capabilities)}
        return {"benchmark": self.name, **numbers, "complete": not counts["missing"], "counts": counts}

    def scored_by(self, data: Path) -> str | None:
        return "a judge"

    def score(self, records: Sequence[Record], data: Path) -> dict[str, Any]:
        questions = self.load(data)
        references = {index: sample["answer"] for index, sample in self.gold(data, questions).items()}
        return base.judged_report(self.name, base.join(records, questions), references, ["total"])

    def export(self, records: Sequence[Record], data: Path, target: Path) -> dict[str, Any]:
        questions = self.load(data)
        joined = base.join(records, questions)
        texts = {key_of(questions[index]): record["text"] for index, record in joined.answers.items()}
        write_out(target, json.dumps(texts, indent=2).encode())
        return joined.audit | {"written": len(texts)}

    def gold(self, data: Path, questions: Sequence[Question]) -> Mapping[int, Any]:
        """Samples of `mm-vet.json` with every field that is used."""
        path = self.place(data) / FILES[1].path
        samples = base.check_entries(path, read_json(path, kind=dict), GOLD_FIELDS)
        for key, sample in samples.items():
            wrong = [name for name, kind in GOLD_FIELDS.items() if type(sample[name]) is not kind]
            if wrong:
                raise DataError(f"{path}, entry {key!r}: {', '.join(wrong)} of another type: not MM-Vet's file")
        keys = ((question, key_of(question)) for question in questions)
        found: Mapping[int, Any] = base.labels(path, keys, samples, FILES[1].source)
        return found


def _grades(path: Path) -> dict[str, Any] | None:
    """Scores by sample of the official evaluator's grade file; None for another file."""
    if path.is_file():
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(path.read_bytes())
            if isinstance(content, dict) and all(isinstance(one, dict) for one in content.values()):
                return {key: one["score"] for key, one in content.items()}
    return None


def key_of(question: Question) -> str:
    return f"v1_{question.question_id}"


def tables(
    capabilities: Mapping[str, Sequence[str]], grades: Mapping[str, Sequence[float]], runs: int = 1, decimals: int = 1
) -> dict[str, Any]:
    """Both official tables, in percent, rounded as numpy rounds.

    Args:
        capabilities: of every sample that counts, by id; a grade that is missing adds nothing to the sums.
        grades: of each sample, one per run, 0 to 1.
        runs: how many runs are read.
        decimals: the official default is one.
    Returns:
        `total`, `std`, `runs` (the rounded totals), `capability` and `integration` (sets joined by `_`, sorted).
    Raises:
        ValueError: no sample counts, so that nothing can be divided.
    """
    import numpy as np  # only now: lists of benchmarks need none of it

    if not capabilities or runs < 1:
        raise ValueError("MM-Vet needs at least one sample and one run")
    groups: dict[str, dict[str, set[str]]] = {"capability": {}, "integration": {}}
    for key, names in capabilities.items():
        for name in dict.fromkeys(names):
            groups["capability"].setdefault(name, set()).add(key)
        groups["integration"].setdefault("_".join(sorted(set(names))), set()).add(key)

    def percents(keys: Collection[str]) -> "np.ndarray":
        """Of each run, over these samples; summed in the order of the grades, as the official code does."""
        scores = (np.array(grades[key][:runs], dtype=np.float64) for key in grades if key in keys)
        total: np.ndarray = sum(scores, np.zeros(runs))
        return total / len(keys) * 100

    def rounded(value: "np.floating") -> float:
        return float(np.round(value, decimals))

    total = percents(capabilities)
    by_count = {table: sorted(of.items(), key=lambda group: -len(group[1])) for table, of in groups.items()}
    return {
        "total": rounded(total.mean()),
        "std": rounded(total.std()),
        "runs": [rounded(percent) for percent in total],
        **{table: {name: rounded(percents(keys).mean()) for name, keys in of} for table, of in by_count.items()},
    }
