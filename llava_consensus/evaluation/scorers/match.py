"""Matches that need no judge: exact, contained, and the same as another model's answer.

They stand beside a judge's number (MM-Vet, video QA): free, the same on every machine and date, and too strict for
long answers. Texts are compared in lower case, without marks around them and with single spaces; references may hold
MM-Vet's `<OR>` (one of them is enough) and `<AND>` (all of them are needed).
Used by `benchmarks/judged.py`.
"""

import re

_EDGES = " \t.,;:!?\"'`()[]*"


def plain(text: str) -> str:
    """Lower case, single spaces, no marks at either end."""
    return " ".join(text.lower().split()).strip(_EDGES)


def alternatives(reference: str) -> list[list[str]]:
    """The alternatives of a reference, each as the list of its parts, all of which an answer needs."""
    lists = [[plain(part) for part in alternative.split("<AND>")] for alternative in reference.split("<OR>")]
    return [parts for parts in lists if all(parts)]


def exact(answer: str, reference: str) -> bool:
    """Whether the whole answer is one of the accepted texts. A reference of several parts is met by no single one."""
    text = plain(answer)
    return any(parts == [text] for parts in alternatives(reference))


def contains(answer: str, reference: str) -> bool:
    """Whether every part of one of the accepted texts occurs in the answer, as whole words."""
    text = plain(answer)
    return any(all(_occurs(part, text) for part in parts) for parts in alternatives(reference))


def same(answer: str, other: str) -> bool:
    """Whether two answers read the same."""
    return plain(answer) == plain(other)


def _occurs(part: str, text: str) -> bool:
    """Latin letters and digits must not go on at either side; other scripts write no spaces between words."""
    return re.search(rf"(?<![a-z0-9]){re.escape(part)}(?![a-z0-9])", text) is not None
