"""What a budget means on a model, and what each answer costs, by analysis and as measured.

The record of every answer carries its own costs, written where the model is loaded; those of a run are means over
answers (`metrics.py`), so lost metrics are made again without weights, and several workers end with what one ends with.
The formulas are those of `reduction/costs.py` (docs/accounting.md).
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from llava_consensus.evaluation.files import Record
from llava_consensus.evaluation.models import Host, Prompt
from llava_consensus.evaluation.models.base import Prefill
from llava_consensus.evaluation.runs.configuration import RunPlan
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.costs import account, match
from llava_consensus.reduction.method import Method, Shape

log = logging.getLogger(__name__)

COUNTS = ("entering", "kept", "average")
TYPICAL = 100  # prompts whose mean length stands for a run's when a budget is meant by its FLOPs


def budget_of(plan: RunPlan, host: Host) -> Budget | Share:
    """The budget the plan's method is given on this model: all tokens of a picture where the method reduces nothing.

    Raises:
        OptionError: where no budget costs what the plan says.
    """
    shape = shape_of(plan, host)
    available = shape.available
    if plan.budget is None:
        return Budget(available)
    if isinstance(plan.budget, Share):
        return plan.budget
    if plan.budget.tokens >= available:
        log.info(
            "tokens=%d: this model has %d visual tokens per image, so this is the full model",
            plan.budget.tokens,
            available,
        )
    asked = ((plan.prompt(question), plan.shown(question)) for question in plan.questions)
    return match_budget(host, plan.method, plan.budget, plan.match, asked, shape)


def shape_of(plan: RunPlan, host: Host) -> Shape:
    """Sizes of the model with a prompt of what a question shows: a picture of the most tiles, or a clip of frames."""
    shape = host.shape()
    return shape._replace(tiles=plan.benchmark.frames) if plan.clips else shape


def match_budget(
    host: Host,
    method: Method,
    budget: Budget,
    by: str,
    asked: Iterable[tuple[Prompt, int]],
    shape: Shape | None = None,
) -> Budget:
    """The budget with which a method costs what `budget` says.

    Args:
        by: see `reduction.costs.match`.
        asked: prompts of the run with their numbers of pictures, in order; looked at for `flops` only.
        shape: of a prompt, see `shape_of`; None is that of the model's largest picture.
    Raises:
        OptionError: where no budget does.
    """
    shape = shape or host.shape()
    if by == "flops":  # of the mean prompt of those of the first questions that have a picture
        rows = [host.rows(prompt, pictures) for prompt, pictures in islice(asked, TYPICAL) if pictures] or [(0, 0)]
        text, question = (round(sum(column) / len(rows)) for column in zip(*rows, strict=True))
        shape = shape._replace(text=text, question=question)
    given = match(method, budget, shape, by)
    if given != budget:
        log.info("match=%s: the method is given tokens=%d for %d", by, given.tokens, budget.tokens)
    return given


@dataclass(frozen=True)
class AnswerCosts:
    """Counts what answers cost that one model gives with one method and budget.

    A picture of fewer tiles than the model allows has fewer tokens than the formulas say: they are about the largest.
    """

    method: Method
    budget: Budget | Share  # that the method is given
    shape: Shape

    def of(self, prefill: Prefill | None, pictures: int, tokens: Sequence[int] = ()) -> Record:
        """The entry `account` of an answer's metadata; nothing where the host does not tell what it read.

        Args:
            prefill: what was read.
            pictures: of the prompt.
            tokens: what a share comes to for each picture; their mean is what the formulas are given.
        """
        if prefill is None or not prefill.entering:
            return {}
        budget = Budget(round(sum(tokens) / len(tokens))) if tokens else self.budget.of(self.shape.available)
        analytic = _analytic(self.method, budget, self.shape, prefill.text, prefill.question, pictures)
        average = sum(prefill.entering) / len(prefill.entering)
        measured = dict(zip(COUNTS, (prefill.entering[0], prefill.entering[-1], average), strict=True))
        rows = {"tokens": budget.tokens, "text": prefill.text, "question": prefill.question}
        return {"account": {**rows, **analytic, "measured": {**measured, "kv_bytes": list(prefill.kv_bytes)}}}


@lru_cache(maxsize=4096)
def _analytic(method: Method, budget: Budget, shape: Shape, text: int, question: int, pictures: int) -> Record:
    shape = shape._replace(text=text, question=question, pictures=pictures)
    return account(method, budget, shape).record()
