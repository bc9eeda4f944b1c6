"""One judged run: an estimate, the asking, and the official numbers.

    OUT/replies.jsonl                       every reply, shared by all judged runs in OUT
    OUT/<benchmark>-<answers>-<hash>/       config.json first, grades.json (official form), scores.jsonl (each
                                            answer as graded), metrics.json last

`run(JudgeConfig("mmvet", Path("answers.jsonl"), Path("playground/data"), "gpt-4-0613"))`. Stopped at any moment, the
same call resumes; called again when complete it asks nothing and writes the same numbers.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from llava_consensus.errors import Interrupted
from llava_consensus.evaluation.files import ANSWERS, CONFIG, Record, canonical, misread, write_json, write_metrics
from llava_consensus.evaluation.judge import grader_of
from llava_consensus.evaluation.judge.client import JudgeClient, JudgeConfig, NoReply, Replies, key_of
from llava_consensus.evaluation.judge.grader import Candidate, Grader, JudgePrompt, Outcome, Reply

log = logging.getLogger(__name__)

GRADES = "grades.json"
MEND = "Mend the one, or fetch the other again"
NAMED = 5  # answers without a grade that are named
BYTES_PER_TOKEN, TOKENS_PER_MESSAGE = 4, 4  # of English, for the estimate


class Spending(NamedTuple):
    requests: int
    prompt_tokens: int
    completion_tokens: int

    def __str__(self) -> str:
        return f"{self.requests} requests, {self.prompt_tokens} tokens in, {self.completion_tokens} out"


@dataclass(frozen=True)
class Judged:
    """A judged run: its folder, its metrics, and the expected and actual spending of this call."""

    path: Path | None  # None: nothing was sent, only estimated
    metrics: Record | None
    expected: Spending
    spent: Spending


@dataclass
class Grading:
    """The replies about one answer in one run: what to ask next, and the outcome once there is one."""

    grader: Grader
    prompt: JudgePrompt
    candidate: Candidate
    run: int
    config: JudgeConfig
    heard: list[Reply] = field(default_factory=list)
    failure: str = ""  # why there is no outcome

    def __post_init__(self) -> None:
        self.outcome = self.candidate.settled

    @property
    def request(self) -> dict[str, Any]:
        attempt = len(self.heard)
        options = {**self.grader.attempts[attempt], **self.config.options}
        body = {
            "model": self.config.model,
            "messages": self.prompt.fill(self.candidate.fields, again=attempt > 0),
            **{name: value for name, value in options.items() if value is not None},
        }
        return {"url": self.config.place, "body": body, "draw": [self.run, self.candidate.copy, attempt]}

    def hear(self, reply: Reply) -> None:
        outcome = self.grader.read(reply.text, self.candidate, len(self.heard))
        self.heard.append(reply)
        if outcome is None and len(self.heard) == len(self.grader.attempts):
            outcome = Outcome(self.grader.fallback, reply.text or "", read=False)
        self.outcome = outcome and outcome._replace(model=reply.model)

    async def finish(self, client: JudgeClient) -> None:
        """Asks until there is an outcome, or records why there is none."""
        try:
            while self.outcome is None:
                self.hear(await client.ask(self.request))
        except NoReply as error:
            self.failure = str(error)


def run(config: JudgeConfig, dry: bool = False, progress: bool = True) -> Judged:
    """Judges an answer file, or resumes; with `dry` only estimates the cost.

    Raises:
        JudgeError: the judge cannot be asked; every reply is stored, and the same call resumes.
        Interrupted: Ctrl-C or a signal that asks to stop; the same.
        ConsensusError: everything else the user can mend, see `errors.py`.
    """
    grader = grader_of(config.benchmark)
    benchmark, prompt = grader.benchmark, grader.prompt(config.prompt_from)
    place = f"{config.answers}, or a file in {benchmark.place(config.data)}"
    with misread(place, MEND):
        records = benchmark.read(config.answers, config.data)
        found, counts = grader.candidates(records, config.data)
    candidates = _count_copies(found)
    gradings = [Grading(grader, prompt, one, number, config) for number in range(config.runs) for one in candidates]
    with Replies(config.out) as replies:
        expected = _recall(gradings, replies, grader.reply_tokens)
        if dry:
            return Judged(None, None, expected, _spent([]))
        folder = _open(config, prompt)
        cost = _finish(gradings, replies, config, progress)
    outcomes = _outcomes(gradings, config.runs)
    with misread(place, MEND):
        numbers = grader.report(candidates, outcomes, config.data, config.runs)
    lacking = len(candidates) - len(outcomes)
    used = [reply for grading in gradings for reply in grading.heard]
    asked = [grading for grading in gradings if grading.heard]
    given_up = sum(bool(grading.outcome and not grading.outcome.read) for grading in asked)
    unreadable = 2 * given_up > len(gradings)  # no judge of anything: a default grade is not a score
    metrics = {
        "benchmark": config.benchmark,
        "metric": benchmark.metric,
        "score": None if unreadable else numbers[benchmark.metric],
        "unreadable": unreadable,
        "complete": not counts["missing"] and not lacking and not unreadable,
        "counts": counts | {"graded": len(outcomes), "ungraded": lacking},
        # an alias may move during a run, so the record says in how many replies the server named which model
        "judge": _describe(config, prompt)
        | {"reported": dict(Counter(one.model for one in used if one.model).most_common())},
        "replies": {
            "used": len(used),
            "refused": sum(reply.refused for reply in used),
            "unreadable": sum(len(one.heard) - bool(one.outcome and one.outcome.read) for one in asked),
            "given_up": given_up,
            "failed_tries": sum(reply.failed_tries for reply in used),
        },
        "spent": _spent(used)._asdict(),
        **numbers,
    }
    write_json(folder / GRADES, grader.grades(candidates, outcomes))
    write_metrics(folder, {name: value for name, value in metrics.items() if name != "extracted"}, metrics["extracted"])
    return Judged(folder, metrics, expected, cost)


def _spent(replies: Sequence[Reply]) -> Spending:
    prompt = sum(reply.prompt_tokens or 0 for reply in replies)
    return Spending(len(replies), prompt, sum(reply.completion_tokens or 0 for reply in replies))


def _count_copies(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates with the same fields numbered, so that each is a draw of its own, as in the official scripts."""
    seen: Counter[tuple[str, ...]] = Counter()
    counted = []
    for candidate in candidates:
        fields = tuple(candidate.fields.values())
        counted.append(replace(candidate, copy=seen[fields]))
        seen[fields] += 1
    return counted


