"""The command `recommend`: settings that published results and our own support."""

import argparse
import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from llava_consensus.cli.arguments import arg, command

MOST = 3  # methods printed of one table, and tables


@command(
    "recommend",
    arg("--model", default="llava-1.5", metavar="MODEL", help="name or checkpoint folder (%(default)s)"),
    arg("--task", default="general", metavar="TASK", help="general, ocr, grounding, chart, video or multi-image"),
    arg("--tokens", type=int, metavar="N", help="visual tokens of an image; the nearest published budget is taken"),
    arg("--share", type=float, metavar="S", help="the same as a share of an image's tokens, such as 0.1"),
    arg("--json", action="store_true", help="all rows, as JSON"),
    examples=("recommend --model llava-hf/llava-1.5-7b-hf --task ocr --tokens 128", "recommend --model qwen2.5-vl"),
)
def recommend(given: argparse.Namespace) -> Iterator[str]:
    """Which method and budget results support, for a model and a task."""
    from llava_consensus import evidence

    choices = evidence.recommend(given.model, given.task, given.tokens, given.share)
    family = evidence.FAMILIES.get(evidence.family_of(given.model) or "")
    notes = evidence.warnings(given.model, given.task)
    if given.json:
        content = [vars(choice) for choice in choices]
        yield json.dumps({"family": family and family.title, "choices": content, "warnings": notes}, indent=1)
        return
    if family is None:
        known = ", ".join(one.title for one in evidence.FAMILIES.values())
        yield f"no evidence for this family ({given.model}). There is some for {known}"
        return
    if not choices:
        yield f"no evidence for {given.task} on {family.title}"
    percent = family.tokens == 100
    tables = [list(rows) for _, rows in groupby(choices, key=lambda one: (one.source, one.benchmark))]
    for rows in tables[:MOST]:
        unit = "% of the full model" if rows[0].benchmark in evidence.RELATIVE else rows[0].benchmark
        budget = f"{rows[0].tokens} % of the tokens" if percent else f"{rows[0].tokens} of {family.tokens} tokens"
        full = "" if rows[0].full is None or rows[0].full == 100 else f" (all tokens: {rows[0].full:g})"
        yield f"{family.title}, {budget}, {unit}{full}: {rows[0].source}"
        for one in rows[:MOST]:
            interval = f" ({one.bounds[0]:g} to {one.bounds[1]:g}, {one.questions} questions)" if one.bounds else ""
            sign = " %" if percent else ""
            mean = f", mean per layer {one.mean:g}{sign}" if one.mean != one.entering else ""
            yield (
                f"  {one.method:<14} {one.score:g}{interval}, enters {one.entering}{sign}{mean}, "
                f"positions {one.positions}, acts: {one.place}{', table by its authors' if one.by_authors else ''}"
            )
    for line in notes:
        yield f"note, {line}"
    if choices:
        best = tables[0][0]
        tokens = best.tokens / 100 if percent else best.tokens
        option = "" if family.keeps else f", positions={best.positions!r}"
        yield "scores of different tables are averages over different benchmarks: compare within a table only"
        model = given.model if "/" in given.model or Path(given.model).is_dir() else family.hub
        options = f"--model {model} --method {best.method} --tokens {tokens:g}"
        yield f"try: llava-consensus ask IMAGE QUESTION {options}"
        yield f"or:  attach(model, method={best.method!r}, tokens={tokens:g}{option})"
