"""TextVQA, validation 0.5.1: 5,000 questions on writing in 3,166 pictures, ten human answers each.

Data: DATA/eval/textvqa; questions (with OCR tokens) from LLaVA's eval.zip, annotations and pictures from
https://textvqa.org/dataset (CC BY 4.0; pictures from Open Images).
Asked as LLaVA does: vicuna_v1, greedy, at most 128 new tokens, reference OCR tokens in the prompt (`ocr=without`
leaves that line out, as LLaVA-1.6 was measured).
Scored by agreement with ten people after the "EvalAI" normaliser. In LLaVA's files question_id is the image id and
repeats, so an answer finds its annotation by image id and lower-cased question, cut out of its prompt.
Equal to the official evaluator to the last bit, oddities included: a mark between two words becomes a space, but
vanishes when a blank stands beside it anywhere in the text; only the first 32 periods are deleted; the number words
include "none".
Must match: LLaVA-1.5-7B 58.2 (https://arxiv.org/abs/2310.03744, table 3).
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from llava_consensus.errors import DataError
from llava_consensus.evaluation.benchmarks import base
from llava_consensus.evaluation.benchmarks.base import Benchmark, DataFile, Question, mean, option
from llava_consensus.evaluation.files import Record, read_json

OCR = "Reference OCR token: "
FILES = (
    DataFile(
        "llava_textvqa_val_v051_ocr.jsonl",
        base.LLAVA_EVAL_ZIP,
        "9f60db6fb89e369263ed676dc26b48d00d4a462e73f0930c09d23394e9dcf3a3",
    ),
    DataFile("TextVQA_0.5.1_val.json", "https://dl.fbaipublicfiles.com/textvqa/data/TextVQA_0.5.1_val.json"),
)
# A word list of the VQA evaluation (facts): each word is known by its spelling with any one apostrophe missing.
_APOSTROPHES = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've he's
how'd how'll how's I'd've I'm I've isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't
not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's
someone'd someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're
there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've
when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't
wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""
CONTRACTIONS = {
    word[:place] + word[place + 1 :]: word
    for word in _APOSTROPHES.split()
    for place, mark in enumerate(word)
    if mark == "'"
} | {"let's": "let's", "she's": "she's", "somebody'd": "somebodyd"}
_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NUMBERS = {word: str(number) for number, word in enumerate(_DIGITS)} | {"none": "0"}
ARTICLES = frozenset(("a", "an", "the"))
MARKS = ';/[]"{}()=+\\_-><@`,?!'
PERIODS_DELETED = 32

_LONE_PERIOD = re.compile(r"\.(?!\d)")
_COMMAS_IN_NUMBER = re.compile(r"(?<=\d),+(?=\d)")
_OCR_FIRST = re.compile("Question: (.*?) Short answer:", re.DOTALL)


class Score(NamedTuple):
    """One scored answer."""

    value: float  # 0..1
    extracted: str  # what was read out of the answer


@dataclass(frozen=True, kw_only=True)
class TextVQA(Benchmark):
    """Questions on writing in pictures, by agreement with ten people."""

    name = "textvqa"
    title = "TextVQA"
    line = "TextVQA validation: questions on writing in pictures, agreement with ten people"
    folder = "textvqa"
    images = "train_images"
    files = FILES
    metric = "accuracy"
    column = "textvqa"
    count = 5000
    max_new_tokens = 128
    licence = "CC BY 4.0; Open Images pictures"

    ocr: str = option("with", "without", line="reference OCR tokens in the prompt (LLaVA-1.5: with)", asks=True)

    @property
    def paper(self) -> float | None:
        """Published score, with the OCR tokens."""
        return 58.2 if self.ocr == "with" else None

    def load(self, data: Path) -> list[Question]:
        """The questions in file order, with or without the line of reference OCR tokens in the prompt."""
        questions = super().load(data)
        if self.ocr == "with":
            return questions
        return [replace(question, text=_without_ocr(question.text)) for question in questions]

    def references(self, data: Path) -> Mapping[int, str]:
        """The most frequent of a question's ten answers."""
        given = _references(self.place(data) / FILES[1].path)
        questions = super().load(data)
        known = {question.index: given.get(_key_of_question(question), []) for question in questions}
        return {index: max(answers, key=answers.count) for index, answers in known.items() if answers}

    def score(self, records: Sequence[Record], data: Path) -> dict[str, Any]:
        """Accuracy in percent over the answered questions; `correct` is the share of agreement, 0 to 1."""
        questions = super().load(data)
        path = self.place(data) / FILES[1].path
        references = _references(path)
        joined = base.join(records, questions, _key_of_question, _key_of_record)
        scores: dict[int, Score] = {}
        for index, record in joined.answers.items():
            key = _key_of_question(questions[index])
            if key not in references:
                raise DataError(
                    f"{path} has no question {key!r} (line {index + 1} of {FILES[0].path}): another version?"
                )
            scores[index] = score_answer(record["text"], references[key])
        accuracy = base.percent(mean(score.value for score in scores.values())) if scores else None
        extracted = [
            {"index": index, "extracted": score.extracted, "correct": score.value} for index, score in scores.items()
        ]
        return base.report(self.name, joined, {"accuracy": accuracy}, extracted)


