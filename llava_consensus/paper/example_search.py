"""Questions worth looking at: where the two signals disagree, and where both together gain or lose what one has.

Reads what `host.answer` reports of each picture; nothing is stored. `survey` asks many questions for one token each,
which is enough to know what is kept; `ask` gives the whole answers to a few.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor
from tqdm import tqdm

from llava_consensus.errors import ImageError, OptionError
from llava_consensus.evaluation.benchmarks import Question
from llava_consensus.evaluation.runs.configuration import Plan
from llava_consensus.evaluation.runs.encodings import EncodingCache, reader
from llava_consensus.hosts import Answer, Host
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.selection import top
from llava_consensus.reduction.tokens import Reduction

HALF = 0.5  # of a question's credit: from here on an answer counts as right


@dataclass(frozen=True)
class Surveyed:
    """What was kept for one question."""

    question: Question
    disagreement: float
    kept: frozenset[int]


def answers(
    plan: Plan, host: Host, method: Method, budget: Budget, questions: Sequence[Question], longest: int | None = None
) -> Iterator[tuple[Question, Answer]]:
    """Each question with its answer; one whose picture cannot be read is left out.

    Args:
        longest: bound on an answer's length in tokens; None is the plan's own.
    """
    files = [plan.pictures(question) for question in questions]
    cache = EncodingCache(host, files, reader(plan))
    with host.attach(method, budget):
        for question, paths in zip(questions, files, strict=True):
            (encoded,) = cache.fetch([paths])
            if not isinstance(encoded, ImageError):
                prompt = plan.prompt(question)
                prompt = replace(prompt, max_new_tokens=longest) if longest else prompt
                yield question, host.answer([encoded], [prompt])[0]


def survey(plan: Plan, host: Host, method: Method, budget: Budget, progress: bool = True) -> list[Surveyed]:
    """Every question about one picture, with how much its two signals disagree.

    Raises:
        OptionError: for a method or a model that has no two saliencies of one square picture.
    """
    questions = [question for question in plan.questions if len(question.images) == 1]
    found = []
    asked = answers(plan, host, method, budget, questions, longest=1)
    for question, answer in tqdm(asked, total=len(questions), unit="q", desc="looking", disable=not progress):
        reduction = reduction_of(answer)
        found.append(Surveyed(question, disagreement(reduction), frozenset(reduction.kept[0].tolist())))
    return found


def reduction_of(answer: Answer) -> Reduction:
    """The reduction of an answer's only picture.

    Raises:
        OptionError: for a picture that was not reduced as one square, or without both saliencies.
    """
    reductions = [reduction for outcome in answer.outcomes for _, reduction in outcome.reductions]
    if len(reductions) != 1 or reductions[0].vision is None or reductions[0].cross is None:
        raise OptionError(
            "examples: need one square picture with a vision and a cross saliency. Take --method consensusdrop, fewer "
            "tokens than the picture has, and a model without tiles"
        )
    return reductions[0]


def disagreement(reduction: Reduction) -> float:
    """1 less the overlap of the two sides' K best tokens, K the tokens that were kept."""
    count = reduction.kept.shape[1]
    vision, cross = (_best(side, count) for side in (reduction.vision, reduction.cross))
    return 1 - len(vision & cross) / count


def _best(saliency: Tensor | None, count: int) -> frozenset[int]:
    assert saliency is not None
    return frozenset(top(saliency, count)[0].tolist())


def most_disagreeing(found: Sequence[Surveyed], count: int) -> list[Question]:
    """The questions with the highest disagreement, of different pictures."""
    ranked = sorted(found, key=lambda one: (-one.disagreement, one.question.index))
    first_of_picture = {one.question.images: one for one in reversed(ranked)}
    return [one.question for one in ranked if first_of_picture[one.question.images] is one][:count]


def most_different_pair(found: Sequence[Surveyed]) -> list[Question]:
    """Two questions about one picture whose kept sets have least in common; none where no picture has two."""
    of_picture: dict[tuple[str, ...], list[Surveyed]] = {}
    for one in found:
        of_picture.setdefault(one.question.images, []).append(one)
    pairs = [pair for group in of_picture.values() for pair in combinations(group, 2)]
    if not pairs:
        return []
    best = min(pairs, key=lambda pair: len(pair[0].kept & pair[1].kept) / len(pair[0].kept))
    return [one.question for one in best]


def changed(single: Sequence[Mapping[int, float]], both: Mapping[int, float], gained: bool) -> list[int]:
    """Indices of questions that both signals together turned, first those on which both single ones agree.

    Args:
        single: credit of each question, 0 to 1, with vision alone and with the question alone.
        both: the same with both.
        gained: wrong with a single one and right with both; else right with a single one and wrong with both.
    """
    turned = []
    for index, credit in both.items():
        others = [one[index] >= HALF for one in single if index in one]
        if (credit >= HALF) == gained and others.count(not gained):
            turned.append((-others.count(not gained), index))
    return [index for _, index in sorted(turned)]


def plain(values: Tensor | None) -> list[float] | None:
    """One unit's saliencies as plain numbers."""
    return None if values is None else values[0].detach().to("cpu", torch.float64).tolist()
