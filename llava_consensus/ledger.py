"""The account of a run: what its answers were given from, by analysis and as measured, side by side in metrics.json.

Everything follows from the answers on disk and the run's shape.json (sizes of the model, budget of the method), so
lost metrics are made again without weights. `account.py` has the formulas.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from llava_consensus.account import account, match
from llava_consensus.hosts.base import Host, Prefill, Prompt
from llava_consensus.tokens import Budget, Method, Shape

Record = dict[str, Any]
TYPICAL = 100  # prompts whose mean length stands for a run's when a budget is meant by its FLOPs


def settle(host: Host, method: Method, budget: Budget, by: str, asked: Iterable[tuple[Prompt, int]]) -> Record:
    """The sizes of the model and the budget the method is given so that it costs what `budget` says: JSON values.

    Args:
        by: see `account.match`.
        asked: prompts of the run with their numbers of pictures, in order; looked at for `flops` only.
    Raises:
        OptionError: where no budget does.
    """
    shape = host.shape()
    given = match(method, budget, _typical(host, shape, asked) if by == "flops" else shape, by)
    return {"shape": shape._asdict(), "match": by, "budget": {"tokens": given.tokens, "merged": given.merged}}


def _typical(host: Host, shape: Shape, asked: Iterable[tuple[Prompt, int]]) -> Shape:
    """The shape with the mean prompt of the first questions that have a picture."""
    seen = [
        (host.rows(prompt, pictures), pictures) for (prompt, pictures), _ in zip(asked, range(TYPICAL), strict=False)
    ]
    rows = [own for own, pictures in seen if pictures] or [(0, 0)]
    text, question = (round(sum(column) / len(rows)) for column in zip(*rows, strict=True))
    return shape._replace(text=text, question=question)


def given_budget(sheet: Record) -> Budget:
    """The budget the method is given."""
    return Budget(**sheet["budget"])


def of_answer(prefill: Prefill | None, pictures: int) -> Record:
    """What an answer's record says about its prefill."""
    if prefill is None or not prefill.entering:
        return {}
    counts = {"entering": prefill.entering[0], "kept": prefill.entering[-1]}
    average = sum(prefill.entering) / len(prefill.entering)
    rows = {"text": prefill.text, "question": prefill.question, "pictures": pictures}
    return {**rows, **counts, "average": average, "kv_bytes": list(prefill.kv_bytes)}


def of_run(method: Method, sheet: Record | None, answers: Sequence[Record]) -> Record | None:
    """Means per question; `measured` comes from the answers, the rest from the formulas. None where a host or an older
    version wrote down too little.

    A picture of fewer tiles than the model allows has fewer tokens than the formulas say: they are about the largest.
    """
    rows = [answer["metadata"] for answer in answers if "kv_bytes" in answer["metadata"]]
    if sheet is None or not rows or len(rows) != len(answers):
        return None
    shape, budget = Shape(**sheet["shape"]), given_budget(sheet)
    kinds = Counter((row["text"], row["question"], row["pictures"]) for row in rows)
    found = [
        (count, account(method, budget, shape._replace(text=text, question=question, pictures=pictures)).record())
        for (text, question, pictures), count in sorted(kinds.items())
    ]
    layers = [sum(column) / len(rows) for column in zip(*(row["kv_bytes"] for row in rows), strict=True)]
    measured = {name: _mean([(1, row[name]) for row in rows]) for name in ("entering", "kept", "average")}
    spent = {
        part: _mean([(n, one["flops"][part]) for n, one in found]) for part in ("llm", "vision", "method", "total")
    }
    notes = sorted({one["note"] for _, one in found if "note" in one})
    return {
        "match": sheet["match"],
        "budget": sheet["budget"],
        "text": _mean([(1, row["text"]) for row in rows]),
        **{name: _mean([(n, one[name]) for n, one in found]) for name in ("entering", "kept", "average")},
        "flops": spent,
        "kv_bytes": _mean([(n, one["kv_bytes"]) for n, one in found]),
        "measured": {**measured, "kv_bytes": sum(layers), "kv_bytes_per_layer": layers},
        **({"notes": notes} if notes else {}),
    }


def _mean(weighted: Sequence[tuple[int, float | None]]) -> float | None:
    """The mean of values with counts; None where one is not known."""
    known = [(count, value) for count, value in weighted if value is not None]
    if len(known) != len(weighted):
        return None
    return sum(count * value for count, value in known) / sum(count for count, _ in known)
