"""Parses answers: letters of options, yes or no, numbers, and texts made comparable. Texts in, values out.

Every function equals the official scorer of its benchmark to the last bit, oddities included.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

# Letters of options

LETTERS = ("A", "B", "C", "D", "E")
UNREAD = "FAILED"
_STATED = re.compile(r"The answer is ([A-Z]).")

NONE_FITS = "Z"  # MMBench: no option fits; never right
FAILED_CALL = "Failed to obtain answer via API"
REFUSALS = (  # of judges and closed models, as VLMEvalKit lists them
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)
_OPTION_MARKS = str.maketrans(dict.fromkeys(".()[],:;!*#{}", " "))


def sqa_letter(text: str) -> str:
    """The letter an answer states, or UNREAD: a lone letter, `A. text`, or exactly one `The answer is A.`"""
    if text in LETTERS:
        return text
    if len(text) >= 3 and text[0] in LETTERS and text[1:3] == ". ":
        return text[0]
    stated = _STATED.findall(text)
    return stated[0] if len(stated) == 1 else UNREAD


def option_index(letter: str, choices: int) -> int:
    """Position of a letter among the first `choices` options, -1 if it is none of them."""
    options = LETTERS[:choices]
    return options.index(letter) if letter in options else -1


def mmbench_option(answer: str, options: Mapping[str, Any]) -> str | None:
    """The letter an answer states (NONE_FITS: none of them), else the one option whose text it contains."""
    if FAILED_CALL not in answer:
        if any(sentence in answer for sentence in REFUSALS):
            return NONE_FITS
        pieces = set(answer.translate(_OPTION_MARKS).split())
        letters = [letter for letter in options if letter in pieces]
        if len(letters) == 1:
            return letters[0]
        if not letters and NONE_FITS in pieces:
            return NONE_FITS
    named = [letter for letter, text in options.items() if str(text).lower() in answer.lower()]
    return named[0] if len(named) == 1 else None


# Yes or no

POPE_NEGATIONS = frozenset(("No", "not", "no"))


def mme_word(answer: str) -> str:
    """`yes`, `no` or `other`: the whole answer, else yes before no among its first four characters; case is ignored."""
    text = answer.lower()
    if text in ("yes", "no"):
        return text
    return next((word for word in ("yes", "no") if word in text[:4]), "other")


def pope_word(text: str) -> str:
    """`no` if a negation is a word of the first sentence, else `yes`."""
    return "yes" if POPE_NEGATIONS.isdisjoint(_pope_words(text)) else "no"


def pope_can_use(text: str) -> bool:
    """True if an answer says the word that POPE's scorer takes it for. That scorer takes any other answer for a yes,
    and one with `not` ("I am not sure") for a no.
    """
    words = _pope_words(text)
    return not {"No", "no"}.isdisjoint(words) or (pope_word(text) == "yes" and "yes" in map(str.lower, words))


def _pope_words(text: str) -> list[str]:
    return text.partition(".")[0].replace(",", "").split(" ")


# Numbers

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def numbers(text: str, count: int) -> tuple[float, ...] | None:
    """The first `count` numbers of an answer; None if there are fewer."""
    found = tuple(float(one) for one in _NUMBER.findall(text)[:count])
    return found if len(found) == count else None


# Texts made comparable

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
    word[:i] + word[i + 1 :]: word for word in _APOSTROPHES.split() for i, mark in enumerate(word) if mark == "'"
} | {"let's": "let's", "she's": "she's", "somebody'd": "somebodyd"}
_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
NUMBERS = {word: str(number) for number, word in enumerate(_DIGITS)} | {"none": "0"}
ARTICLES = frozenset(("a", "an", "the"))
MARKS = ';/[]"{}()=+\\_-><@`,?!'
PERIODS_DELETED = 32

_LONE_PERIOD = re.compile(r"\.(?!\d)")
_COMMAS_IN_NUMBER = re.compile(r"(?<=\d),+(?=\d)")
_ASCII_LONE_PERIOD = re.compile(r"\.(?!\d)", re.ASCII)
_ASCII_COMMA_IN_NUMBER = re.compile(r"\d,\d", re.ASCII)
_EDGES = " \t.,;:!?\"'`()[]*"


def gqa_prediction(text: str) -> str:
    """LLaVA's step from an answer to a prediction: no final periods, lower case, nothing else."""
    return text.rstrip(".").lower()


def tokenise(text: str) -> str:
    """Lower case, no commas or question marks, `'s` as a separate word."""
    return text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()


def strip_marks(text: str, commas: re.Pattern[str] = _COMMAS_IN_NUMBER, periods: re.Pattern[str] = _LONE_PERIOD) -> str:
    """Replaces every punctuation mark by a space, or removes it if it is used beside a blank anywhere; then removes
    lone periods. `commas` in a number make all marks vanish without a space.
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


def flat(text: str) -> str:
    return text.replace("\n", " ").replace("\t", " ").strip()


@lru_cache(maxsize=1 << 16)
def normalise(text: str) -> str:
    """TextVQA's whole normaliser, applied to answers and references alike."""
    return unify_words(strip_marks(flat(tokenise(text))))


def vqav2_strip_marks(text: str) -> str:
    """As `strip_marks`, but all marks vanish only if a comma is between two ASCII digits."""
    return strip_marks(text, _ASCII_COMMA_IN_NUMBER, _ASCII_LONE_PERIOD)


def vqav2_unify_words(text: str) -> str:
    """As `unify_words`; lower case letter by letter, as Python 2.7 did it."""
    return unify_words(text.lower() if text.isascii() else "".join("i" if one == "İ" else one.lower() for one in text))


def plain(text: str) -> str:
    """Lower case, single spaces, no marks at either end."""
    return " ".join(text.lower().split()).strip(_EDGES)


def alternatives(reference: str) -> list[list[str]]:
    """The alternatives (`<OR>`) of a reference, each as the list of its parts (`<AND>`)."""
    lists = [[plain(part) for part in alternative.split("<AND>")] for alternative in reference.split("<OR>")]
    return [parts for parts in lists if all(parts)]


def contains(answer: str, reference: str) -> bool:
    """True if every part of one of the accepted texts occurs in the answer, as whole words."""
    text = plain(answer)
    # between characters other than Latin letters and digits: other scripts write no spaces between words
    return any(
        all(re.search(rf"(?<![a-z0-9]){re.escape(part)}(?![a-z0-9])", text) for part in parts)
        for parts in alternatives(reference)
    )
