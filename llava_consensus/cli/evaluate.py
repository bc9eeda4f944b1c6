"""The command `eval`: one run; and helpers of commands that run a grid."""

import argparse
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llava_consensus.cli import arguments
from llava_consensus.cli.arguments import arg, command
from llava_consensus.errors import DataError, OptionError, plural
from llava_consensus.evaluation.benchmarks import Benchmark
from llava_consensus.evaluation.benchmarks.custom import Custom, write_answers
from llava_consensus.evaluation.files import ANSWERS, METRICS, misread
from llava_consensus.evaluation.runs import MODEL
from llava_consensus.evaluation.runs.execution import RunResult, Unanswered

if TYPE_CHECKING:
    from llava_consensus.evaluation.runs.loop import RunnerLoader
    from llava_consensus.evaluation.runs.sweep import Cell

log = logging.getLogger(__name__)

CUSTOM = "custom"  # in place of a benchmark: any question file
LLAVA = (  # as LLaVA's own scripts call them
    arg("--question-file", type=Path, metavar="FILE", help="of custom: JSON lines or a JSON list"),
    arg("--image-folder", type=Path, metavar="DIR", help="of custom: the folder of images or videos"),
    arg("--answers-file", type=Path, metavar="FILE", help="of custom: a file that gets the answers, beside the run's"),
)


@command(
    "eval",
    arguments.BENCHMARK,
    *arguments.REDUCED,
    *arguments.RUN,
    *arguments.SHARDED,
    arguments.BENCHMARK_OPTION,
    arg("--url", metavar="URL", help="ask this server (OpenAI's chat API): method and prompts are its own"),
    arg("--json", action="store_true", help="everything measured, as JSON"),
    *LLAVA,
    examples=(
        "eval gqa --tokens 64",
        "eval pope --method visionzip --tokens 0.1 --sample 100 --json",
        "eval custom --question-file questions.jsonl --image-folder images --answers-file answers.jsonl",
    ),
)
def evaluate(given: argparse.Namespace) -> Iterator[str]:
    """Accuracy of a model and method on one benchmark."""
    benchmark = _benchmark(given)
    result = _by_url(given, benchmark) if given.url else _here(given, benchmark)
    if not result.metrics:
        then = "Ask the others too" if given.url else "When all shards are, --merge their folders"
        yield f"{plural(result.asked, 'question')} of this shard asked. {then}"
        yield str(result.path)
        return
    if given.answers_file:
        write_answers(result.path, given.answers_file)
    if given.name == CUSTOM and not given.json:  # there is nothing to score
        yield f"{result.metrics['answered']} of {plural(result.metrics['questions'], 'question')} answered"
        yield str(given.answers_file or result.path / ANSWERS)
    elif given.json:
        full = {} if given.url else {"all_tokens": _full_score(given, result)}
        yield json.dumps({**result.metrics, **full, "run": str(result.path)}, indent=1)
    else:
        from llava_consensus.evaluation.runs.store import AGAIN

        with misread(str(result.path / METRICS), AGAIN):
            lines = list(_summary(given, result))
        yield from lines
    if missing := result.metrics.get("errors"):
        raise Unanswered(
            f"{missing} of {result.metrics['questions']} questions have no answer, so the score rests on the others. "
            f"{result.path / 'errors.jsonl'} says why; --retry-errors asks them again"
        )


def _here(given: argparse.Namespace, benchmark: Benchmark) -> RunResult:
    method = arguments.method(given)
    from llava_consensus.evaluation.runs.loop import run  # only now: a wrong name is refused before torch is imported

    config = arguments.config(given, benchmark, method, arguments.budget(given))
    config = replace(config, conversation=given.conversation, max_new_tokens=given.max_new_tokens)
    return run(config, given.out, arguments.execution(given))


def _by_url(given: argparse.Namespace, benchmark: Benchmark) -> RunResult:
    from llava_consensus.evaluation.runs.by_url import UrlConfig, run

    model = None if given.model == MODEL else given.model
    asked = {name: vars(given)[name] for name in ("data", "limit", "sample", "max_new_tokens")}
    return run(UrlConfig(benchmark, given.url, model, given.tokens, **asked), given.out, arguments.execution(given))


def _full_score(given: argparse.Namespace, result: RunResult) -> float | None:
    from llava_consensus.evaluation.runs.store import full_score

    try:
        return full_score(given.out, json.loads((result.path / "config.json").read_bytes()))
    except DataError as error:  # of another run, which is no reason to keep this one's result back
        log.warning("another run is damaged, so it is not compared with: %s", error)
        return None


