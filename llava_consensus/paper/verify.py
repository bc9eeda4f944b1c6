"""Checks that a model with all tokens reaches its published score, within the sampling error of these questions."""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import TYPE_CHECKING

from llava_consensus.errors import DataError
from llava_consensus.evaluation.report.rows import Row
from llava_consensus.evaluation.report.section import half
from llava_consensus.evaluation.report.table import ABSENT, Table, decimal

HEAD = ("benchmark", "questions (images)", "ours", "published", "± at all questions", "verdict")
if TYPE_CHECKING:
    from llava_consensus.evaluation.benchmarks import Benchmark

ROUNDED = 0.05  # a published score has one decimal


def expected(benchmark: "Benchmark") -> str:
    """Half of the 95 % interval of the published score at all questions, 1,000 and 300, if they are independent."""
    assert benchmark.paper is not None and benchmark.count
    share, unit = benchmark.paper / benchmark.scale / 100, 100 * benchmark.scale
    halves = (1.96 * unit * sqrt(share * (1 - share) / count) for count in (benchmark.count, 1000, 300))
    return ", ".join(f"{half:.1f}" for half in halves)


def verify_table(runs: Sequence[Row], published: Mapping[str, float], counts: Mapping[str, int | None]) -> Table:
    """A line for each run with all tokens; `counts`: questions of each whole benchmark. DataError, with the table, if a
    published score is outside the interval of its run.
    """
    lines, wrong = [], []
    for run in runs:
        name, wanted, score = run.benchmark, published.get(run.benchmark), run.score
        verdict, at_all = "nothing published", ABSENT
        if wanted is not None and score is not None and run.bounds is not None:
            low, high = run.bounds
            same = low - ROUNDED <= wanted <= high + ROUNDED
            verdict = "as published" if same else "differs"
            wrong += [] if same else [f"{name} {score:.1f}{half(run.bounds)}, published {wanted:.1f}"]
            asked = (run.metrics or {})["questions"]
            if count := counts.get(name):
                at_all = f"{(high - low) / 2 * sqrt(asked / max(count, asked)):.1f}"
        elif wanted is not None:
            verdict = "no interval: too few images, or not scored here"
        ours = decimal(score) + half(run.bounds)
        asked = f"{(run.metrics or {}).get('questions')} ({run.images})"
        lines.append((run.facts.title, asked, ours, decimal(wanted), at_all, verdict))
    note = "Ours ± half of the 95 % interval from resampled images; as published: within it."
    table = Table("All tokens against published scores", HEAD, {"": lines}, note)
    if wrong:
        raise DataError(
            f"{'; '.join(wrong)}: judge no method by this model before prompts, files and weights are the published "
            "ones (llava-consensus data check, model check)"
        )
    return table
