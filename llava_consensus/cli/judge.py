"""The command `judge`: grades of a judge model."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import Command


def add(command: Command) -> None:
    """Adds the command."""
    parser = command("judge", judge, "grade an answer file by a judge model")
    arguments.add_data(parser)
    parser.add_argument("name", metavar="BENCHMARK", help="mmvet, tgif, msvd, msrvtt, mmbench or mmbench_cn")
    parser.add_argument("--answers", required=True, type=Path, metavar="FILE", help="LLaVA's, or the official file")
    parser.add_argument("--judge-model", required=True, metavar="M", help="as its server calls it")
    parser.add_argument("--judge-url", metavar="U", help="base URL of any OpenAI-compatible server (OpenAI)")
    parser.add_argument("--judge-prompt-from", type=Path, metavar="F", help="official script to read the prompt from")
    parser.add_argument("--judge-option", action="append", default=[], metavar="KEY=VALUE", help="of the request")
    parser.add_argument(
        "--judge-price", nargs=2, type=float, metavar=("IN", "OUT"), help="dollars per million tokens, for the estimate"
    )
    parser.add_argument("--judge-dry-run", action="store_true", help="say what it would cost, send nothing")
    parser.add_argument("--judge-timeout", type=float, default=60.0, help="seconds for one try (%(default)s)")
    parser.add_argument("--judge-tries", type=int, default=6, help="of one request (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests under way at once (%(default)s)")
    parser.add_argument("--runs", type=int, default=1, help="how often every answer is judged (%(default)s)")
    parser.add_argument("--full-answers", type=Path, metavar="FILE", help="of the unpruned model, for the agreement")
    parser.add_argument("--out", type=Path, default=Path("results/judge"), metavar="DIR", help="(%(default)s)")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")


def judge(given: argparse.Namespace) -> Iterator[str]:
    """Judges, and tells line by line; at the end JudgeError if some answers have no grade."""
    from llava_consensus.judge.client import JudgeError, Server
    from llava_consensus.judge.cost import Prices
    from llava_consensus.judge.grading import JudgeConfig
    from llava_consensus.judge.run import run as grade

    config = JudgeConfig(
        benchmark=given.name,
        answers=given.answers,
        data=given.data,
        server=Server(given.judge_model, given.judge_url, given.concurrency, given.judge_timeout, given.judge_tries),
        prompt_from=given.judge_prompt_from,
        runs=given.runs,
        options=arguments.options(given.judge_option),
        prices=Prices(*given.judge_price) if given.judge_price else None,
        full_answers=given.full_answers,
        out=given.out,
    )
    judged = grade(config, given.judge_dry_run, not given.no_progress)
    if judged.metrics is None:
        yield f"{given.name}: nothing was sent. To be sent, by estimate: {judged.expected}"
        return
    yield from _summary(judged.metrics)
    yield f"this call: {judged.spent}"
    yield str(judged.path)
    lacking = judged.metrics["counts"]["ungraded"]
    if lacking:
        raise JudgeError(f"{lacking} answers have no grade and are left out. The same command asks for them again")


def _summary(metrics: Mapping[str, Any]) -> Iterator[str]:
    counts, replies, judge = metrics["counts"], metrics["replies"], metrics["judge"]
    score = "none" if metrics["score"] is None else f"{metrics['score']:.2f}"
    answers = f"{counts['graded']} of {counts['asked']} questions graded"
    yield f"{metrics['benchmark']}: {metrics['metric']} {score}, {answers}"
    if "capability" in metrics:
        yield "by capability: " + ", ".join(f"{name} {value}" for name, value in metrics["capability"].items())
        yield f"runs: {metrics['runs']}, std {metrics['std']}"
    elif metrics.get("average_score") is not None:
        first = metrics["runs"][0]
        told = f"yes {first['yes_count']}, no {first['no_count']}, neither {first['neither']}"
        yield f"average score {metrics['average_score']:.2f} of 5; {told}, fields missing {first['unsound']}"
    agreement = metrics.get("agreement")
    same = "" if agreement is None else f", {agreement:.1f} % as the unpruned model answered"
    if metrics.get("by_rules") is not None:
        unread = f"which cannot read {metrics['undecided_by_rules']} answers"
        yield f"without a judge: {metrics['by_rules']:.2f} by the rules, {unread}{same}"
    if metrics.get("contains") is not None:
        yield f"without a judge: exact {metrics['exact']:.1f} %, contained {metrics['contains']:.1f} %{same}"
    reported = ", ".join(f"{name} ({count} replies)" for name, count in judge["reported"].items()) or "nobody"
    yield f"judge: {reported}; prompt: {judge['prompt']['official'] or judge['prompt']['origin']}"
    odd = f"{replies['refused']} refused, {replies['unreadable']} unreadable, {replies['given_up']} given up"
    lost = f"{replies['failed_tries']} failed tries, {replies['in_flight']} cut off by a stop"
    yield f"replies: {replies['used']} used, {odd}; {lost} (these may have been charged)"
