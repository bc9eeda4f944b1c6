"""The same weights on two hosts: counts the questions that official LLaVA and transformers answer alike.

Run it: python eval_scripts/identity.py --out results/identity. Both checkpoints are asked every question through
ordinary runs, so a stopped script goes on where it was. It prints a row for each method and benchmark, then every
question that was answered differently or from another number of tokens: both texts, what only one host kept, and the
same in double precision. Hosts that agree there differ by rounding alone.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from llava_consensus import hosts
from llava_consensus.evaluation import benchmarks
from llava_consensus.evaluation.files import ANSWERS, Record, read_answers
from llava_consensus.evaluation.runs import DATA, MODEL
from llava_consensus.evaluation.runs.configuration import RunConfig, prepare
from llava_consensus.evaluation.runs.encodings import reader
from llava_consensus.evaluation.runs.execution import Execution
from llava_consensus.evaluation.runs.loop import run
from llava_consensus.hosts import Answer
from llava_consensus.methods import METHODS, make
from llava_consensus.reduction.budget import Budget

COUNTS = ("before", "after", "structural")
HEAD = "| method | benchmark | questions | alike | score | score |\n|---|---|---|---|---|---|"


@cache
def loaded(model: str) -> Any:
    """The host of a checkpoint, loaded once however many runs ask it."""
    return hosts.load(model)


def compare(pair: list[RunConfig], out: Path) -> tuple[str, list[str]]:
    """A row of the table, and a line for each question the two configurations differ in."""
    results = [run(config, out, Execution(progress=False), lambda model, *how: loaded(model)) for config in pair]
    answers = [read_answers(result.path / ANSWERS) for result in results]
    different = [one for one, other in zip(*answers, strict=True) if _given(one) != _given(other)]
    scores = " | ".join(f"{result.metrics['score']:.2f}" for result in results)
    first, total = results[0].metrics["titles"], len(answers[0])
    row = f"| {first['method']} | {first['benchmark']} | {total} | {total - len(different)} | {scores} |"
    return row, [_difference(pair, answer["metadata"]["index"]) for answer in different]


def _given(answer: Record) -> tuple[Any, ...]:
    """The text of an answer and what it was given from."""
    metadata = answer["metadata"]
    return answer["text"], [metadata[name] for name in COUNTS], metadata["account"]["measured"]


def _difference(pair: list[RunConfig], index: int) -> str:
    """One question asked again alone, in single and in double precision."""
    parts = [f"question {index}"]
    for dtype in (torch.float32, torch.float64):
        answers = [_ask(config, index, dtype) for config in pair]
        left, right = (_kept(answer) for answer in answers)
        texts = " and ".join(repr(answer.text) for answer in answers)
        parts.append(f"{dtype}: {texts}, kept only by one {sorted(left - right)}, by the other {sorted(right - left)}")
    return "; ".join(parts)


def _ask(config: RunConfig, index: int, dtype: torch.dtype) -> Answer:
    """The answer to one question, asked alone."""
    plan = prepare(config)
    host = loaded(plan.model)
    question = plan.questions[index]
    images = [image for path in plan.pictures(question) for image in reader(plan)(path)]
    host.model.to(dtype)
    try:
        with host.attach(plan.method, plan.budget or Budget(1)):
            answer: Answer = host.answer([host.encode(images)], [plan.prompt(question)])[0]
            return answer
    finally:
        host.model.float()


def _kept(answer: Answer) -> set[tuple[int, int]]:
    """Kept tokens as (tile, index)."""
    reductions = (reduction for outcome in answer.outcomes for reduction in outcome.reductions)
    return {(tile, index) for tile, reduction in reductions for index in reduction.kept[0].tolist()}


def pairs(given: argparse.Namespace) -> Iterator[list[RunConfig]]:
    """Each method on each benchmark, on both models."""
    for bench in given.bench.split():
        for name in given.methods.split():
            benchmark, method, budget = benchmarks.make(bench), make(name), Budget(given.tokens)
            config = RunConfig(benchmark, method, budget, data=given.data, limit=given.limit)
            yield [replace(config, model=model) for model in given.models]


def main() -> None:
    """Prints the table and the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs=2, default=(MODEL, f"{MODEL}-hf"), metavar="FOLDER")
    parser.add_argument("--bench", default="gqa pope textvqa", metavar="NAMES")
    parser.add_argument("--methods", default=" ".join(METHODS), metavar="NAMES")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--data", default=DATA, type=Path)
    parser.add_argument("--out", default=Path("results/identity"), type=Path)
    given = parser.parse_args()
    found: list[str] = []
    print(HEAD, flush=True)
    for pair in pairs(given):
        row, differences = compare(pair, given.out)
        print(row, flush=True)
        found += [f"{row}: {difference}" for difference in differences]
    print("\n".join(found) or "every question was answered alike")


if __name__ == "__main__":
    main()
