"""Time to the first token, and what the reduction itself costs: measured interleaved, in one process, as medians.

`python eval_scripts/first_token.py` prints the table. The clock runs from the picture in memory to the first token's
text, vision tower included, so nothing is hidden before the first forward. Compare numbers of one call with each other,
never across calls.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from PIL.Image import Image

from llava_consensus.hosts.base import Host, Prompt
from llava_consensus.tokens import Budget, Method

Side = tuple[Method, Budget]


class FirstToken(NamedTuple):
    """Medians of one side, in milliseconds."""

    total: float  # picture to first token
    stages: dict[str, float]  # what the reduction spent, by stage; empty for the full model

    def share(self) -> float:
        """Share of the time to the first token that the reduction takes, host bookkeeping included."""
        return sum(self.stages.values()) / self.total


def first_token(
    host: Host, pictures: Sequence[Image], prompt: Prompt, sides: Sequence[Side], repeats: int = 5
) -> list[FirstToken]:
    """Times every side on every picture in turn, after one round that does not count.

    Args:
        pictures: asked one by one, each put through the vision tower again.
        sides: method and budget of each.
        repeats: rounds.
    Returns:
        One FirstToken for each side, medians over rounds and pictures.
    """
    first = replace(prompt, max_new_tokens=1)
    totals: list[list[float]] = [[] for _ in sides]
    stages: list[list[dict[str, float]]] = [[] for _ in sides]
    for round_number in range(repeats + 1):
        for picture in pictures:
            for index, (method, budget) in enumerate(sides):
                with host.attach(method, budget) as attached:
                    start = time.perf_counter()
                    host.answer([host.encode([picture])], [first])
                    spent = time.perf_counter() - start
                if round_number:
                    totals[index].append(1e3 * spent)
                    stages[index].append(attached.milliseconds())
    return [FirstToken(statistics.median(t), _medians(s)) for t, s in zip(totals, stages, strict=True)]


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Median of each stage."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}
