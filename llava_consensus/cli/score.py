"""Commands on anybody's LLaVA answer files, without a model: `score`, by a benchmark's own rules, and `judge`."""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import arg, command
from llava_consensus.errors import DataError, OptionError, listed
from llava_consensus.evaluation.benchmarks import BENCHMARKS, Benchmark
from llava_consensus.evaluation.benchmarks.base import join, refuse_missing, some
from llava_consensus.evaluation.files import misread
from llava_consensus.evaluation.runs.execution import Unanswered

MEND = "Mend the one, or fetch the other again"
ANSWERS = arg(
    "--answers", required=True, type=Path, metavar="FILE", help="LLaVA's lines, a JSON list, or an official file"
)


@command(
    "score",
    arguments.BENCHMARK,
    ANSWERS,
    arguments.DATA_DIR,
    arguments.BENCHMARK_OPTION,
    arg("--json", action="store_true", help="everything measured, as JSON"),
    arg("--export", type=Path, metavar="FILE", help="do not score: write the form that the official server takes"),
    arg("--force", action="store_true", help="with --export: write over what is there, and answers that are all empty"),
    examples=(
        "score gqa --answers answers.jsonl --data playground/data",
        "score vqav2 --answers answers.jsonl --data playground/data --export upload.json",
    ),
)
def score(given: argparse.Namespace) -> Iterator[str]:
    """Score an answer file, or write it in the form the official server takes."""
    benchmark = arguments.benchmark(given.name, given)
    if given.export:
        yield from _export(benchmark, given)
        return
    with misread(f"{given.answers}, or a file of {benchmark.name} in {benchmark.place(given.data)}", MEND):
        report = benchmark.score_file(given.answers, given.data)
    counts = report.get("counts", {})
    yield from [json.dumps(report, indent=1)] if given.json else _lines(benchmark, report)
    if counts.get("missing"):
        raise Unanswered(
            f"{given.answers}: {counts['missing']} of {counts['asked']} questions have no answer, so the score rests "
            "on the others. For a run of --limit or --sample that is meant"
        )


def _lines(benchmark: Benchmark, report: Mapping[str, Any]) -> Iterator[str]:
    value, counts = report.get(benchmark.metric), report.get("counts", {})
    published = f" (LLaVA-1.5-7B as published: {benchmark.paper:g})" if benchmark.paper is not None else ""
    yield f"{benchmark.name}: {benchmark.metric} {'none' if value is None else f'{value:.2f}'}{published}"
    yield "questions: " + ", ".join(f"{name} {count}" for name, count in counts.items())
    shown = {name: one for name, one in report.items() if name not in ("benchmark", "counts", "extracted")}
    yield from _nested(shown)


def _nested(values: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}:"
            yield from _nested(value, f"{indent}  ")
        else:
            yield f"{indent}{name}: {f'{value:.2f}' if isinstance(value, float) else '-' if value is None else value}"


def _export(benchmark: Benchmark, given: argparse.Namespace) -> Iterator[str]:
    if benchmark.export is None:
        able = ", ".join(name for name, one in BENCHMARKS.items() if one.export is not None)
        raise OptionError(f"{benchmark.name} has no submission, scoring is all it needs. Those that have: {able}")
    target: Path = given.export
    if not given.force and target.is_file():
        raise DataError(f"--export {target}: is there already. Give another name, or --force to write over it")
    if not target.parent.is_dir():
        raise DataError(f"--export {target}: no folder {target.parent}")
    with misread(f"{given.answers}, or a file of {benchmark.name} in {benchmark.place(given.data)}", MEND):
        records = some(benchmark.read(given.answers, given.data), given.answers)
        if not given.force and not any(str(record.get("text", "")).strip() for record in records):
            raise DataError(f"{given.answers}: every answer is empty, so nothing is exported. --force does it anyway")
        if benchmark.whole:
            refuse_missing(join(records, benchmark.load(given.data)).audit, benchmark.whole)
        found = benchmark.export(records, given.data, target)
    yield str(target)
    for name, value in found.items():
        if isinstance(value, list):
            yield f"{name}: {len(value)}{': ' + listed([*map(repr, value)]) if value else ''}"
        else:
            yield f"{name}: {value}"


@command(
    "judge",
    arguments.DATA_DIR,
    arg("name", metavar="BENCHMARK", help="one that has a judge; a wrong name lists them"),
    ANSWERS,
    arg("--judge-model", required=True, metavar="M", help="the judge, as its server calls it"),
    arg("--judge-url", metavar="U", help="base URL of any OpenAI-compatible server (OpenAI)"),
    arg("--judge-prompt", type=Path, metavar="F", help="JSON file of another prompt, such as the official one"),
    arg("--judge-option", action="append", default=[], metavar="KEY=VALUE", help="field of every request"),
    arg("--judge-timeout", type=float, default=60.0, help="seconds a server may be silent (%(default)s)"),
    arg("--judge-tries", type=int, default=8, help="tries of one request (%(default)s)"),
    arg("--concurrency", type=int, default=8, help="requests under way at once (%(default)s)"),
    arg("--runs", type=int, default=1, help="how often every answer is judged (%(default)s)"),
    arg("--out", type=Path, default=Path("results/judge"), metavar="DIR", help="folder of judged runs (%(default)s)"),
    arguments.NO_PROGRESS,
    examples=("judge mmvet --answers answers.jsonl --judge-model gpt-4-0613",),
)
def judge(given: argparse.Namespace) -> Iterator[str]:
    """Grade an answer file by a judge model."""
    from llava_consensus.evaluation.judge.client import JudgeConfig, JudgeError
    from llava_consensus.evaluation.judge.run import lines, run

    own = {name.removeprefix("judge_"): value for name, value in vars(given).items()}
    own |= {"benchmark": given.name, "options": arguments.options(given.judge_option)}
    config = JudgeConfig(**{name: own[name] for name in JudgeConfig.__dataclass_fields__})
    judged = run(config, not given.no_progress)
    yield from lines(judged.metrics)
    yield str(judged.path)
    if judged.metrics["unreadable"]:
        raise JudgeError(
            f"{judged.metrics['replies']['given_up']} answers have no reply that can be read, so there is no score. A "
            "judge that reasons first needs a longer reply: --judge-option max_tokens=1000, or max_tokens=null and "
            "max_completion_tokens=1000"
        )
    lacking = judged.metrics["counts"]["ungraded"]
    if lacking:
        raise JudgeError(f"{lacking} answers have no grade and are left out. The same command asks for them again")
