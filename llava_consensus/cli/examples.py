"""The commands `examples` and `gallery`: pictures that show what is kept (the paper's F1 and F19 to F30).

llava-consensus examples --benchmark gqa --tokens 128 --by disagreement
llava-consensus gallery ~/photographs --tokens 64 --question "What is in the picture?"
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import Command
from llava_consensus.cli.figures import made
from llava_consensus.errors import OptionError

if TYPE_CHECKING:
    from llava_consensus.evaluation.benchmarks import Question
    from llava_consensus.evaluation.runs.configuration import Plan
    from llava_consensus.hosts import Answer, Host
    from llava_consensus.paper.examples import Example, Selection
    from llava_consensus.reduction.method import Method

WAYS = ("disagreement", "gained", "lost", "questions")
SIDES = {"vision-only": 1.0, "cross-only": 0.0}  # alpha of ConsensusDrop
BUDGETS = "288 128 64 32"


def add(command: Command) -> None:
    """Adds the command."""
    parser = command("examples", examples, "pictures on which the two signals disagree, gain or lose, drawn")
    parser.add_argument("--benchmark", default="gqa", metavar="NAME", help="whose questions are searched (%(default)s)")
    parser.add_argument("--by", default=WAYS[0], choices=WAYS, help="what is searched for (%(default)s)")
    parser.add_argument("--count", default=4, type=int, help="pictures (%(default)s)")
    parser.add_argument("--tokens", default=128, type=int, help="budget of the comparison (%(default)s)")
    parser.add_argument("--budgets", default=BUDGETS, metavar="NUMBERS", help="of the last part (%(default)s)")
    parser.add_argument("--limit", default=200, type=int, help="search the first questions only (%(default)s)")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="where they are written (DIR/examples)")
    arguments.add_model(parser)
    arguments.add_data(parser)
    arguments.add_out(parser)
    arguments.add_benchmark_option(parser)


def examples(given: argparse.Namespace) -> Iterator[str]:
    """Searches, asks what was found again with every budget, and draws."""
    from llava_consensus import hosts
    from llava_consensus.evaluation.runs.configuration import prepare
    from llava_consensus.methods import make
    from llava_consensus.paper import examples as drawings
    from llava_consensus.paper.figures import style

    if given.count < 1:
        raise OptionError(f"count={given.count} must be at least 1")
    budgets = sorted({tokens_of(given), *_whole(given.budgets)}, reverse=True)
    given.match = "kept"
    with style.sheet():  # without matplotlib this ends before anything is asked
        folder = made(given.to or given.out / "examples")
    plan = prepare(arguments.config(given, arguments.benchmark(given.benchmark, given), make("full")))
    if plan.benchmark.frames:
        raise OptionError(f"--benchmark {given.benchmark}: asks about videos, and examples are drawn of pictures")
    host = hosts.load(plan.model, plan.loading, plan.host_options)
    questions = _search(given, plan, host)
    if not questions:
        yield f"{plan.benchmark.name}: no such question among the first {len(plan.questions)}"
        return
    found = _examples(plan, host, questions, budgets)
    name = f"{given.benchmark}-{given.tokens}-{given.by}"
    with style.sheet():
        style.save_all(drawings.rows(found, given.tokens), folder, name)
        for number, one in enumerate(found, 1):
            style.save_all(drawings.whole(one, given.tokens), folder, f"{name}-{number}")
    for question, one in zip(questions, found, strict=True):
        yield f"question {question.question_id}: disagreement {100 * (one.disagreement or 0):.0f} %, {one.question}"
    yield f"{len(found)} examples: {folder}/{name}*"


def tokens_of(given: argparse.Namespace) -> int:
    """The budget of the comparison; OptionError where it is none."""
    from llava_consensus.reduction.budget import Budget

    return Budget(given.tokens).tokens


def _whole(text: str) -> list[int]:
    """Budgets that are numbers of tokens."""
    from llava_consensus.reduction.budget import amount

    amounts = [amount(budget) for budget in arguments.budgets(text)]
    if not all(isinstance(one, int) for one in amounts):
        raise OptionError(f"--budgets {text!r}: must be whole numbers, such as '{BUDGETS}'")
    return [int(one) for one in amounts]


def _search(given: argparse.Namespace, plan: "Plan", host: "Host") -> "list[Question]":
    """The questions that are drawn."""
    from llava_consensus.methods import make
    from llava_consensus.paper import example_search as search
    from llava_consensus.reduction.budget import Budget

    budget = Budget(given.tokens)
    if given.by in ("gained", "lost"):
        credits = [_credits(plan, host, method, budget.tokens) for method in _trio()]
        indices = search.changed(credits[:2], credits[2], gained=given.by == "gained")[: given.count]
        by_index = {question.index: question for question in plan.questions}
        return [by_index[index] for index in indices]
    found = search.survey(plan, host, make("consensusdrop"), budget)
    return search.most_different_pair(found) if given.by == "questions" else search.most_disagreeing(found, given.count)


def _trio() -> "list[Method]":
    """Vision alone, the question alone, both."""
    from llava_consensus.methods import make

    return [*(make("consensusdrop", alpha=alpha) for alpha in SIDES.values()), make("consensusdrop")]


def _credits(plan: "Plan", host: "Host", method: "Method", tokens: int) -> dict[int, float]:
    """How right each question is answered, 0 to 1, by its index."""
    from llava_consensus.paper import example_search as search
    from llava_consensus.reduction.budget import Budget

    asked = [question for question in plan.questions if len(question.images) == 1]
    return _right(plan, dict(search.answers(plan, host, method, Budget(tokens), asked)))


def _right(plan: "Plan", answered: "dict[Question, Answer]") -> dict[int, float]:
    """Credit of each answer by its question's index; none where the benchmark needs a judge."""
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


