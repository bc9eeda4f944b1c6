"""One judged run: the asking, and the official numbers.

    OUT/replies.jsonl                       every reply, shared by all judged runs in OUT
    OUT/<benchmark>-<answers>-<hash>/       config.json first, scores.jsonl (each answer as graded), metrics.json
                                            last

`run(JudgeConfig("mmvet", Path("answers.jsonl"), Path("playground/data"), "gpt-4-0613"))`. Stopped at any moment, the
same call resumes; called again when complete it asks nothing and writes the same numbers.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from llava_consensus.errors import Interrupted
from llava_consensus.evaluation.files import ANSWERS, CONFIG, Record, canonical, misread, write_json, write_metrics
from llava_consensus.evaluation.judge import grader_of
from llava_consensus.evaluation.judge.client import JudgeClient, JudgeConfig, NoReply, Replies
from llava_consensus.evaluation.judge.grader import Candidate, Grader, JudgePrompt, Reply

log = logging.getLogger(__name__)

MEND = "Mend the one, or fetch the other again"
NAMED = 5  # answers without a grade that are named


class Judged(NamedTuple):
    path: Path  # folder of the run
    metrics: Record


class Grade(NamedTuple):
    """Grade of one answer in one run, with the replies it took."""

    value: Any  # None if there is none
    heard: Sequence[Reply] = ()
    failure: str = ""  # why none came
    given_up: bool = False  # whether no reply can be read, so that it follows from a rule, or is left out


def run(config: JudgeConfig, progress: bool = True) -> Judged:
    """Judges an answer file, or resumes. JudgeError if the judge cannot be asked: every reply is stored."""
    grader = grader_of(config.benchmark)
    benchmark, prompt = grader.benchmark, grader.prompt(config.prompt)
    place = f"{config.answers}, or a file in {benchmark.place(config.data)}"
    with misread(place, MEND):
        records = benchmark.read(config.answers, config.data)
        candidates, counts = grader.candidates(records, config.data)
    with Replies(config.out) as replies:
        folder = _open(config, prompt)
        grades = _grades(grader, prompt, candidates, config, replies, progress)
    said = {one.key: [grades[number, one.key].value for number in range(config.runs)] for one in candidates}
    graded = {key: values for key, values in said.items() if None not in values}
    with misread(place, MEND):
        numbers = grader.report(candidates, graded, config.data, config.runs)
    lacking = len(candidates) - len(graded)
    used = [reply for grade in grades.values() for reply in grade.heard]
    given_up = sum(one.given_up for one in grades.values())
    unreadable = 2 * given_up > len(grades)  # no judge of anything: a default grade is not a score
    metrics = {
        "benchmark": config.benchmark,
        "metric": benchmark.metric,
        "score": None if unreadable else numbers[benchmark.metric],
        "unreadable": unreadable,
        "complete": not counts["missing"] and not lacking and not unreadable,
        "counts": counts | {"graded": len(graded), "ungraded": lacking},
        # an alias may move during a run, so the record says in how many replies the server named which model
        "judge": _describe(config, prompt)
        | {"reported": dict(Counter(one.model for one in used if one.model).most_common())},
        "replies": {"used": len(used), "given_up": given_up},
        "spent": {
            name: sum(getattr(one, name) or 0 for one in used) for name in ("prompt_tokens", "completion_tokens")
        },
        **numbers,
    }
    write_metrics(folder, {name: value for name, value in metrics.items() if name != "extracted"}, metrics["extracted"])
    return Judged(folder, metrics)


Place = tuple[int, str]  # a run, and the key of a candidate


def _grades(
    grader: Grader,
    prompt: JudgePrompt,
    candidates: Sequence[Candidate],
    config: JudgeConfig,
    replies: Replies,
    progress: bool,
) -> dict[Place, Grade]:
    """Every answer in every run graded. A complete run needs no server, no key and no package."""
    client, found = JudgeClient(config, replies), dict[Place, Grade]()
    bar = tqdm(total=config.runs * len(candidates), unit="q", disable=None if progress else True)

    async def grade(number: int, one: Candidate) -> None:
        found[number, one.key] = await _grade(grader, prompt, one, number, config, client)
        bar.update()

    async def all_grades() -> None:
        tasks = [asyncio.create_task(grade(number, one)) for number in range(config.runs) for one in candidates]
        try:
            with bar:
                for task in asyncio.as_completed(tasks):
                    await task  # a JudgeError cancels the rest
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await client.close()

    try:
        asyncio.run(all_grades())
    except KeyboardInterrupt:
        text = f"stopped after {len(found)} of {config.runs * len(candidates)} grades"
        raise Interrupted(f"{text}. The same command resumes: {replies.path}") from None
    failed = [(place, grade.failure) for place, grade in found.items() if grade.failure]
    for (number, key), failure in failed[:NAMED]:
        log.warning("%s, run %d: not graded: %s", key, number + 1, failure)
    order = {(number, one.key): None for number in range(config.runs) for one in candidates}
    return {place: found[place] for place in order}


async def _grade(
    grader: Grader, prompt: JudgePrompt, one: Candidate, number: int, config: JudgeConfig, client: JudgeClient
) -> Grade:
    """Asks until a reply can be read, as often as the grader wants."""
    if one.settled is not None:
        return Grade(one.settled)
    heard: list[Reply] = []
    for attempt, own in enumerate(grader.attempts):
        options = {name: value for name, value in {**own, **config.options}.items() if value is not None}
        body = {"model": config.model, "messages": prompt.fill(one.fields, again=attempt > 0), **options}
        try:
            reply = await client.ask({"url": config.place, "body": body, "draw": [number, 0, attempt]})
        except NoReply as error:
            return Grade(None, heard, str(error))
        heard.append(reply)
        value = grader.read(reply.text, one, attempt)
        if value is not None:
            return Grade(value, heard)
    return Grade(grader.fallback, heard, given_up=True)


def _describe(config: JudgeConfig, prompt: JudgePrompt) -> dict[str, Any]:
    return {
        "asked": config.model,
        "server": config.place,
        "prompt": prompt.describe(),
        "runs": config.runs,
        "options": dict(config.options),
    }


def _open(config: JudgeConfig, prompt: JudgePrompt) -> Path:
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


def lines(metrics: Mapping[str, Any]) -> Iterator[str]:
    """A judged run as text: headline, official sub-scores, the judge and its cost."""
    counts, replies, judge = metrics["counts"], metrics["replies"], metrics["judge"]
    score = "none" if metrics["score"] is None else f"{metrics['score']:.2f}"
    answers = f"{counts['graded']} of {counts['asked']} questions graded"
    yield f"{metrics['benchmark']}: {metrics['metric']} {score}, {answers}"
    if "capability" in metrics:
        yield "by capability: " + ", ".join(f"{name} {value}" for name, value in metrics["capability"].items())
    if metrics.get("average_score") is not None:
        yield f"average score {metrics['average_score']:.2f} of 5"
    reported = ", ".join(f"{name} ({count} replies)" for name, count in judge["reported"].items()) or "nobody"
    yield f"judge: {reported}; prompt: {judge['prompt']['official'] or judge['prompt']['origin']}"
    tokens = metrics["spent"]
    yield (
        f"replies: {replies['used']} used, {replies['given_up']} answers without one that can be read; "
        f"{tokens['prompt_tokens']} tokens in, {tokens['completion_tokens']} out"
    )
