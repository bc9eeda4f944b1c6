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
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question
from llava_consensus.evaluation.files import Record, read_json, write_out
from llava_consensus.evaluation.user_files import read_user_text

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

    def read(self, path: Path, data: Path) -> list[Record]:
        """LLaVA's answers, or an official result file: `v1_<question_id>` -> answer text."""
        whole = _whole(path)
        if whole is None:
            return super().read(path, data)
        ids = {key: key.removeprefix("v1_") for key in whole}
        return [
            {"question_id": int(ids[key]) if ids[key].isdecimal() else key, "text": text} for key, text in whole.items()
        ]

    def score_file(self, path: Path, data: Path) -> dict[str, Any]:
        """`score`, or of a finished grade file of the official evaluator the official tables, in percent."""
        whole = _whole(path) or {}
        if not whole or not all(isinstance(one, dict) and "score" in one for one in whole.values()):
            return super().score_file(path, data)
        gold = self.gold(data, self.load(data))
        graded = {key: one["score"] for key, one in whole.items() if key in gold}
        if not graded:
            raise DataError(f"{path}: grades of other samples than those of {self.place(data)}")
        runs = min(len(scores) for scores in graded.values())
        numbers = tables({key: gold[key]["capability"] for key in graded}, graded, runs)
        counts = {"asked": len(gold), "graded": len(graded), "missing": len(gold) - len(graded)}
        counts["unknown"] = len(whole) - len(graded)
        return {"benchmark": self.name, **numbers, "complete": not counts["missing"], "counts": counts}

    def scored_by(self, data: Path) -> str | None:
        return "a judge"

    def score(self, records: Sequence[Record], data: Path) -> dict[str, Any]:
        questions = self.load(data)
        gold = self.gold(data, questions)
        joined = base.join(records, questions)
        references = {index: gold[key_of(questions[index])]["answer"] for index in joined.answers}
        return base.judged_report(self.name, joined, references, ["total"])

    def export(self, records: Sequence[Record], data: Path, target: Path) -> dict[str, Any]:
        questions = self.load(data)
        joined = base.join(records, questions)
        texts = {key_of(questions[index]): record["text"] for index, record in joined.answers.items()}
        write_out(target, json.dumps(texts, indent=2).encode())
        return joined.audit | {"written": len(texts)}

    def gold(self, data: Path, questions: Sequence[Question]) -> Mapping[str, Mapping[str, Any]]:
        """`mm-vet.json`, known to have every question that is asked and every field that is used."""
        path = self.place(data) / FILES[1].path
        samples: dict[str, Any] = base.check_entries(path, read_json(path, kind=dict), GOLD_FIELDS)
        for key, sample in samples.items():
            wrong = [name for name, kind in GOLD_FIELDS.items() if type(sample[name]) is not kind]
            if wrong:
                raise DataError(f"{path}, entry {key!r}: {', '.join(wrong)} of another type: not MM-Vet's file")
        base.check_known(path, ((question, key_of(question)) for question in questions), samples, FILES[1].source)
        return samples


def _whole(path: Path) -> dict[str, Any] | None:
    """The content of a file that is one object by sample; None for a file of lines."""
    if path.is_file():
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(read_user_text(path))
            return content if isinstance(content, dict) and "question_id" not in content else None
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
    counts: dict[str, Counter[str]] = {"capability": Counter(), "integration": Counter()}
    sums: dict[tuple[str, str], np.ndarray] = {}  # by table and its column
    total = np.zeros(runs)
    columns = {}
    for key, names in capabilities.items():
        joined = "_".join(sorted(set(names)))
        columns[key] = [*(("capability", name) for name in dict.fromkeys(names)), ("integration", joined)]
        for table, name in columns[key]:
            counts[table][name] += 1
            sums.setdefault((table, name), np.zeros(runs))
    for key in (key for key in grades if key in columns):
        scores = np.array(grades[key][:runs], dtype=np.float64)
        for column in columns[key]:
            sums[column] += scores
        total += scores

    def rounded(value: "np.floating") -> float:
        return float(np.round(value, decimals))

    percents = total / len(capabilities) * 100
    return {
        "total": rounded(percents.mean()),
        "std": rounded(percents.std()),
        "runs": [rounded(percent) for percent in percents],
        **{
            table: {name: rounded((sums[table, name] / count * 100).mean()) for name, count in of.most_common()}
            for table, of in counts.items()
        },
    }
