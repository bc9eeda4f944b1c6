"""One judged run: who is asked about what, an estimate, the asking, and the official numbers.

    OUT/replies.jsonl                       everything asked and heard, shared by all judged runs in OUT
    OUT/<benchmark>-<answers>-<hash>/       config.json first, grades.json (official form), scores.jsonl (each
                                            answer as graded), metrics.json last

`run(JudgeConfig("mmvet", Path("answers.jsonl"), Path("playground/data"), Server("gpt-4-0613")))`. Stopped at any
moment, the same call goes on; called again when complete it asks nothing and writes the same numbers.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from llava_consensus.errors import Interrupted
from llava_consensus.evaluation.benchmarks import judged
from llava_consensus.evaluation.files import ANSWERS, CONFIG, Record, canonical, write_json, write_metrics
from llava_consensus.evaluation.judge import cost, graders
from llava_consensus.evaluation.judge.client import Client
from llava_consensus.evaluation.judge.cost import Cost
from llava_consensus.evaluation.judge.grader import Grader, Sample, Verdict
from llava_consensus.evaluation.judge.grading import Grading, JudgeConfig
from llava_consensus.evaluation.judge.prompts import Prompt
from llava_consensus.evaluation.judge.store import Replies, Reply, key_of
from llava_consensus.evaluation.shapes import misread

log = logging.getLogger(__name__)

GRADES = "grades.json"
SHOWN = 5  # answers without a grade that are named


@dataclass(frozen=True)
class Judged:
    """Where a judged run is, what it measured, what this call was expected to cost and what it did."""

    path: Path | None  # None: nothing was sent, only estimated
    metrics: Record | None
    expected: Cost
    spent: Cost


def run(config: JudgeConfig, dry: bool = False, progress: bool = True) -> Judged:
    """Judges an answer file, or goes on with it; with `dry` only says what that would cost.

    Raises:
        JudgeError: the judge cannot be asked; what was heard is stored, and the same call goes on.
        Interrupted: Ctrl-C or a signal that asks to stop; the same.
        ConsensusError: everything else the user can mend, see `errors.py`.
    """
    grader = graders.get(config.benchmark)
    prompt = grader.prompt(config.prompt_from)
    place = f"{config.answers}, or a file in {grader.benchmark.place(config.data)}"
    with misread(place):
        records = grader.benchmark.read(config.answers, config.data)
        found, counts = grader.samples(records, config.data)
        beside = _beside(config, grader, records)
    samples = _count_copies(found)
    gradings = [Grading(grader, prompt, sample, number, config) for number in range(config.runs) for sample in samples]
    with Replies(config.out) as replies:
        expected = _recall(gradings, replies, grader, config)
        if dry:
            return Judged(None, None, expected, cost.spent([], config.prices))
        folder = _open(config, prompt)
        spent = _finish(gradings, replies, config, progress)
        record = {"failed_tries": _tries(gradings, replies.failed), "in_flight": _tries(gradings, replies.in_flight)}
    verdicts = _verdicts(gradings, config.runs)
    with misread(place):
        numbers = grader.report(samples, verdicts, config.data, config.runs)
    lacking = len(samples) - len(verdicts)
    metrics = {
        "benchmark": config.benchmark,
        "metric": grader.benchmark.metric,
        "score": numbers[grader.benchmark.metric],
        "complete": not counts["missing"] and not lacking,
        "counts": counts | {"graded": len(verdicts), "ungraded": lacking},
        **beside,
        "judge": _describe(config, prompt) | {"reported": _models(gradings)},
        "replies": _replies(gradings) | record,
        "spent": cost.spent(_heard(gradings), config.prices)._asdict(),
        **numbers,
    }
    write_json(folder / GRADES, grader.grades(samples, verdicts))
    write_metrics(folder, {name: value for name, value in metrics.items() if name != "extracted"}, metrics["extracted"])
    return Judged(folder, metrics, expected, spent)


def _count_copies(samples: Sequence[Sample]) -> list[Sample]:
    """Samples with the same fields numbered, so that each is a draw of its own, as in the official scripts."""
    seen: Counter[tuple[str, ...]] = Counter()
    counted = []
    for sample in samples:
        fields = tuple(sample.fields.values())
        counted.append(replace(sample, copy=seen[fields]))
        seen[fields] += 1
    return counted


def _recall(gradings: Sequence[Grading], replies: Replies, grader: Grader, config: JudgeConfig) -> Cost:
    """Goes as far as stored replies reach, and says what the rest may cost."""
    for repair in replies.repairs:
        log.warning("%s", repair)
    for grading in gradings:
        grading.recall(replies)
    requests = [grading.request for grading in gradings if grading.outcome is None]
    bodies = {key_of(request): request["body"] for request in requests}
    expected = cost.estimate(bodies.values(), grader.reply_tokens, config.prices)
    done = len(gradings) - len(requests)
    log.info("%d of %d grades are known; to be sent, by estimate: %s", done, len(gradings), expected)
    return expected


def _finish(gradings: Sequence[Grading], replies: Replies, config: JudgeConfig, progress: bool) -> Cost:
    """Asks what is still open; returns what that cost, and says it even where it ends early."""
    pending = [grading for grading in gradings if grading.outcome is None]
    known = set(replies.known)
    try:
        if pending:
            asyncio.run(_ask(pending, replies, config, tqdm(total=len(pending), unit="q", disable=not progress)))
    except KeyboardInterrupt:
        raise Interrupted(_stopped(gradings, replies)) from None
    finally:
        fresh = [reply for key, reply in replies.known.items() if key not in known]
        spent = cost.spent(fresh, config.prices)
        log.info("spent by this call: %s. Every reply is kept in %s", spent, replies.path)
    failed = [grading for grading in pending if grading.failure]
    for grading in failed[:SHOWN]:
        log.warning("%s, run %d: not graded: %s", grading.sample.key, grading.run + 1, grading.failure)
    return spent


def _stopped(gradings: Sequence[Grading], replies: Replies) -> str:
    """What was done when a run is stopped; what it cost is said beside it."""
    done = sum(grading.outcome is not None for grading in gradings)
    cut = sum(count > 0 for count in replies.under_way.values())
    lost = f" {cut} requests were under way and may be charged." if cut else ""
    return f"stopped after {done} of {len(gradings)} grades.{lost} The same command goes on: {replies.path}"


async def _ask(pending: Sequence[Grading], replies: Replies, config: JudgeConfig, bar: Any) -> None:
    """All open dialogues at once, as many requests at a time as the server may have. A hopeless one ends them all."""
    client = Client(config.server, replies, config.limits)
    tasks = [asyncio.create_task(grading.finish(client)) for grading in pending]
    try:
        with bar:
            for task in asyncio.as_completed(tasks):
                await task
                bar.update()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()


def _verdicts(gradings: Sequence[Grading], runs: int) -> dict[str, list[Verdict]]:
    """By sample the verdicts of all runs; a sample that lacks one is left out."""
    found: dict[str, list[Verdict]] = {}
    for grading in gradings:  # run by run
        verdict = grading.verdict
        if verdict is not None:
            found.setdefault(grading.sample.key, []).append(verdict)
    return {key: said for key, said in found.items() if len(said) == runs}


def _heard(gradings: Sequence[Grading]) -> list[Reply]:
    """Every reply that was used, once."""
    return list({key: reply for grading in gradings for key, reply in grading.heard.items()}.values())


def _models(gradings: Sequence[Grading]) -> dict[str, int]:
    """Which models the server reported, and in how many replies: an alias may move during a run."""
    return dict(Counter(str(reply.model) for reply in _heard(gradings)).most_common())


def _replies(gradings: Sequence[Grading]) -> dict[str, int]:
    """How many replies were used, how many of them were refusals, and how many could not be read."""
    done = [grading for grading in gradings if grading.heard]
    unread = sum(len(grading.heard) - bool(grading.outcome and grading.outcome.read) for grading in done)
    heard = _heard(gradings)
    refused = sum(reply.refused for reply in heard)
    given_up = sum(bool(grading.outcome and not grading.outcome.read) for grading in done)
    return {"used": len(heard), "refused": refused, "unreadable": unread, "given_up": given_up}


def _tries(gradings: Sequence[Grading], counts: Mapping[str, int]) -> int:
    return sum(
        counts[key] for key in {key for grading in gradings for key in (*grading.heard, key_of(grading.request))}
    )


def _beside(config: JudgeConfig, grader: Grader, records: Sequence[Record]) -> dict[str, Any]:
    """The scores computed without a judge, and the agreement with the unpruned model's answers."""
    numbers = grader.unjudged(grader.benchmark.score(records, config.data))
    if config.full_answers:
        numbers |= judged.agreement(records, grader.benchmark.read(config.full_answers, config.data))
    return numbers


def _describe(config: JudgeConfig, prompt: Prompt) -> dict[str, Any]:
    """All that can change a grade, the answers apart."""
    return {
        "asked": config.server.model,
        "server": config.server.place,
        "prompt": prompt.describe(),
        "runs": config.runs,
        "options": dict(config.options),
    }


def _open(config: JudgeConfig, prompt: Prompt) -> Path:
    """The folder of this run, with its config.json; another run's never has the same name."""
    content = hashlib.sha256(config.answers.read_bytes()).hexdigest()
    description = {"benchmark": config.benchmark, "answers": content, "judge": _describe(config, prompt)}
    digest = hashlib.sha256(canonical(description).encode()).hexdigest()[:12]
    source = config.answers.resolve()
    name = source.parent.name if source.name == ANSWERS else source.stem  # a run of ours is known by its folder
    start = "" if name.startswith(config.benchmark) else f"{config.benchmark}-"
    folder = config.out / f"{start}{name}-{digest}"
    folder.mkdir(exist_ok=True)
    write_json(folder / CONFIG, description | {"file": str(config.answers), "data": str(config.data)})
    return folder
