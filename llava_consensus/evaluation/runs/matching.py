"""The budget a method is given so that it costs what the user's budget says, once the model's sizes are known.

    budget = budget_of(plan, host)

With `match="kept"`, the default, it is the user's budget as it is (`reduction.costs.match` says what the others mean).
"""

import logging
from collections.abc import Iterable
from itertools import islice

from llava_consensus.evaluation.runs.configuration import Plan
from llava_consensus.hosts import Host, Prompt
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.costs import match
from llava_consensus.reduction.method import Method, Shape

log = logging.getLogger(__name__)

TYPICAL = 100  # prompts whose mean length stands for a run's when a budget is meant by its FLOPs


def budget_of(plan: Plan, host: Host) -> Budget | Share:
    """The budget the plan's method is given on this model: all tokens of a picture where the method reduces nothing.

    Raises:
        OptionError: where no budget costs what the plan says.
    """
    available = shape_of(plan, host).available
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
    return match_budget(host, plan.method, plan.budget, plan.match, asked, shape_of(plan, host))


def shape_of(plan: Plan, host: Host) -> Shape:
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
    given = match(method, budget, _typical(host, shape, asked) if by == "flops" else shape, by)
    if given != budget:
        log.info("match=%s: the method is given tokens=%d for %d", by, given.tokens, budget.tokens)
    return given


def _typical(host: Host, shape: Shape, asked: Iterable[tuple[Prompt, int]]) -> Shape:
    """The shape with the mean prompt of those of the first questions that have a picture."""
    rows = [host.rows(prompt, pictures) for prompt, pictures in islice(asked, TYPICAL) if pictures] or [(0, 0)]
    text, question = (round(sum(column) / len(rows)) for column in zip(*rows, strict=True))
    return shape._replace(text=text, question=question)
