"""How much one call of the judge may spend: in requests, tokens and money.

What is under way counts as it was estimated, what is done as the server counted it, and a try that failed as if it had
been charged, so that the limit holds however many requests are sent at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llava_consensus.errors import OptionError
from llava_consensus.evaluation.judge.cost import Cost, Prices, estimate
from llava_consensus.evaluation.judge.store import Reply

REPLY_TOKENS = 300  # of a reply whose request does not bound it, for the estimate


@dataclass(frozen=True)
class Limits:
    """None is no limit.

    Args:
        requests: sent to the server, tries that fail included.
        tokens: of prompts and replies together.
        dollars: at `prices`.
    """

    requests: int | None = None
    tokens: int | None = None
    dollars: float | None = None
    prices: Prices | None = None

    def __post_init__(self) -> None:
        for option, limit in (
            ("--max-requests", self.requests),
            ("--max-judge-tokens", self.tokens),
            ("--max-cost", self.dollars),
        ):
            if limit is not None and not 0 <= limit < float("inf"):
                raise OptionError(f"{option} {limit} must be a number, 0 or more")
        if self.dollars is not None and self.prices is None:
            raise OptionError(f"--max-cost {self.dollars:g} needs to know what tokens cost: give --judge-price IN OUT")


class Account:
    """What was spent so far, against the limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.requests = 0
        self._prompt = self._reply = 0

    def open(self, body: Mapping[str, Any]) -> Cost | None:
        """Counts a request that is about to go out, as estimated; None where a limit forbids it."""
        longest = body.get("max_tokens", body.get("max_completion_tokens"))
        expected = estimate([body], longest if isinstance(longest, int) else REPLY_TOKENS, None)
        prompt, reply = self._prompt + expected.prompt_tokens, self._reply + expected.completion_tokens
        spent = (self.requests + 1, prompt + reply, self._dollars(prompt, reply))
        limits = (self._limits.requests, self._limits.tokens, self._limits.dollars)
        if any(limit is not None and there > limit for there, limit in zip(spent, limits, strict=True)):
            return None
        self.requests, self._prompt, self._reply = self.requests + 1, prompt, reply
        return expected

    def close(self, expected: Cost, reply: Reply) -> None:
        """Puts what the server counted in the place of the estimate."""
        if reply.prompt_tokens is not None:
            self._prompt += reply.prompt_tokens - expected.prompt_tokens
        if reply.completion_tokens is not None:
            self._reply += reply.completion_tokens - expected.completion_tokens

    def __str__(self) -> str:
        dollars = "" if self._limits.prices is None else f", {self._dollars(self._prompt, self._reply):.4f} dollars"
        return f"{self.requests} requests, {self._prompt + self._reply} tokens{dollars}"

    def _dollars(self, prompt: int, reply: int) -> float:
        return self._limits.prices.of(prompt, reply) if self._limits.prices else 0.0
