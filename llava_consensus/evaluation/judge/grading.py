"""What a judged run is told, and the dialogue about one answer: where it stands, what to ask next, what it came to."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llava_consensus.errors import OptionError
from llava_consensus.evaluation.files import canonical
from llava_consensus.evaluation.judge.client import Client, NoReply, Server
from llava_consensus.evaluation.judge.cost import Prices
from llava_consensus.evaluation.judge.grader import Grader, Heard, Outcome, Sample, Verdict
from llava_consensus.evaluation.judge.limits import Limits
from llava_consensus.evaluation.judge.prompts import Prompt
from llava_consensus.evaluation.judge.secret import KEY, Key, names_a_key
from llava_consensus.evaluation.judge.store import Replies, Reply, key_of


@dataclass(frozen=True)
class JudgeConfig:
    """What is judged, by whom.

    Args:
        benchmark: one that has a judge.
        answers: LLaVA's answer file, or the official one of the benchmark.
        data: folder that holds `eval/...`.
        server: who is asked.
        prompt_from: the official script, for its prompt; None is our own wording.
        runs: how often every answer is judged.
        options: of the request, instead of the official ones; None leaves one out.
        prices: for the estimate and the sum.
        full_answers: those of the unpruned model, for the agreement with them.
        out: folder of all judged runs.
        limits: on what one call may spend.
    """

    benchmark: str
    answers: Path
    data: Path
    server: Server
    prompt_from: Path | None = None
    runs: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    prices: Prices | None = None
    full_answers: Path | None = None
    out: Path = Path("results/judge")
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise OptionError(f"--runs {self.runs} must be at least 1")
        key = Key(os.environ.get(KEY, ""))
        for name, value in self.options.items():
            if names_a_key(name) or key.within(json.dumps([name, value])):
                shown = "KEY=VALUE" if key.within(name) else name
                raise OptionError(f"--judge-option {shown}: no key in an option, it is recorded. Set {KEY} instead")
            try:
                canonical({name: value})
            except ValueError:
                raise OptionError(f"--judge-option {name}={value!r}: must be a JSON value, a finite number") from None


class Grading:
    """The dialogue about one answer in one run: what to ask next, and the outcome once there is one."""

    def __init__(self, grader: Grader, prompt: Prompt, sample: Sample, run: int, config: JudgeConfig) -> None:
        self.sample, self.run = sample, run
        self.heard: dict[str, Reply] = {}
        self.outcome: Outcome | None = sample.settled
        self.failure = ""
        self._grader, self._prompt, self._config = grader, prompt, config
        self._dialogue = grader.dialogue(sample)
        self._turn = next(self._dialogue)

    @property
    def request(self) -> dict[str, Any]:
        """The next request: all that can change its reply, and which draw it is."""
        options = {**self._turn.options, **self._config.options}
        body = {
            "model": self._config.server.model,
            "messages": self._prompt.fill(self.sample.fields, self._turn.again),
            **{name: value for name, value in options.items() if value is not None},
        }
        return {"url": self._config.server.place, "body": body, "draw": [self.run, self.sample.copy, len(self.heard)]}

    def hear(self, reply: Reply) -> None:
        """Takes the reply to `request`."""
        self.heard[key_of(self.request)] = reply
        try:
            self._turn = self._dialogue.send(Heard(self._grader.hear(reply.text), reply.limited))
        except StopIteration as end:
            self.outcome = end.value

    def recall(self, replies: Replies) -> None:
        """Goes on as far as stored replies reach."""
        while self.outcome is None and (reply := replies.known.get(key_of(self.request))) is not None:
            self.hear(reply)

    async def finish(self, client: Client) -> None:
        """Goes on to the outcome, or notes why there is none."""
        try:
            while self.outcome is None:
                self.hear(await client.ask(self.request))
        except NoReply as error:
            self.failure = str(error)

    @property
    def verdict(self) -> Verdict | None:
        """None where the answer stays without a grade."""
        if self.outcome is None or (self.outcome.value is None and not self.outcome.read):
            return None
        models = [reply.model for reply in self.heard.values()]
        return Verdict(self.outcome.value, self.outcome.content, models[-1] if models else None)
