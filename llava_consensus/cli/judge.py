"""The command `judge`: grades of a judge model."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import Command


def add(command: Command) -> None:
    """Adds the command."""
    parser = command("judge", judge, "grade an answer file by a judge model")
    arguments.add_data(parser)
    parser.add_argument("name", metavar="BENCHMARK", help="one that has a judge; a wrong name lists them")
    parser.add_argument("--answers", required=True, type=Path, metavar="FILE", help="LLaVA's, or the official file")
    parser.add_argument("--judge-model", required=True, metavar="M", help="as its server calls it")
    parser.add_argument("--judge-url", metavar="U", help="base URL of any OpenAI-compatible server (OpenAI)")
    parser.add_argument("--judge-prompt-from", type=Path, metavar="F", help="official script to read the prompt from")
    parser.add_argument("--judge-option", action="append", default=[], metavar="KEY=VALUE", help="of the request")
    parser.add_argument(
        "--judge-price", nargs=2, type=float, metavar=("IN", "OUT"), help="dollars per million tokens, for the estimate"
    )
    parser.add_argument("--max-cost", type=float, metavar="DOLLARS", help="that this call may spend, at --judge-price")
    parser.add_argument("--max-judge-tokens", type=int, metavar="N", help="that this call may spend")
    parser.add_argument("--max-requests", type=int, metavar="N", help="that this call may send")
    parser.add_argument("--judge-dry-run", action="store_true", help="say what it would cost, send nothing")
    parser.add_argument("--judge-timeout", type=float, default=60.0, help="seconds for one try (%(default)s)")
    parser.add_argument("--judge-tries", type=int, default=8, help="of one request (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests under way at once (%(default)s)")
    parser.add_argument("--runs", type=int, default=1, help="how often every answer is judged (%(default)s)")
    parser.add_argument("--full-answers", type=Path, metavar="FILE", help="of the unpruned model, for the agreement")
    parser.add_argument("--out", type=Path, default=Path("results/judge"), metavar="DIR", help="(%(default)s)")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")


def judge(given: argparse.Namespace) -> Iterator[str]:
    """Judges, and tells line by line; at the end JudgeError if some answers have no grade."""
    from llava_consensus.evaluation.judge.client import JudgeConfig, JudgeError
    from llava_consensus.evaluation.judge.run import lines, run

    config = JudgeConfig(
        benchmark=given.name,
        answers=given.answers,
        data=given.data,
        model=given.judge_model,
        url=given.judge_url,
        prompt_from=given.judge_prompt_from,
        runs=given.runs,
        options=arguments.options(given.judge_option),
        full_answers=given.full_answers,
        out=given.out,
        concurrency=given.concurrency,
        timeout=given.judge_timeout,
        tries=given.judge_tries,
        price=tuple(given.judge_price) if given.judge_price else None,
        max_requests=given.max_requests,
        max_tokens=given.max_judge_tokens,
        max_dollars=given.max_cost,
    )
    judged = run(config, given.judge_dry_run, not given.no_progress)
    if judged.metrics is None:
        yield f"{given.name}: nothing was sent. To be sent, by estimate: {judged.expected}"
        return
    yield from lines(judged.metrics)
    yield f"this call: {judged.spent}"
    yield str(judged.path)
    lacking = judged.metrics["counts"]["ungraded"]
    if lacking:
        raise JudgeError(f"{lacking} answers have no grade and are left out. The same command asks for them again")