def _benchmark(given: argparse.Namespace) -> Benchmark:
    """The benchmark, or the questions of any file. OptionError for an argument that has no meaning here."""
    own = [name for name in ("question_file", "image_folder", "answers_file") if getattr(given, name)]
    if given.name != CUSTOM:
        if own:
            raise OptionError(f"{own[0]}={getattr(given, own[0])}: is for `eval {CUSTOM}`. Leave it out")
        return arguments.benchmark(given.name, given)
    for name in ("question_file", "image_folder"):
        if name not in own:
            raise OptionError(f"eval {CUSTOM}: needs --{name.replace('_', '-')}")
    return Custom(questions=given.question_file, image_folder=given.image_folder)


def carry_out(
    grid: "Sequence[Cell]", given: argparse.Namespace, out: Path | None = None, load: "RunnerLoader | None" = None
) -> "Iterator[tuple[str, Cell]]":
    """Runs every cell; yields a line about it, and the cell with its result or error. `out` replaces `--out`."""
    from llava_consensus.evaluation.runs import sweep as grids

    cells = grids.sweep(grid, out or given.out, arguments.execution(given), load)
    for number, cell in enumerate(cells, 1):
        measured = cell.result.metrics if cell.result else {}
        became = f"failed: {cell.error}" if cell.error else score_of(measured)
        missing = measured.get("errors", 0)
        became += f", {plural(missing, 'question')} without an answer" if missing else ""
        yield f"[{number}/{len(grid)}] {cell.name}: {became}", cell


def loaded_once(given: argparse.Namespace) -> "RunnerLoader | None":
    """A loader for several grids in a row that loads the model once; None where workers load it themselves."""
    from llava_consensus.evaluation import models
    from llava_consensus.evaluation.runs.sweep import LoadedOnce

    return LoadedOnce(models.load) if given.workers == 1 else None


def folders(cells: "Sequence[Cell]") -> list[Path]:
    """Folders of all runs, in order. Raises the first error of one that failed."""
    for cell in cells:
        if cell.error:
            raise cell.error
    return [cell.result.path for cell in cells if cell.result]


def score_of(measured: Mapping[str, Any]) -> str:
    if not measured:
        return "shards are missing"
    return "no score" if measured["score"] is None else f"{measured['score']:.2f}"


def _cost(account: dict[str, Any]) -> str:
    total = account["flops"]["total"]
    flops = "unknown" if total is None else f"{total / 1e9:.2f} GFLOP"
    counts = f"{account['entering']:g} enter, {account['kept']:g} kept, {account['average']:.4g} in a layer on average"
    return f"cost per question: {counts}; {flops}, {account['measured']['kv_bytes'] / 2**20:.3f} MiB of cache"


def _summary(given: argparse.Namespace, result: RunResult) -> Iterator[str]:
    metrics, tokens = result.metrics, result.metrics["tokens"]
    score = "none" if metrics["score"] is None else f"{metrics['score']:.2f}"
    errors = f", {metrics['errors']} without an answer (errors.jsonl)" if metrics["errors"] else ""
    asked = plural(metrics["questions"], "question")
    yield f"{given.name}: {metrics['metric']} {score} on {metrics['answered']} of {asked}{errors}"
    if not given.url:
        yield f"all tokens: {_full(given, result)}"
    report = metrics["report"]
    if report.get("unreadable_answers"):
        yield f"unreadable: {plural(report['unreadable_answers'], 'answer')}, counted as wrong"
    if report.get("contains") is not None:  # a benchmark with a judge
        matches, grades = f"{report['contains']:.1f} % of the answers contain the right answer", f"judge {given.name}"
        yield f"without a judge: {matches}; grades: llava-consensus {grades} --answers FILE --judge-model M"
    if tokens["before"] or not given.url:
        structural = f", and {tokens['structural']:g} structural ones" if tokens["structural"] else ""
        yield f"visual tokens per question: {tokens['before']:g} before, {tokens['after']:g} after{structural}"
    elif tokens["after"]:
        yield f"visual tokens per question, as the server says: {tokens['after']:g}"
    if metrics.get("account"):
        yield _cost(metrics["account"])
    speed = metrics["timing"]["questions_per_second"]
    yield f"speed: {speed:.1f} questions/s" if speed else "speed: nothing was asked"
    yield from (f"note ({plural(count, 'answer')}): {note}" for note, count in metrics["notes"].items())
    yield f"next: the same with --method random, then llava-consensus report --out {result.path.parent}"
    yield str(result.path)


def _full(given: argparse.Namespace, result: RunResult) -> str:
    score, tokens = result.metrics["score"], result.metrics["tokens"]
    if tokens["before"] == tokens["after"]:
        return "this run is the full model"
    full = _full_score(given, result)
    if full is None:
        return "not measured yet, run the same with --method full"
    return f"{full:.2f}" + (f" ({100 * score / full:.1f} % of it kept)" if score is not None and full else "")
