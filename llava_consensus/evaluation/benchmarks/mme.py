"""MME: 2,374 yes/no questions, two about each of 1,187 images, in ten tasks of perception and four of cognition.

Data: DATA/eval/MME; questions from LLaVA's eval.zip, images and right answers (`MME_Benchmark_release_version`) on
request from https://github.com/BradyFU/Awesome-Multimodal-Large-Language-Models (branch Evaluation; research only, no
licence stated); only the right answers are also in its eval_tool (`eval_tool/Your_Results/<task>.txt`).
Asked as LLaVA does: vicuna_v1, greedy, at most 128 new tokens, one word or phrase.
Scored as the official tool does, equal to the last bit: acc + acc+ per task, which are 100 times the share of right
answers and 100 times the share of images with both questions right. The tool takes its lines two by two and never
compares the images' names; here every answer is joined by image and question, and a question file whose lines are
not two by two about one image is refused. Only images with both answers count. If no answer of a task is yes or no, the
tool stops; here the score is 0 and `unreadable` names the task. LLaVA's `convert_answer_to_mme.py` makes the official
results folder of answers.jsonl.
Must match: LLaVA-1.5-7B perception 1510.7 (https://arxiv.org/abs/2310.03744, table 4).
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question
from llava_consensus.evaluation.benchmarks.parsing import mme_word
from llava_consensus.evaluation.files import Record, read_text

RELEASE = "MME_Benchmark_release_version"
RESULTS = "eval_tool/Your_Results"
SOURCE = "github.com/BradyFU/Awesome-Multimodal-Large-Language-Models, branch Evaluation (on request)"
PLEASE = "Please answer yes or no."
FILES = (
    DataFile(
        "llava_mme.jsonl", base.LLAVA_EVAL_ZIP, "9f67707cb72d2a71df955d0dce84337f2f22eafe2ed473ca3e148c187ac360c5"
    ),
    DataFile(RELEASE, SOURCE, optional=True),  # images and right answers
    DataFile(RESULTS, SOURCE, optional=True),  # only right answers
)
PERCEPTION = (
    *("existence", "count", "position", "color", "posters"),
    *("celebrity", "scene", "landmark", "artwork", "OCR"),
)
COGNITION = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")
PARTS = {"perception": PERCEPTION, "cognition": COGNITION}


@dataclass(frozen=True, kw_only=True)
class MME(Benchmark):
    name = "mme"
    title = "MME"
    line = "MME: yes or no, twice about each image; acc + acc+ over ten tasks of perception"
    folder = "MME"
    images = RELEASE
    files = FILES
    metric = "perception"
    scale = 20.0
    guess = 75.0 * len(PERCEPTION)  # of a task, half of the questions and a quarter of the images
    column = "mme_perception"
    paper = 1510.7
    count = 2374
    max_new_tokens = 128
    licence = "none stated: research only, images on request"

    def load(self, data: Path) -> list[Question]:
        """The questions in file order, known to be two by two about one image."""
        folder = self.place(data)
        questions = super().load(data)
        for first, second in zip(questions[::2], questions[1::2], strict=False):
            if first.question_id != second.question_id:
                raise DataError(
                    f"{folder / FILES[0].path}: lines {first.index + 1} and {second.index + 1} are about "
                    f"{first.question_id!r} and {second.question_id!r}; the official tool pairs them by position"
                )
        return questions

    def together(self, question: Question) -> Hashable:
        return question.index // 2

    def key_of_question(self, question: Question) -> Hashable:
        return question.question_id, _cut(question.text)

    def key_of_record(self, record: Record) -> Hashable:
        prompt = record.get("prompt")
        if not isinstance(prompt, str):
            where = f"the answer to question_id {record['question_id']!r}"
            raise DataError(f"{where}: no prompt, which tells the two questions about an image apart")
        return record["question_id"], _cut(prompt)

    def gold(self, data: Path, questions: Sequence[Question]) -> Mapping[int, str]:
        """The right answer to every question, found by image and question among the official lines of its task."""
        lines = {task: _lines(self.place(data), task) for task in dict.fromkeys(map(_task, questions))}
        found = {}
        for question in questions:
            task, key = _task(question), (_stem(str(question.question_id)), _cut(question.text))
            if key not in lines[task]:
                raise DataError(
                    f"line {question.index + 1} of {FILES[0].path}: {key[1]!r} about {question.question_id} is not "
                    f"among the official questions of {task}: another version? Get it: {SOURCE}"
                )
            found[question.index] = lines[task][key]
        return found

    def grade(self, text: str, question: Question, gold: str) -> Record:
        word = mme_word(text)
        return {"extracted": word, "correct": word == gold, "group": _task(question), "unit": question.question_id}

    def readable(self, text: str, row: Record) -> bool:
        return bool(row["extracted"] != "other")

    def totals(self, rows: Sequence[Record]) -> Record:
        """`perception` (of 2000) and `cognition` (of 800) over the tasks that are there, in the tool's order, and each
        task's acc, acc+ (percent) and score (of 200). Only images with both answers count. No task: None.
        """
        units: dict[str, dict[Any, list[Record]]] = {}
        for row in rows:
            units.setdefault(row["group"], {}).setdefault(row["unit"], []).append(row)
        report: dict[str, Any] = {}
        tasks: dict[str, dict[str, float]] = {}
        unreadable = []
        for part, names in PARTS.items():
            report[part] = None
            for name in names:
                pairs = [pair for pair in units.get(name, {}).values() if len(pair) == 2]
                if not pairs:
                    continue
                acc = sum(row["correct"] for pair in pairs for row in pair) / (2 * len(pairs)) * 100
                acc_plus = sum(all(row["correct"] for row in pair) for pair in pairs) / len(pairs) * 100
                tasks[name] = {"acc": acc, "acc_plus": acc_plus, "score": acc + acc_plus, "pictures": len(pairs)}
                report[part] = (report[part] or 0.0) + tasks[name]["score"]
                if all(row["extracted"] == "other" for pair in pairs for row in pair):
                    unreadable.append(name)
        return report | {"tasks": tasks, "unreadable": unreadable, "statistic": "mme", "counted": list(PERCEPTION)}

    def chance(self, questions: Sequence[Question], data: Path) -> float:
        """75 points for each task of perception with a whole image among the questions."""
        whole = {_task(second) for _, second in zip(questions[::2], questions[1::2], strict=False)}
        return 75.0 * len(whole.intersection(PERCEPTION))


def _task(question: Question) -> str:
    return str(question.question_id).split("/")[0]


def _stem(name: str) -> str:
    """The name of an image without folders and endings, by which official lines know it."""
    return name.split("/")[-1].split(".")[0]


def _cut(prompt: str) -> str:
    """The bare question of a prompt, as LLaVA's converter finds it."""
    bare = prompt.replace(base.SHORT.strip(), "").strip() if base.SHORT.strip() in prompt else prompt
    return bare.removesuffix(PLEASE).strip()


def _lines(folder: Path, task: str) -> dict[tuple[str, str], str]:
    """Right answers, `yes` or `no`, of a task by image and question, from the release or the evaluation tool."""
    release = folder / RELEASE / task
    texts = release / "questions_answers_YN" if (release / "images").is_dir() else release
    lines: dict[tuple[str, str], str] = {}
    for path in sorted(texts.glob("*.txt")) or [folder / RESULTS / f"{task}.txt"]:
        for number, line in enumerate(read_text(path).splitlines(), start=1):
            fields = [path.name, *line.strip().split("\t")] if path.parent == texts else line.split("\t")[:3]
            if len(fields) != 3 or fields[2].lower() not in ("yes", "no"):
                raise DataError(f"{path}, line {number}: expected a question and yes or no between tabs")
            lines[_stem(fields[0]), _cut(fields[1])] = fields[2].lower()
    return lines