def _examples(plan: "Plan", host: "Host", questions: "Sequence[Question]", budgets: Sequence[int]) -> "list[Example]":
    """Each question with all tokens, and with three methods at every budget."""
    from llava_consensus.methods import make
    from llava_consensus.paper import example_search as search
    from llava_consensus.paper.examples import BOTH
    from llava_consensus.reduction.budget import Budget

    full = dict(search.answers(plan, host, make("full"), Budget(host.visual_tokens), questions))
    truths = plan.benchmark.references(plan.data)
    chosen: dict[Question, dict[str, list[Selection]]] = {question: {} for question in questions}
    both: dict[Question, Answer] = {}
    for label, method in zip((*SIDES, BOTH), _trio(), strict=True):
        for tokens in budgets:
            answered = dict(search.answers(plan, host, method, Budget(tokens), questions))
            right = _right(plan, answered)
            for question, answer in answered.items():
                credit = right.get(question.index)
                one = selection(host, answer, tokens, None if credit is None else credit >= search.HALF)
                chosen[question].setdefault(label, []).append(one)
            both |= answered if label == BOTH else {}
    return [
        _example(plan, host, question, full[question], both[question], chosen[question], truths.get(question.index, ""))
        for question in questions
    ]


def _example(
    plan: "Plan", host: "Host", question: "Question", full: "Answer", both: "Answer", chosen: Any, truth: str
) -> "Example":
    from llava_consensus.evaluation.benchmarks.base import LETTER, SHORT
    from llava_consensus.evaluation.runs.pictures import open_image
    from llava_consensus.paper import example_search as search
    from llava_consensus.paper.examples import Example

    (path,) = plan.pictures(question)
    image = open_image(path, content=plan.content(path) if plan.content else None)
    reduction = search.reduction_of(both)
    return Example(
        image,
        side=round(host.visual_tokens**0.5),
        question=" ".join(question.text.removesuffix(SHORT).removesuffix(LETTER).split()),
        truth=truth,
        full=full.text,
        vision=search.plain(reduction.vision),
        cross=search.plain(reduction.cross),
        fused=search.plain(reduction.fused),
        selections=chosen,
        disagreement=search.disagreement(reduction),
    )


def selection(host: "Host", answer: "Answer", tokens: int, right: bool | None = None) -> "Selection":
    """What was kept and merged for an answer about one square picture."""
    from llava_consensus.hosts.patches import patches
    from llava_consensus.paper.examples import Selection

    found = patches(answer.outcomes[0], round(host.visual_tokens**0.5), 0)
    kept = set(found.kept)
    merged = [place for place, slot in enumerate(found.owner) if slot >= 0 and place not in kept]
    return Selection(tokens, found.kept, merged, answer.text, right)
