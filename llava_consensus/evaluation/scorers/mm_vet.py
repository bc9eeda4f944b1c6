"""MM-Vet: the fields of the judge's message, the grade in its reply, and the two tables of the official evaluator.

Equal to `mm-vet_evaluator.py` (yuweihao/MM-Vet, commit acde843) to the last bit: scores by capability and by exact set
of capabilities are rounded as numpy rounds. The prompt, and the rounds after an unreadable reply, are in
`llava_consensus/evaluation/judge/mmvet.py`, which uses this.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


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
        "runs": [_round(percent, decimals) for percent in percents],
        "capability": _means(sums, single, decimals),
        "integration": _means(joint_sums, joint, decimals),
    }


def _means(sums: Mapping[str, np.ndarray], counts: Counter[str], decimals: int) -> dict[str, float]:
    return {name: _round((sums[name] / count * 100).mean(), decimals) for name, count in counts.most_common()}


def _round(value: np.floating, decimals: int) -> float:
    return float(np.round(value, decimals))
