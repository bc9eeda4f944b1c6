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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llava_consensus.errors import Interrupted
from llava_consensus.evaluation.files import ANSWERS, CONFIG, Record, canonical, misread, write_json, write_metrics
from llava_consensus.evaluation.judge import grader_of
from llava_consensus.evaluation.judge.client import (
    JudgeClient,
    JudgeConfig,
    NoReply,
    Replies,
    Spending,
    estimate,
    key_of,
    spent,
)
from llava_consensus.evaluation.judge.grader import Candidate, Grader, JudgePrompt, Outcome, Reply
from llava_consensus.evaluation.progress import counted

log = logging.getLogger(__name__)

GRADES = "grades.json"
NAMED = 5  # answers without a grade that are named


@dataclass(frozen=True)
class Judged:
    """A judged run: its folder, its metrics, and the expected and actual spending of this call."""

    path: Path | None  # None: nothing was sent, only estimated
    metrics: Record | None
    expected: Spending
    spent: Spending


class Grading:
    """The dialogue about one answer in one run: what to ask next, and the outcome once there is one."""

    def __init__(
        self, grader: Grader, prompt: JudgePrompt, candidate: Candidate, run: int, config: JudgeConfig
    ) -> None:
        self.candidate, self.run = candidate, run
        self.heard: dict[str, Reply] = {}  # by the hash of their request
        self.outcome: Outcome | None = candidate.settled
        self.failure = ""
        self._grader, self._prompt, self._config = grader, prompt, config
        self._dialogue = grader.dialogue(candidate)
        self._turn = next(self._dialogue)

    @property
    def request(self) -> dict[str, Any]:
        """The next request: all that can change its reply, and which draw it is."""
        options = {**self._turn.options, **self._config.options}
        body = {
            "model": self._config.model,
            "messages": self._prompt.fill(self.candidate.fields, self._turn.again),
            **{name: value for name, value in options.items() if value is not None},
        }
        return {"url": self._config.place, "body": body, "draw": [self.run, self.candidate.copy, len(self.heard)]}

    def hear(self, reply: Reply) -> None:
        """Takes the reply to `request`."""
        self.heard[key_of(self.request)] = reply
        try:
            self._turn = self._dialogue.send(self._grader.hear(reply))
        except StopIteration as end:
            self.outcome = end.value._replace(model=reply.model)

    def recall(self, replies: Replies) -> None:
        """Replays stored replies."""
        while self.outcome is None and (reply := replies.known.get(key_of(self.request))) is not None:
            self.hear(reply)

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
        JudgeError: the judge cannot be asked; what was heard is stored, and the same call resumes.
        Interrupted: Ctrl-C or a signal that asks to stop; the same.
        ConsensusError: everything else the user can mend, see `errors.py`.
    """
    grader = grader_of(config.benchmark)
    benchmark, prompt = grader.benchmark, grader.prompt(config.prompt_from)
    place = f"{config.answers}, or a file in {benchmark.place(config.data)}"
    with misread(place):
        records = benchmark.read(config.answers, config.data)
        found, counts = grader.candidates(records, config.data)
    candidates = _count_copies(found)
    gradings = [Grading(grader, prompt, one, number, config) for number in range(config.runs) for one in candidates]
    with Replies(config.out) as replies:
        expected = _recall(gradings, replies, grader)
        if dry:
            return Judged(None, None, expected, spent([]))
        folder = _open(config, prompt)
        cost = _finish(gradings, replies, config, progress)
    outcomes = _outcomes(gradings, config.runs)
    with misread(place):
        numbers = grader.report(candidates, outcomes, config.data, config.runs)
    lacking = len(candidates) - len(outcomes)
    used = list({key: reply for grading in gradings for key, reply in grading.heard.items()}.values())
    odd = _odd(gradings, used)
    unreadable = 2 * odd["given_up"] > len(gradings)  # no judge of anything: a default grade is not a score
    metrics = {
        "benchmark": config.benchmark,
        "metric": benchmark.metric,
        "score": None if unreadable else numbers[benchmark.metric],
        "unreadable": unreadable,
        "complete": not counts["missing"] and not lacking and not unreadable,
        "counts": counts | {"graded": len(outcomes), "ungraded": lacking},
        # an alias may move during a run, so the record says in how many replies the server named which model
        "judge": _describe(config, prompt) | {"reported": dict(Counter(str(one.model) for one in used).most_common())},
        "replies": odd,
        "spent": spent(used)._asdict(),
        **numbers,
    }
    write_json(folder / GRADES, grader.grades(candidates, outcomes))
    write_metrics(folder, {name: value for name, value in metrics.items() if name != "extracted"}, metrics["extracted"])
    return Judged(folder, metrics, expected, cost)


def _count_copies(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates with the same fields numbered, so that each is a draw of its own, as in the official scripts."""
    seen: Counter[tuple[str, ...]] = Counter()
    counted = []
    for candidate in candidates:
        fields = tuple(candidate.fields.values())
        counted.append(replace(candidate, copy=seen[fields]))
        seen[fields] += 1
    return counted