def _recall(gradings: Sequence[Grading], replies: Replies, reply_tokens: int) -> Spending:
    """Replays stored replies; the estimated cost of the rest, if every first reply can be read."""
    if replies.repair:
        log.warning("%s", replies.repair)
    pending = []
    for grading in gradings:
        while grading.outcome is None and (reply := replies.known.get(key_of(grading.request))) is not None:
            grading.hear(reply)
        pending += [grading.request["body"]["messages"]] if grading.outcome is None else []
    lengths = [len(message["content"].encode()) for messages in pending for message in messages]
    prompt = sum(length // BYTES_PER_TOKEN + 1 + TOKENS_PER_MESSAGE for length in lengths)
    expected = Spending(len(pending), prompt, len(pending) * reply_tokens)
    done = len(gradings) - len(pending)
    log.info("%d of %d grades are known; to be sent, by estimate: %s", done, len(gradings), expected)
    return expected


def _finish(gradings: Sequence[Grading], replies: Replies, config: JudgeConfig, progress: bool) -> Spending:
    """Asks the open requests; returns their cost, which is logged even if it ends early."""
    pending = [grading for grading in gradings if grading.outcome is None]
    known = set(replies.known)
    client = JudgeClient(config, replies) if pending else None  # a complete run needs no server, no key and no package
    try:
        if client:
            asyncio.run(_ask(pending, client, tqdm(total=len(pending), unit="q", disable=None if progress else True)))
    except KeyboardInterrupt:
        done = sum(grading.outcome is not None for grading in gradings)
        flying = client.cut_off if client else 0
        lost = f" {flying} requests were in flight and may be charged." if flying else ""
        text = f"stopped after {done} of {len(gradings)} grades.{lost} The same command resumes: {replies.path}"
        raise Interrupted(text) from None
    finally:
        cost = _spent([reply for key, reply in replies.known.items() if key not in known])
        log.info("spent by this call: %s. Every reply is kept in %s", cost, replies.path)
    failed = [grading for grading in pending if grading.failure]
    for grading in failed[:NAMED]:
        log.warning("%s, run %d: not graded: %s", grading.candidate.key, grading.run + 1, grading.failure)
    return cost


async def _ask(pending: Sequence[Grading], client: JudgeClient, bar: Any) -> None:
    """Finishes all gradings, limited by the client's concurrency. A JudgeError cancels the rest."""
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


def _outcomes(gradings: Sequence[Grading], runs: int) -> dict[str, list[Outcome]]:
    """Outcomes of all runs by key of the candidate; one that lacks a grade in a run is left out."""
    found: dict[str, list[Outcome]] = {}
    for grading in gradings:  # run by run
        outcome = grading.outcome
        if outcome is not None and (outcome.value is not None or outcome.read):
            found.setdefault(grading.candidate.key, []).append(outcome)
    return {key: said for key, said in found.items() if len(said) == runs}


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
    """A judged run as text: headline, the grader's own lines, the judge, and the counts of replies."""
    counts, replies, judge = metrics["counts"], metrics["replies"], metrics["judge"]
    score = "none" if metrics["score"] is None else f"{metrics['score']:.2f}"
    answers = f"{counts['graded']} of {counts['asked']} questions graded"
    yield f"{metrics['benchmark']}: {metrics['metric']} {score}, {answers}"
    yield from grader_of(metrics["benchmark"]).summary(metrics)
    reported = ", ".join(f"{name} ({count} replies)" for name, count in judge["reported"].items()) or "nobody"
    yield f"judge: {reported}; prompt: {judge['prompt']['official'] or judge['prompt']['origin']}"
    odd = f"{replies['refused']} refused, {replies['unreadable']} unreadable, {replies['given_up']} given up"
    failed = replies["failed_tries"]
    yield f"replies: {replies['used']} used, {odd}; {failed} failed tries (these may have been charged)"
