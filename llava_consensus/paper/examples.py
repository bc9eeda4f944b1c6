"""Examples, drawn (F1, F19 to F30): tokens of an image kept by vision, by the question and by both. They are
those of a benchmark's questions on which the two signals disagree most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
from PIL import Image
from tqdm import tqdm

from llava_consensus.errors import OptionError
from llava_consensus.evaluation.benchmarks import Question
from llava_consensus.evaluation.benchmarks.base import LETTER, SHORT
from llava_consensus.evaluation.models import Answer, Runner
from llava_consensus.evaluation.report import overlay
from llava_consensus.evaluation.report.patches import Patches, patches
from llava_consensus.evaluation.runs.configuration import RunPlan
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget

VISION, CROSS, BOTH = "vision-only", "cross-only", "ConsensusDrop"
ALPHAS = {VISION: {"alpha": 1.0}, CROSS: {"alpha": 0.0}, BOTH: {}}  # options of ConsensusDrop
COLOURS = {VISION: (0, 158, 115), CROSS: (0, 114, 178), BOTH: (204, 121, 167)}  # green, blue, magenta, as in the paper
SHARED = (230, 159, 0)  # patches in both sets
WIDTH, PIXELS = 300, (480, 480)  # of a panel, and of the longer side of its image
KEY = (
    "Outlined: kept as it is. Blue grey: merged. Nearly white: dropped. In the last column vision-only keeps "
    "green patches, cross-only blue ones, both orange ones; those of ConsensusDrop have a magenta frame."
)


@dataclass(frozen=True)
class Example:
    """A question about one image, with the tokens kept for it."""

    image: Image.Image
    side: int  # patches in a row
    words: str  # without instructions on the form of the answer
    truth: str = ""
    full: str = ""  # the answer with all tokens
    kept: dict[tuple[int, str], tuple[Patches, str]] = field(default_factory=dict)  # by budget and label, with answer


def disagreement(found: Patches) -> float:
    """1 minus the overlap of the two sides' best patches, as many as are kept; equal saliencies by index."""
    count = len(found.kept)
    sides = [set(np.argsort(-np.asarray(side), kind="stable")[:count].tolist()) for side in (found.vision, found.cross)]
    return 1 - len(sides[0] & sides[1]) / count


def search(runner: Runner, plan: RunPlan, tokens: int, count: int) -> list[tuple[float, Question]]:
    """The questions with the highest disagreement, and it. OptionError without two saliencies of one square image."""
    found, questions = [], [question for question in plan.questions if len(question.images) == 1]
    with runner.attach(make("consensusdrop"), Budget(tokens)):
        for question in tqdm(questions, unit="q", desc="looking", disable=None):
            prompt = replace(plan.prompt(question), max_new_tokens=1)
            _, answer = runner.ask([plan.open(*plan.images(question))], prompt)
            found.append((disagreement(_patches(runner, answer)), question))
    return sorted(found, key=lambda pair: -pair[0])[:count]


def _patches(runner: Runner, answer: Answer) -> Patches:
    (outcome,) = answer.outcomes
    found = patches(outcome, round(runner.visual_tokens**0.5), 0)
    if len(outcome.reductions) != 1 or found.vision is None or found.cross is None:
        raise OptionError(
            "examples: need one square image with a vision and a cross saliency. Take fewer tokens than the image "
            "has, and a model without tiles"
        )
    return found


def example(runner: Runner, plan: RunPlan, question: Question, budgets: Sequence[int]) -> Example:
    """A question with all tokens, and with vision, the question and both at every budget."""
    image, prompt = plan.open(*plan.images(question)), plan.prompt(question)
    with runner.attach(make("full"), Budget(runner.visual_tokens)):
        full = runner.ask([image], prompt)[1].text
    kept = {}
    for tokens, (label, options) in product(budgets, ALPHAS.items()):
        with runner.attach(make("consensusdrop", **options), Budget(tokens)):
            _, answer = runner.ask([image], prompt)
            kept[tokens, label] = _patches(runner, answer), answer.text
    words = " ".join(question.text.removesuffix(SHORT).removesuffix(LETTER).split())
    truth = plan.benchmark.references(plan.data).get(question.index, "")
    return Example(image, round(runner.visual_tokens**0.5), words, truth, full, kept)


# ---- drawing


def panels(example: Example) -> list[tuple[str, Image.Image]]:
    """Caption and image of each panel, four in a row: the image and its heat maps, then a row for each budget."""
    seen = overlay.view(example.image, (example.side, example.side), side=PIXELS)
    budgets = list(dict.fromkeys(tokens for tokens, _ in example.kept))
    first, _ = example.kept[budgets[0], BOTH]
    found = [(f"original\nall tokens: {example.full}", overlay.draw(seen))]
    saliencies = (("vision saliency", first.vision), ("cross saliency", first.cross), ("fused", first.fused))
    found += [(title, overlay.heat(seen, values)) for title, values in saliencies if values is not None]
    for tokens in budgets:
        for label in COLOURS:
            kept, answer = example.kept[tokens, label]
            known = overlay.fates(kept.kept, [], np.where(np.asarray(kept.owner) >= 0, 0, -1))
            image = overlay.selection(seen, known, outline=COLOURS[label], apart=False)
            merged = tokens - len(kept.kept)
            counts = f"{len(kept.kept)} kept" + (f" + {merged} merged" if merged > 0 else "")
            found.append((f"{label}\n{counts}\nanswer: {answer}", image))
        sets = {COLOURS[label]: example.kept[tokens, label][0].kept for label in (VISION, CROSS)}
        consensus = example.kept[tokens, BOTH][0]
        image = overlay.overlap(seen, sets, SHARED, consensus.kept, COLOURS[BOTH])
        found.append((f"both sets, consensus framed\ndisagreement {100 * disagreement(consensus):.0f} %", image))
    return found


def drawn(example: Example) -> Image.Image:
    """One sheet about one example, under its question, right answer and the key to the colours."""
    head = f"{example.words} Truth: {example.truth}." if example.truth else example.words
    return overlay.contact_sheet(panels(example), 4, [head], WIDTH, KEY)
