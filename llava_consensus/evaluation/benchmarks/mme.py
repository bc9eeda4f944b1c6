"""MME: 2,374 yes/no questions, two about each of 1,187 images, in ten tasks of perception and four of cognition.

Data: DATA/eval/MME; questions from LLaVA's eval.zip, images and right answers (`MME_Benchmark_release_version`) on
request from https://github.com/BradyFU/Awesome-Multimodal-Large-Language-Models (branch Evaluation; research only, no
licence stated); the right answers alone are also in its eval_tool (`eval_tool/Your_Results/<task>.txt`).
Asked as LLaVA does: vicuna_v1, greedy, at most 128 new tokens, one word or phrase.
Scored as the official tool does, equal to the last bit: acc + acc+ per task, which are 100 times the share of right
answers and 100 times the share of images with both questions right. The tool takes its lines two by two and never
compares the images' names; here every answer is joined by image and question, and a question file whose lines are
not two by two about one image is refused. Only images with both answers count. If no answer of a task is yes or no, the
tool stops; here the score is 0 and `unreadable` names the task. `export` writes the official results folder.
Must match: LLaVA-1.5-7B perception 1510.7 (https://arxiv.org/abs/2310.03744, table 4).
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question
from llava_consensus.evaluation.benchmarks.parsing import mme_word
from llava_consensus.evaluation.files import Record, read_text, write_out

RELEASE = "MME_Benchmark_release_version"
RESULTS = "eval_tool/Your_Results"
SOURCE = "github.com/BradyFU/Awesome-Multimodal-Large-Language-Models, branch Evaluation (on request)"
PLEASE = "Please answer yes or no."
FILES = (
    DataFile(
        "llava_mme.jsonl",
        base.LLAVA_EVAL_ZIP,
        "9f67707cb72d2a71df955d0dce84337f2f22eafe2ed473ca3e148c187ac360c5",
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


class Pair(NamedTuple):
    """The two questions about one image: their right answers, `yes` or `no`, and those given, also `other`."""

    right: Sequence[str]
    answers: Sequence[str]


class Gold(NamedTuple):
    file: str  # image's name with the ending .txt
    question: str
    label: str  # as spelled there


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
        """The questions in file order, known to be two by two about one image and to have right answers somewhere."""
        folder = self.place(data)
        questions = super().load(data)
        for first, second in zip(questions[::2], questions[1::2], strict=False):
            if first.question_id != second.question_id:
                raise DataError(
                    f"{folder / FILES[0].path}: lines {first.index + 1} and {second.index + 1} are about "
                    f"{first.question_id!r} and {second.question_id!r}; the official tool pairs them by position"
                )
        for task in dict.fromkeys(map(_task, questions)):
            places = (folder / RELEASE / task, folder / RESULTS / f"{task}.txt")
            if not places[0].is_dir() and not places[1].is_file():
                raise DataError(f"no right answers for {task}: neither {places[0]} nor {places[1]}\n    from {SOURCE}")
        return questions

    def together(self, question: Question) -> Hashable:
        return question.index // 2

    def read(self, path: Path, data: Path) -> list[Record]:
        """LLaVA's answers, or the official results folder: a file for each task, lines of four fields."""
        if not path.is_dir():
            return super().read(path, data)
        known = {(_task(one), _stem(str(one.question_id)), _cut(one.text)): one for one in self.load(data)}
        records = []
        for file in sorted(path.glob("*.txt")):
            for number, line in enumerate(read_text(file).splitlines(), start=1):
                fields = line.split("\t")
                if len(fields) != 4:
                    raise DataError(f"{file}, line {number}: {len(fields)} fields between tabs instead of 4")
                place = f"{file.stem}/{fields[0]}"
                question = known.get((file.stem, _stem(place), _cut(fields[1])))
                key, prompt = (question.question_id, question.text) if question else (place, fields[1])
                records.append({"question_id": key, "prompt": prompt, "text": fields[3]})
        if not records:
            raise DataError(f"{path}: no <task>.txt with answers in it: not the official results folder")
        return records

    def score(self, records: Sequence[Record], data: Path) -> dict[str, Any]:
        """`perception` (of 2000) and `cognition` (of 800), each task's acc, acc+ (percent) and score (of 200)."""
        questions = self.load(data)
        gold = _gold(self.place(data), questions)
        joined = base.join(records, questions, _key_of_question, _key_of_record)
        labels = {question.index: gold[question.index].label.lower() for question in questions}
        answers = {index: mme_word(record["text"]) for index, record in joined.answers.items()}
        tasks: dict[str, list[Pair]] = {}
        for question in questions[::2]:
            both = (question.index, question.index + 1)
            if all(index in answers for index in both):
                pair = Pair([labels[index] for index in both], [answers[index] for index in both])
                tasks.setdefault(_task(question), []).append(pair)
        numbers = evaluate(tasks)
        for task in numbers["tasks"].values():
            task |= {"acc": base.percent(task["acc"]), "acc_plus": base.percent(task["acc_plus"])}
        extracted = [
            {
                "index": index,
                "extracted": answer,
                "correct": answer == labels[index],
                "group": _task(questions[index]),
                "unit": questions[index].question_id,
            }
            for index, answer in answers.items()
        ]
        statistic = {"statistic": "mme", "counted": list(PERCEPTION)}
        unreadable = sum(answer == "other" for answer in answers.values())
        return base.report(self.name, joined, numbers | statistic, extracted, unreadable)

    def chance(self, questions: Sequence[Question], data: Path) -> float:
        """75 points for each task of perception with a whole image among the questions."""
        whole = {_task(second) for _, second in zip(questions[::2], questions[1::2], strict=False)}
        return 75.0 * len(whole.intersection(PERCEPTION))

    def export(self, records: Sequence[Record], data: Path, target: Path) -> dict[str, Any]:
        questions = self.load(data)
        gold = _gold(self.place(data), questions)
        answers, _, audit = base.join(records, questions, _key_of_question, _key_of_record)
        base.refuse_missing(audit, "the official tool pairs lines by position")
        files: dict[str, list[str]] = {}
        for question in questions:
            text = answers[question.index]["text"]
            if "\t" in text or "\n" in text:
                raise DataError(
                    f"the answer to {question.question_id!r} has a tab or a line feed in it, which breaks the line in "
                    f"two for the official tool: {text!r}"
                )
            files.setdefault(_task(question), []).append("\t".join((*gold[question.index], text)) + "\n")
        if target.exists() and not target.is_dir():
            raise DataError(f"--out {target}: is no folder, and the official tool reads a folder of files")
        target.mkdir(parents=True, exist_ok=True)
        for task, lines in files.items():
            write_out(target / f"{task}.txt", "".join(lines).encode())
        return audit | {"written": len(questions), "files": len(files)}


