"""Open answers against ten references: the "EvalAI" normaliser of TextVQA and its consensus score.

Equal to the official evaluator to the last bit, oddities included: a mark between two words becomes a space, but
vanishes when a blank stands beside it anywhere in the text; only the first 32 periods are deleted; the number words
include "none". Used by `benchmarks/textvqa.py`; try it with
`python -c "from llava_consensus.evaluation.scorers.vqa_text import normalise; print(normalise('It is the one'))"`.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

from llava_consensus.evaluation.scorers import Score, mean

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


def tokenise(text: str) -> str:
    """Lower case, no commas or question marks, `'s` as a word of its own."""
    return text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()


def strip_marks(text: str, commas: re.Pattern[str] = _COMMAS_IN_NUMBER, periods: re.Pattern[str] = _LONE_PERIOD) -> str:
    """Every mark becomes a space, or nothing where it is used beside a blank; then lone periods go.

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


def score(prediction: str, references: Sequence[str]) -> Score:
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