def _recall(gradings: Sequence[Grading], replies: Replies, grader: Grader) -> Spending:
    """Replays stored replies and estimates the cost of the rest."""
    if replies.repair:
        log.warning("%s", replies.repair)
    for grading in gradings:
        grading.recall(replies)
    requests = [grading.request for grading in gradings if grading.outcome is None]
    bodies = {key_of(request): request["body"] for request in requests}
    expected = estimate(bodies.values(), grader.reply_tokens)
    done = len(gradings) - len(requests)
    log.info("%d of %d grades are known; to be sent, by estimate: %s", done, len(gradings), expected)
    return expected


def _finish(gradings: Sequence[Grading], replies: Replies, config: JudgeConfig, progress: bool) -> Spending:
    """Asks the open requests; returns their cost, which is logged even if it ends early."""
    pending = [grading for grading in gradings if grading.outcome is None]
    known = set(replies.known)
    client = JudgeClient(config, replies) if pending else None  # a complete run needs no server, no key and no package
    try:
        if client:
            asyncio.run(_ask(pending, client, counted(total=len(pending), unit="q", shown=progress)))
    except KeyboardInterrupt:
        done = sum(grading.outcome is not None for grading in gradings)
        flying = client.cut_off if client else 0
        lost = f" {flying} requests were in flight and may be charged." if flying else ""
        text = f"stopped after {done} of {len(gradings)} grades.{lost} The same command resumes: {replies.path}"
        raise Interrupted(text) from None
    finally:
        cost = spent([reply for key, reply in replies.known.items() if key not in known])
        log.info("spent by this call: %s. Every reply is kept in %s", cost, replies.path)
    failed = [grading for grading in pending if grading.failure]
    for grading in failed[:NAMED]:
        log.warning("%s, run %d: not graded: %s", grading.candidate.key, grading.run + 1, grading.failure)
    return cost


async def _ask(pending: Sequence[Grading], client: JudgeClient, bar: Any) -> None:
    """Finishes all open dialogues, limited by the client's concurrency. A JudgeError cancels the rest."""
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


def _odd(gradings: Sequence[Grading], used: Sequence[Reply]) -> dict[str, int]:
    """Counts of replies: used, refused, unreadable, and failed tries before them."""
    asked = [grading for grading in gradings if grading.heard]
    unread = sum(len(grading.heard) - bool(grading.outcome and grading.outcome.read) for grading in asked)
    return {
        "used": len(used),
        "refused": sum(reply.refused for reply in used),
        "unreadable": unread,
        "given_up": sum(bool(grading.outcome and not grading.outcome.read) for grading in asked),
        "failed_tries": sum(reply.failed_tries for reply in used),
    }


def _describe(config: JudgeConfig, prompt: JudgePrompt) -> dict[str, Any]:
    """All that can change a grade, except the answers."""
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
    grader = grader_of(metrics["benchmark"])
    score = "none" if metrics["score"] is None else f"{metrics['score']:.2f}"
    answers = f"{counts['graded']} of {counts['asked']} questions graded"
    yield f"{metrics['benchmark']}: {metrics['metric']} {score}, {answers}"
    yield from grader.summary(metrics)
    reported = ", ".join(f"{name} ({count} replies)" for name, count in judge["reported"].items()) or "nobody"
    yield f"judge: {reported}; prompt: {judge['prompt']['official'] or judge['prompt']['origin']}"
    odd = f"{replies['refused']} refused, {replies['unreadable']} unreadable, {replies['given_up']} given up"
    failed = replies["failed_tries"]
    yield f"replies: {replies['used']} used, {odd}; {failed} failed tries (these may have been charged)"
