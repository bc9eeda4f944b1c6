"""Questions a second of the harness, method by method, over those of the full model with its shared cache; and of the
harness over LLaVA's own loop.

Run it: OMP_NUM_THREADS=1 python eval_scripts/rates.py [--rounds 5]. One process asks mini GQA with each method in turn,
round after round, so that a busy moment hits all of them; read ratios. Seconds are processor time of the process. In
setting `all` the questions of a picture follow each other, as in the file; in `single` each picture has one. Every turn
encodes its pictures anew. `--loop 60` measures LLaVA's own loop (`official_loop.py`) and ours with all tokens instead,
in processes of their own, by the clock, and compares the texts. The last line of standard output is JSON with every
sample.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from llava_consensus.evaluation import models
from llava_consensus.evaluation.benchmarks import Question
from llava_consensus.evaluation.benchmarks import make as make_benchmark
from llava_consensus.evaluation.files import ANSWERS, read_answers
from llava_consensus.evaluation.runs import DATA, MODEL
from llava_consensus.evaluation.runs.configuration import RunConfig, RunPlan, prepare
from llava_consensus.evaluation.runs.loop import Asker
from llava_consensus.methods import make
from llava_consensus.reduction.budget import Budget

METHODS = "full consensusdrop visionzip vispruner random fastv"
SETTINGS = ("all", "single")  # questions about each picture
LOOP = ("LLaVA's loop", "ours")
Samples = dict[str, list[float]]


def ordered(questions: list[Question], setting: str) -> list[Question]:
    """The questions of a setting: as the file has them, or the first about each picture."""
    if setting == SETTINGS[0]:
        return questions
    first = {question.images: question for question in reversed(questions)}
    return [question for question in questions if first[question.images] is question]


def asked(plan: RunPlan, host: Any, questions: list[Question], batch: int) -> float:
    """Questions a second of processor time: pictures read, encoded, asked about, records made."""
    start = time.process_time()
    results = list(Asker(plan, host, plan.budget or Budget(1)).batches(questions, batch))
    seconds = time.process_time() - start
    assert sum(len(result.answers) for result in results) == len(questions), results
    return len(questions) / seconds


def harness(given: argparse.Namespace) -> dict[str, Samples]:
    """Rates by setting and method, a sample for each round; the first round is warm-up."""
    first = prepare(RunConfig(make_benchmark("gqa"), make("full"), model=given.model, data=Path(given.data)))
    plans = {name: first.reduced_by(make(name), Budget(given.tokens), "kept") for name in given.methods.split()}
    host = models.load(first.model, first.loading)
    settings = {setting: ordered(first.questions, setting)[: given.questions] for setting in given.settings}
    rates: dict[str, Samples] = {setting: {name: [] for name in plans} for setting in settings}
    for turn in range(given.rounds + 1):
        for setting, questions in settings.items():
            for name, plan in plans.items():
                rate = asked(plan, host, questions, given.batch)
                rates[setting][name] += [rate] if turn else []
                print(f"round {turn}, {setting}: {name} {rate:.2f}", file=sys.stderr, flush=True)
    return rates


def loop(given: argparse.Namespace) -> Samples:
    """Rates of LLaVA's own loop and of a run of ours with every token, and the share of texts that are equal."""
    place = Path(given.data) / "eval" / "gqa"
    rates: Samples = {name: [] for name in (*LOOP, "texts equal")}
    with tempfile.TemporaryDirectory() as temporary:
        questions, answers = (Path(temporary) / name for name in ("questions.jsonl", "answers.jsonl"))
        lines = (place / "llava_gqa_testdev_balanced.jsonl").read_text().splitlines(keepends=True)
        questions.write_text("".join(lines[: given.loop]))
        files = ["--question-file", questions, "--image-folder", place / "data" / "images", "--answers-file", answers]
        fixed = ["--temperature", "0", "--conv-mode", "vicuna_v1", "--max_new_tokens", "128"]
        theirs = ["eval_scripts/official_loop.py", "--model-path", given.model, *files, *fixed]
        own = ["-m", "llava_consensus.cli", "eval", "gqa", "--method", "full", "--model", given.model]
        own += ["--data", given.data, "--limit", str(given.loop), "--batch", str(given.batch)]
        for turn in range(given.rounds):
            out = Path(temporary) / str(turn)
            seconds = json.loads(printed(theirs).splitlines()[-1])["seconds"]
            printed([*own, "--out", out])
            (run,) = out.glob("gqa-full-*")
            pair = seconds, json.loads((run / "metrics.json").read_text())["timing"]["seconds"]
            for name, spent in zip(LOOP, pair, strict=True):
                rates[name].append(given.loop / spent)
            said = [json.loads(line)["text"] for line in answers.read_text().splitlines()]
            texts = [answer["text"] for answer in read_answers(run / ANSWERS)]
            same = [one == other for one, other in zip(said, texts, strict=True)]
            rates["texts equal"].append(sum(same) / len(same))
            print(
                f"round {turn}: {' '.join(f'{name} {found[-1]:.2f}' for name, found in rates.items())}", file=sys.stderr
            )
    return rates


def printed(arguments: list[Any]) -> str:
    """What a Python process of these arguments prints."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def table(rates: Samples, base: str) -> str:
    """Medians with their range, and ratios over `base`, round by round."""
    lines = ["| | questions a second | range | ratio | range |", "|---|--:|--:|--:|--:|"]
    for name, found in rates.items():
        ratios = [one / other for one, other in zip(found, rates[base], strict=True)]
        cells = (f"{statistics.median(row):.2f} | {min(row):.2f} to {max(row):.2f}" for row in (found, ratios))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measures, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--data", default=DATA)
    parser.add_argument("--methods", default=METHODS, metavar="NAMES", help="the first is what ratios are over")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--questions", type=int, default=96, help="in a setting; there are 50 pictures")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settings", nargs="+", default=SETTINGS, choices=SETTINGS)
    parser.add_argument("--loop", type=int, metavar="QUESTIONS", help="measure LLaVA's own loop, with that many")
    given = parser.parse_args()
    found = {"loop": loop(given)} if given.loop else harness(given)
    for setting, rates in found.items():
        print(f"{setting}\n{table(rates, next(iter(rates)))}")
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    print(f"{torch.get_num_threads()} thread(s) on {os.cpu_count()} processors, load {load}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
