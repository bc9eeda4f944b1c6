"""Questions worth looking at: where the two signals disagree, and where both together gain or lose what one has.

Reads what `runner.answer` reports of each picture; nothing is stored. `survey` asks many questions for one token each,
which is enough to know what is kept; `ask` gives the whole answers to a few.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from llava_consensus.errors import ImageError, OptionError
from llava_consensus.evaluation.benchmarks import Question
from llava_consensus.evaluation.benchmarks.base import LETTER, SHORT
from llava_consensus.evaluation.media import open_image
from llava_consensus.evaluation.models import Answer, Runner
from llava_consensus.evaluation.progress import counted
from llava_consensus.evaluation.runs.configuration import RunPlan
from llava_consensus.evaluation.runs.pictures import EncodingCache, reader
from llava_consensus.hosts.patches import patches
from llava_consensus.methods import make
from llava_consensus.paper.examples import BOTH, CROSS, VISION, Example, KeptPatches
from llava_consensus.reduction.budget import Budget
from llava_consensus.reduction.method import Method
from llava_consensus.reduction.selection import top
from llava_consensus.reduction.tokens import Reduction

WAYS = ("disagreement", "gained", "lost", "questions")
SIDES = {VISION: 1.0, CROSS: 0.0}  # alpha of ConsensusDrop
HALF = 0.5  # of a question's credit: from here on an answer counts as right


@dataclass(frozen=True)
class Surveyed:
    """Tokens kept for one question."""

    question: Question
    disagreement: float
    kept: frozenset[int]


def answers(
    plan: RunPlan,
    runner: Runner,
    method: Method,
    budget: Budget,
    questions: Sequence[Question],
    longest: int | None = None,
) -> Iterator[tuple[Question, Answer]]:
    """Each question with its answer; one whose picture cannot be read is left out.

    Args:
        longest: bound on an answer's length in tokens; None is the plan's own.
    """
    files = [plan.pictures(question) for question in questions]
    cache = EncodingCache(runner, files, reader(plan))
    with runner.attach(method, budget):
        for question, paths in zip(questions, files, strict=True):
            (encoded,) = cache.fetch([paths])
            if not isinstance(encoded, ImageError):
                prompt = plan.prompt(question)
                prompt = replace(prompt, max_new_tokens=longest) if longest else prompt
                yield question, runner.answer([encoded], [prompt])[0]


def survey(plan: RunPlan, runner: Runner, method: Method, budget: Budget) -> list[Surveyed]:
    """Every question about one picture, with how much its two signals disagree.

    Raises:
        OptionError: for a method or a model that has no two saliencies of one square picture.
    """
    questions = [question for question in plan.questions if len(question.images) == 1]
    found = []
    asked = answers(plan, runner, method, budget, questions, longest=1)
    for question, answer in counted(asked, total=len(questions), unit="q", desc="looking"):
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


def search(plan: RunPlan, runner: Runner, by: str, count: int, tokens: int) -> list[Question]:
    """The questions worth looking at, by one of WAYS; of `questions` two about one picture, else up to `count`."""
    if by in ("gained", "lost"):
        asked = [question for question in plan.questions if len(question.images) == 1]
        *single, both = (_right(plan, dict(answers(plan, runner, one, Budget(tokens), asked))) for one in _trio())
        by_index = {question.index: question for question in plan.questions}
        return [by_index[index] for index in changed(single, both, gained=by == "gained")[:count]]
    found = survey(plan, runner, make("consensusdrop"), Budget(tokens))
    return most_different_pair(found) if by == "questions" else most_disagreeing(found, count)


def examples(plan: RunPlan, runner: Runner, questions: Sequence[Question], budgets: Sequence[int]) -> list[Example]:
    """Each question with all tokens, and with vision alone, the question alone and both at every budget."""
    full = dict(answers(plan, runner, make("full"), Budget(runner.visual_tokens), questions))
    truths = plan.benchmark.references(plan.data)
    chosen: dict[Question, dict[str, list[KeptPatches]]] = {question: {} for question in questions}
    both: dict[Question, Answer] = {}
    for label, method in zip((*SIDES, BOTH), _trio(), strict=True):
        for tokens in budgets:
            answered = dict(answers(plan, runner, method, Budget(tokens), questions))
            right = _right(plan, answered)
            for question, answer in answered.items():
                credit = right.get(question.index)
                one = selection(runner, answer, tokens, None if credit is None else credit >= HALF)
                chosen[question].setdefault(label, []).append(one)
            both |= answered if label == BOTH else {}
    found = []
    for question in questions:
        (path,) = plan.pictures(question)
        reduction = reduction_of(both[question])
        found.append(
            Example(
                open_image(path, content=plan.content(path) if plan.content else None),
                side=round(runner.visual_tokens**0.5),
                question=" ".join(question.text.removesuffix(SHORT).removesuffix(LETTER).split()),
                truth=truths.get(question.index, ""),
                full=full[question].text,
                vision=plain(reduction.vision),
                cross=plain(reduction.cross),
                fused=plain(reduction.fused),
                selections=chosen[question],
                disagreement=disagreement(reduction),
            )
        )
    return found


def selection(runner: Runner, answer: Answer, tokens: int, right: bool | None = None) -> KeptPatches:
    """Patches kept and merged for an answer about one square picture."""
    found = patches(answer.outcomes[0], round(runner.visual_tokens**0.5), 0)
    kept = set(found.kept)
    merged = [place for place, slot in enumerate(found.owner) if slot >= 0 and place not in kept]
    return KeptPatches(tokens, found.kept, merged, answer.text, right)


def _trio() -> list[Method]:
    """Vision alone, the question alone, both."""
    return [*(make("consensusdrop", alpha=alpha) for alpha in SIDES.values()), make("consensusdrop")]


def _right(plan: RunPlan, answered: Mapping[Question, Answer]) -> dict[int, float]:
    """Correctness of each answer, 0 to 1, by its question's index; none where the benchmark needs a judge."""
    records = [
        {
            "question_id": question.question_id,
            "prompt": question.text,
            "text": answer.text,
            "metadata": {"index": question.index},
        }
        for question, answer in answered.items()
    ]
    rows = plan.benchmark.score(records, plan.data)["extracted"]
    return {row["index"]: float(row["correct"]) for row in rows if "correct" in row}