def _task(question: Question) -> str:
    return str(question.question_id).split("/")[0]


def _stem(name: str) -> str:
    """The name of an image without folders and endings, by which official lines know it."""
    return name.split("/")[-1].split(".")[0]


def _cut(prompt: str) -> str:
    """The bare question of a prompt, as LLaVA's converter finds it."""
    bare = prompt.replace(base.SHORT.strip(), "").strip() if base.SHORT.strip() in prompt else prompt
    return bare.removesuffix(PLEASE).strip()


def _key_of_question(question: Question) -> Hashable:
    return question.question_id, _cut(question.text)


def _key_of_record(record: Record) -> Hashable:
    prompt = record.get("prompt")
    if not isinstance(prompt, str):
        where = f"the answer to question_id {record['question_id']!r}"
        raise DataError(f"{where}: no prompt, which tells the two questions about an image apart")
    return record["question_id"], _cut(prompt)


def _gold(folder: Path, questions: Sequence[Question]) -> dict[int, Gold]:
    """The official line of every question, by its index."""
    lines = {task: _lines(folder, task) for task in dict.fromkeys(map(_task, questions))}
    gold = {}
    for question in questions:
        task, file = _task(question), _stem(str(question.question_id)) + ".txt"
        texts = [f"{_cut(question.text)}{space}{PLEASE}" for space in (" ", "  ")]
        text = next((text for text in texts if (file, text) in lines[task]), None)
        if text is None:
            raise DataError(
                f"line {question.index + 1} of {FILES[0].path}: {texts[0]!r} about {question.question_id} is not among "
                f"the official questions of {task}: another version? Get it: {SOURCE}"
            )
        gold[question.index] = Gold(file, text, lines[task][file, text])
    return gold


def _lines(folder: Path, task: str) -> dict[tuple[str, str], str]:
    """Right answers of one task by (file, question), from the release or, without it, from the evaluation tool."""
    release = folder / RELEASE / task
    texts = release / "questions_answers_YN" if (release / "images").is_dir() else release
    lines: dict[tuple[str, str], str] = {}
    for path in sorted(texts.glob("*.txt")) or [folder / RESULTS / f"{task}.txt"]:
        for number, line in enumerate(read_text(path).splitlines(), start=1):
            if path.parent == texts:
                file, fields = path.name, line.strip().split("\t")
            else:
                name, *fields = line.split("\t")
                file, fields = f"{name.split('.')[0]}.txt", fields[:2]
            try:
                question, label = fields
                ground_truth(label)
            except ValueError as error:
                message = f"{path}, line {number}: expected a question and yes or no between tabs ({error})"
                raise DataError(message) from error
            lines[file, question] = label
    return lines


def ground_truth(text: str) -> str:
    """A right answer: yes or no in any case; ValueError for anything else, a blank at its end included."""
    if text.lower() not in ("yes", "no"):
        raise ValueError(f"the right answer is {text!r}, which is neither yes nor no")
    return text.lower()


def score_task(pairs: Sequence[Pair]) -> dict[str, Any]:
    if not pairs:
        raise ValueError("no image in it")
    right = [[expected == answer for expected, answer in zip(pair.right, pair.answers, strict=True)] for pair in pairs]
    acc = sum(map(sum, right)) / (2 * len(pairs))
    acc_plus = sum(map(all, right)) / len(pairs)
    return {"acc": acc, "acc_plus": acc_plus, "score": acc * 100 + acc_plus * 100, "pictures": len(pairs)}


def evaluate(tasks: Mapping[str, Sequence[Pair]]) -> dict[str, Any]:
    """Totals over the tasks that are there, in the tool's order, and `tasks`; the total of none is None."""
    report: dict[str, Any] = {}
    scored = {}
    for part, names in PARTS.items():
        there = [name for name in names if tasks.get(name)]
        total = 0.0
        for name in there:
            scored[name] = score_task(tasks[name])
            total += scored[name]["score"]
        report[part] = total if there else None
    unreadable = [name for name in scored if all(answer == "other" for pair in tasks[name] for answer in pair.answers)]
    return report | {"tasks": scored, "unreadable": unreadable}
