"""Efficiency of methods side by side: rounds of measurements, and the file that keeps them.

After every round the file is written anew, so that a stopped measurement loses a round at most; the same call resumes
from there. Its `rows`, one for each method and budget with the full model first, have:

    method, title, tokens         as asked for; `tokens` is what the model has for the full one
    reduction_percent             how many tokens fewer than the full model has
    ttft_ms, tpot_ms, generation_ms, phases_ms (tower, reduction, prefill), stages_ms   medians of all samples
    quartiles                     first and third of ttft_ms, tpot_ms and generation_ms
    speedup, share                full model's ttft_ms over this one; the reduction's part of ttft_ms
    account                       tokens, FLOPs and cache by formula (docs/accounting.md)
    kv_bytes, peak_bytes          measured; `memory` of the file says how the peak is counted
    paper                         FLOPs and cache by the formulas of the paper's own tables
    samples                       every single measurement
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pandas
from PIL.Image import Image

from llava_consensus.errors import ConsensusError, DataError
from llava_consensus.evaluation.bench.timing import Setting, answer_once, in_rounds, peak_meaning
from llava_consensus.evaluation.files import Record, read_json, write_json
from llava_consensus.evaluation.models.base import Prompt, Runner
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget, Share
from llava_consensus.reduction.costs import account, kv_bytes, match, paper_flops
from llava_consensus.reduction.method import Method, Shape

log = logging.getLogger(__name__)

WARMUP = 1  # rounds before the measured ones, which do not count
PAPER_TEXT = 50  # rows of text in the paper's efficiency tables
TIMES = ("ttft_ms", "tpot_ms", "generation_ms")
PHASES = ("tower", "reduction", "prefill")
UNKNOWN_TOWER = "tokens of this model depend on the image, and its tower is not counted"


def prompt_shape(runner: Runner, prompt: Prompt, image: Image) -> Shape:
    """Sizes of the model with this prompt about this image, as a first answer tells them."""
    with runner.attach(make("full"), Budget(1)):
        (answer,) = runner.answer([runner.encode([image])], [replace(prompt, max_new_tokens=1)])
    text, question = runner.rows(prompt) if answer.prefill is None else answer.prefill[:2]
    shape = runner.shape(text)._replace(question=question)
    return shape if shape.available == answer.before else shape._replace(patches=answer.before, tiles=1)


@dataclass(frozen=True)
class Case:
    name: str
    tokens: int
    setting: Setting

    @property
    def title(self) -> str:
        name, _, options = self.name.partition(":")
        return ", ".join(filter(None, [self.setting[0].title or name, options.replace(",", ", ")]))


def cases_of(
    runner: Runner,
    names: Sequence[str],
    budgets: Sequence[Budget | Share],
    shape: Shape,
    by: str,
    make_method: Callable[[str], Method] = make,
) -> tuple[list[Case], list[Record]]:
    """The cases that this model can have, the full model first, and of the others why not; `by` as in `costs.match`."""
    cases = [Case("full", shape.available, (make("full"), Budget(shape.available)))]
    left_out: list[Record] = []
    for given_budget in budgets:
        budget = given_budget.of(shape.available)
        for name in names:
            try:
                method = make_method(name)
                given = match(method, budget, shape, by)
                account(method, given, shape)
                runner.attach(method, given).detach()
            except ConsensusError as error:
                left_out.append({"method": name, "tokens": budget.tokens, "reason": str(error)})
                continue
            if method.reduces:
                cases.append(Case(name, budget.tokens, (method, given)))
    return cases, left_out


def measure(
    runner: Runner,
    images: Sequence[Image],
    prompt: Prompt,
    shape: Shape,
    cases: Sequence[Case],
    description: Mapping[str, Any],
    out: Path,
    repeats: int = 5,
) -> Record:
    """Measures all rounds that the file does not have yet, and returns its content. `shape` is that of the model with
    the first image; DataError if the file holds a measurement of another `description`.
    """
    how = {"length": prompt.max_new_tokens, "warmup": WARMUP}
    content = {**description, "protocol": how, "memory": peak_meaning(), "shape": shape._asdict()}
    content["order"] = [f"{case.name} {case.tokens}" for case in cases]
    known = stored(out, content)
    samples = [row["samples"] for row in known["rows"]] if known else [[] for _ in cases]
    loads = known.get("load_average", [])
    tower_known = shape.available == runner.shape().available
    items = list(product(images, cases))
    done = set(product(range(len(loads)), range(len(items))))
    take = lambda item: answer_once(runner, item[0], prompt, item[1].setting).record()  # noqa: E731
    for turn, index, timing in in_rounds(items, repeats, WARMUP, done, take):
        samples[index % len(cases)].append(timing)
        if index < len(items) - 1:
            continue
        loads.append(os.getloadavg()[0])
        rows = [_row(*pair, shape, tower_known) for pair in zip(cases, samples, strict=True)]
        rows = [{**row, "speedup": rows[0]["ttft_ms"] / row["ttft_ms"]} for row in rows]
        write_json(out, {**content, "load_average": loads, "rows": rows})
        log.info("round %d of %d: %s", turn + 1, repeats, out)
    result: Record = read_json(out, kind=dict)
    return result


def stored(out: Path, description: Mapping[str, Any]) -> Record:
    """Samples of an earlier measurement of this description; empty without a file, DataError for another."""
    if not out.is_file():
        out.parent.mkdir(parents=True, exist_ok=True)
        return {}
    known: Record = read_json(out, "Move it away", dict)
    if changed := sorted(key for key in description if known.get(key) != description[key]):
        raise DataError(f"{out}: holds another measurement ({', '.join(changed)}). Move it away, or give --out FILE")
    return known


def _row(case: Case, samples: list[Record], shape: Shape, tower_known: bool) -> Record:
    """A row but for its speed-up; `tower_known`: whether the shape gives the input size of the vision tower."""
    numbers = pandas.DataFrame(samples).drop(columns="stages_ms").astype(float)
    stages = pandas.DataFrame([sample["stages_ms"] for sample in samples]).median()
    median, first, third = numbers.median(), numbers.quantile(0.25), numbers.quantile(0.75)
    known = median.notna()
    method, budget = case.setting
    counted = account(method, budget.of(shape.available), shape)
    record = counted.record()
    if not tower_known:
        record |= {"flops": {**record["flops"], "vision": None, "total": None}, "note": UNKNOWN_TOWER}
    paper = shape._replace(text=PAPER_TEXT, number_bytes=2)
    return {
        "method": case.name,
        "title": case.title,
        "tokens": case.tokens,
        "reduction_percent": 100 * (1 - case.tokens / shape.available),
        **{name: median[name] if known[name] else None for name in TIMES},
        "quartiles": {name: [first[name], third[name]] if known[name] else None for name in TIMES},
        "phases_ms": {name: median[f"{name}_ms"] for name in PHASES},
        "stages_ms": stages.to_dict(),
        "share": median["reduction_ms"] / median["ttft_ms"],
        "account": record,
        "paper": {"flops": paper_flops(paper, counted.layers), "kv_bytes": kv_bytes(paper, counted.layers)},
        "kv_bytes": median["kv_bytes"] if known["kv_bytes"] else None,
        "peak_bytes": numbers["peak_bytes"].max() if known["peak_bytes"] else None,
        "samples": list(samples),
    }
