"""What judging costs: an estimate before anything is sent, and the sum of what the server counted afterwards."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from llava_consensus.errors import OptionError
from llava_consensus.evaluation.judge.store import Reply

BYTES_PER_TOKEN = 4  # of English under current tokenizers; an estimate, no tokenizer is loaded
TOKENS_PER_MESSAGE = 4  # its frame


@dataclass(frozen=True)
class Prices:
    """Dollars per million tokens, of prompts and of replies."""

    prompt: float
    reply: float

    def __post_init__(self) -> None:
        for name, price in (("IN", self.prompt), ("OUT", self.reply)):
            if not 0 <= price < float("inf"):
                raise OptionError(f"--judge-price {name}={price} must be dollars per million tokens, 0 or more")

    def of(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Dollars."""
        return (prompt_tokens * self.prompt + completion_tokens * self.reply) / 1e6


class Cost(NamedTuple):
    """Requests and tokens; dollars where prices are known."""

    requests: int
    prompt_tokens: int
    completion_tokens: int
    dollars: float | None
    without_usage: int = 0  # replies whose tokens the server did not count

    def __str__(self) -> str:
        money = "" if self.dollars is None else f", {self.dollars:.4f} dollars"
        unknown = f" ({self.without_usage} replies without a count)" if self.without_usage else ""
        tokens = f"{self.prompt_tokens} tokens in, {self.completion_tokens} out"
        return f"{self.requests} requests, {tokens}{unknown}{money}"


def estimate(bodies: Iterable[Mapping[str, Any]], reply_tokens: int, prices: Prices | None) -> Cost:
    """What sending these requests may cost, if every first reply can be read."""
    requests = tokens = 0
    for body in bodies:
        requests += 1
        for message in body["messages"]:
            tokens += len(message["content"].encode()) // BYTES_PER_TOKEN + 1 + TOKENS_PER_MESSAGE
    return _cost(requests, tokens, requests * reply_tokens, prices)


def spent(replies: Sequence[Reply], prices: Prices | None) -> Cost:
    """What the server counted for these replies."""
    tokens = [sum(count or 0 for count in counts) for counts in zip(*(reply[3:5] for reply in replies), strict=True)]
    prompt, completion = tokens or (0, 0)
    unknown = sum(reply.prompt_tokens is None or reply.completion_tokens is None for reply in replies)
    return _cost(len(replies), prompt, completion, prices)._replace(without_usage=unknown)


def _cost(requests: int, prompt: int, completion: int, prices: Prices | None) -> Cost:
    return Cost(requests, prompt, completion, prices.of(prompt, completion) if prices else None)