def _without_ocr(text: str) -> str:
    return "\n".join(line for line in text.split("\n") if not line.startswith(OCR))


def _key_of_question(question: Question) -> Hashable:
    return question.question_id, _cut(question.text, f"{FILES[0].path}, line {question.index + 1}")


def _key_of_record(record: Record) -> Hashable:
    prompt = record.get("prompt")
    where = f"the answer to question_id {record['question_id']!r}"
    if not isinstance(prompt, str):
        raise DataError(f"{where}: no prompt, which tells the questions of one picture apart")
    return record["question_id"], _cut(prompt, where)


def _cut(prompt: str, where: str) -> str:
    try:
        return question_of(prompt)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error


def _references(path: Path) -> dict[Hashable, list[str]]:
    """Ten answers by (image id, lower-cased question); of two entries with one key the later counts."""
    rows = read_json(path, kind=dict).get("data")
    if not isinstance(rows, list):
        raise DataError(f"{path}: no list 'data': not a TextVQA annotation file")
    references: dict[Hashable, list[str]] = {}
    for number, row in enumerate(rows, start=1):
        try:
            answers = [str(answer) for answer in row["answers"]]
            references[row["image_id"], row["question"].lower()] = answers
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}, entry {number} of data: no image_id, question and answers") from error
        if len(answers) != 10:
            raise DataError(f"{path}, entry {number} of data: {len(answers)} answers instead of 10")
    return references


# Scoring: texts in, numbers out.


def tokenise(text: str) -> str:
    """Lower case, no commas or question marks, `'s` as a word of its own."""
    return text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()


def strip_marks(text: str, commas: re.Pattern[str] = _COMMAS_IN_NUMBER, periods: re.Pattern[str] = _LONE_PERIOD) -> str:
    """Replaces every punctuation mark by a space, or removes it where it is used beside a blank; then removes lone
    periods.

    `commas` in a number make all marks vanish without a space; `periods` are the lone ones.
    """
    in_number = commas.search(text) is not None
    result = text
    for mark in MARKS:
        vanish = in_number or f"{mark} " in text or f" {mark}" in text
        result = result.replace(mark, "" if vanish else " ")
    return periods.sub("", result, count=PERIODS_DELETED)


def unify_words(text: str) -> str:
    """Number words as digits, no articles, contractions with their apostrophes."""
    words = (NUMBERS.get(word, word) for word in text.lower().split())
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


@lru_cache(maxsize=1 << 16)
def normalise(text: str) -> str:
    """The whole normaliser, as the official evaluator applies it to answers and references alike."""
    flat = tokenise(text).replace("\n", " ").replace("\t", " ").strip()
    return unify_words(strip_marks(flat))


def consensus(answer: str, references: Sequence[str]) -> float:
    """Mean over references of min(1, others equal to `answer` / 3); all texts normalised already."""
    hits = [reference == answer for reference in references]
    matches = sum(hits)
    return mean(min(1, float(matches - hit) / 3) for hit in hits) if matches else 0.0


def score_answer(prediction: str, references: Sequence[str]) -> Score:
    """One answer against its ten references."""
    if len(references) != 10:
        raise ValueError(f"a question needs exactly 10 reference answers, got {len(references)}")
    answer = normalise(prediction)
    return Score(consensus(answer, [normalise(reference) for reference in references]), answer)


def question_of(prompt: str) -> str:
    """The question inside a prompt of LLaVA's (with or without OCR tokens), lower-cased."""
    lines = prompt.split("\n")
    if prompt.startswith("OCR tokens: "):
        match = _OCR_FIRST.search(prompt)
        question = match.group(1) if match else None
    elif "Reference OCR token: " in prompt and len(lines) == 3:
        question = lines[1 if prompt.startswith("Reference OCR token:") else 0]
    else:
        question = lines[0] if len(lines) == 2 else None
    if question is None:
        raise ValueError(f"no question found in the prompt {prompt[:80]!r}: not one of LLaVA's TextVQA forms")
    return question.lower()
