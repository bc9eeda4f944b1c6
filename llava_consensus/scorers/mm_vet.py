"""MM-Vet: what the official evaluator asks its judge, what it reads out of a reply, and its two tables.

Equal to `mm-vet_evaluator.py` (yuweihao/MM-Vet, commit acde843) to the last bit: the fields of the message, the grade
in a reply, the rounds after an unreadable one, and the scores by capability and by exact set of capabilities, rounded
as numpy rounds. The texts of the prompt are not here (`llava_consensus/judge/prompts.py`).
Used by `benchmarks/mmvet.py` and `llava_consensus/judge`.
"""

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

JUDGE = "gpt-4-0613"  # the official judge
MAX_TOKENS = 3
TRIES = 5  # replies that are read; the one after them is not


class Turn(NamedTuple):
    """What to ask next: the message, with the reminder after an unreadable reply, at this temperature."""

    again: bool
    temperature: float


class Heard(NamedTuple):
    """A reply: its text (None: none came), and whether the server had refused it before, for its rate limit."""

    text: str | None
    limited: bool = False


class Grade(NamedTuple):
    """The judge's grade of one answer."""

    score: float  # 0..1; nan where the judge wrote nan
    content: str  # what it was read from; the raw last reply where none could be read
    read: bool  # False: no reply could be read, and the score is 0.0 by rule


def fields(question: str, truth: str, prediction: str) -> dict[str, str]:
    """The three cells of the message: `<AND>` and `<OR>` of the truth get spaces, nothing else is touched."""
    truth = truth.replace("<AND>", " <AND> ").replace("<OR>", " <OR> ")
    return {"question": question, "answer": truth, "prediction": prediction}


def read(reply: str | None) -> tuple[float, str] | None:
    """The grade in a reply and the text it was read from; None where the official code asks again."""
    if reply is None:
        return None
    first = reply.split(" ")[0].strip()
    try:
        score = float(first)
    except ValueError:
        return None
    return None if score > 1.0 or score < 0.0 else (score, first)


def grading() -> Generator[Turn, Heard, Grade]:
    """One answer's dialogue: yields what to ask, is sent what was heard, returns the grade.

    An unreadable reply is followed by the message with its reminder, warmer each time; the fifth such reply is not
    read. A rate limit starts the count of tries again, with the message and temperature reached.
    """
    turn, tries = Turn(again=False, temperature=0.0), 1
    heard = yield turn
    while True:
        if heard.limited:
            tries = 1
        elif turn.again:
            tries += 1
            turn = turn._replace(temperature=turn.temperature + 0.5)
        if tries > TRIES:
            return Grade(0.0, heard.text or "", read=False)
        found = read(heard.text)
        if found is not None:
            return Grade(*found, read=True)
        turn = turn._replace(again=True)
        heard = yield turn


def evaluate(
    capabilities: Mapping[str, Sequence[str]], grades: Mapping[str, Sequence[float]], runs: int = 1, decimals: int = 1
) -> dict[str, Any]:
    """Both tables, in percent.

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
    if not capabilities or runs < 1:
        raise ValueError("MM-Vet needs at least one sample and one run")
    groups = {key: ([*dict.fromkeys(names)], "_".join(sorted(set(names)))) for key, names in capabilities.items()}
    single = Counter(name for names, _ in groups.values() for name in names)
    joint = Counter(joined for _, joined in groups.values())
    sums = {name: np.zeros(runs) for name in single}
    joint_sums = {name: np.zeros(runs) for name in joint}
    total = np.zeros(runs)
    for key in (key for key in grades if key in groups):
        scores = np.array(grades[key][:runs], dtype=np.float64)
        names, joined = groups[key]
        for name in names:
            sums[name] += scores
        joint_sums[joined] += scores
        total += scores
    percents = total / len(capabilities) * 100
    return {
        "total": _round(percents.mean(), decimals),
        "std": _round(percents.std(), decimals),
        "runs": [_round(one, decimals) for one in percents],
        "capability": _means(sums, single, decimals),
        "integration": _means(joint_sums, joint, decimals),
    }


def _means(sums: Mapping[str, Any], counts: Counter[str], decimals: int) -> dict[str, float]:
    return {name: _round((sums[name] / count * 100).mean(), decimals) for name, count in counts.most_common()}


def _round(value: Any, decimals: int) -> float:
    return float(np.round(value, decimals))
