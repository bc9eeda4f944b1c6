"""Asks an OpenAI-compatible server through the `openai` package, within limits, and keeps every reply in one file.

The package waits and tries again. Every single try goes through `Client.send`, which holds what the package leaves
open: no try goes out that could pass a limit, each ends after `timeout` seconds however slowly the server talks, a
reply has a largest size and is not compressed (a few bytes could become gigabytes), what is no chat completion counts
as a failed try, and a reply is on the disk before anything else happens to it.

`replies.jsonl` (`Replies`) has a line for each reply, under the hash of all that can change it: server, model,
messages, options, and which of several draws it is. It is read at the start and only ever appended to, so a judge that
was stopped or killed goes on where it was, and an answer that was judged before, under any method, costs nothing again.
"""

import asyncio
import contextvars
import hashlib
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from llava_consensus.errors import ConsensusError, DataError, OptionError, missing_extra
from llava_consensus.evaluation.files import MEND, append, canonical, check_lock, parse, take_lock, whole_lines
from llava_consensus.evaluation.judge.grader import Reply
from llava_consensus.evaluation.judge.secret import KEY, Key, names_a_key

OPENAI = "https://api.openai.com/v1"
NAME, LOCK = "replies.jsonl", "replies.lock"
LARGEST = 4 << 20  # bytes of one reply
COMPLAINT = 300  # characters of a server's complaint that are shown
REFUSALS = ("content_filter", "content_policy", "ResponsibleAIPolicyViolation")
BYTES_PER_TOKEN = 4  # of English under current tokenizers; an estimate, no tokenizer is loaded
TOKENS_PER_MESSAGE = 4  # its frame
REPLY_TOKENS = 300  # of a reply whose request does not bound it, for the estimate

Price = tuple[float, float]  # dollars per million tokens, of prompts and of replies


class JudgeError(ConsensusError):
    """The judge cannot be asked, or not all of it was answered; what was heard is stored."""

    exit_code = 5


class NoReply(Exception):
    """All tries of one request are used up; says why."""


class Stop(BaseException):
    """Carries an error past the openai package, which may take any Exception for a failed try, and pay for another."""


@dataclass(frozen=True)
class JudgeConfig:
    """What is judged, by whom, how patiently and for how much.

    Raises:
        OptionError: for a value out of its bounds, and for a key in a text that is recorded.
    """

    benchmark: str  # one that has a judge
    answers: Path  # LLaVA's answer file, or the official one of the benchmark
    data: Path  # folder that holds `eval/...`
    model: str  # the judge's name on its server
    url: str | None = None  # base URL of an OpenAI-compatible server; None is OPENAI_BASE_URL, or OpenAI's own
    prompt_from: Path | None = None  # the official script, for its prompt; None is our own wording
    runs: int = 1  # how often every answer is judged
    # fields of every request, in place of the official ones; None leaves one out
    options: Mapping[str, Any] = field(default_factory=dict)
    full_answers: Path | None = None  # of the unpruned model, to tell how often both agree
    out: Path = Path("results/judge")  # folder of all judged runs
    concurrency: int = 8  # requests under way at once
    timeout: float = 60.0  # seconds for one try, from the connection to the last byte
    tries: int = 8  # of one request, the first included; the openai package waits in between
    price: Price | None = None  # for the estimate and the sum
    # what one call may send and spend, tries that fail included; None is no limit
    max_requests: int | None = None
    max_tokens: int | None = None  # of prompts and replies together
    max_dollars: float | None = None  # at `price`

    def __post_init__(self) -> None:
        if not self.model:
            raise OptionError("--judge-model is empty: name the judge as its server calls it")
        whole = {"--runs": self.runs, "--concurrency": self.concurrency, "--judge-tries": self.tries}
        for option, count in whole.items():
            if count < 1:
                raise OptionError(f"{option} {count} must be at least 1")
        if not self.timeout > 0:
            raise OptionError(f"--judge-timeout {self.timeout} must be above 0 seconds")
        price_in, price_out = self.price or (None, None)
        amounts = {"--judge-price IN": price_in, "--judge-price OUT": price_out, "--max-cost": self.max_dollars}
        counts = {"--max-requests": self.max_requests, "--max-judge-tokens": self.max_tokens}
        for option, amount in {**amounts, **counts}.items():
            if amount is not None and not 0 <= amount < float("inf"):
                raise OptionError(f"{option} {amount} must be a number, 0 or more")
        if self.max_dollars is not None and self.price is None:
            raise OptionError(f"--max-cost {self.max_dollars:g} needs the price of tokens: give --judge-price IN OUT")
        key = Key(os.environ.get(KEY, ""))
        _check_url(self.place, key)
        _check_options(self.options, key)

    @property
    def place(self) -> str:
        """The base URL."""
        return (self.url or os.environ.get("OPENAI_BASE_URL") or OPENAI).rstrip("/")


def _check_url(url: str, key: Key) -> None:
    """Raises OptionError for what is no base URL, or has a key in it; never shows more of it than the host."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        fine = False
    if not fine:
        raise OptionError("--judge-url (or OPENAI_BASE_URL) must be like http://localhost:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment or key.within(unquote(parts.path)):
        raise OptionError(f"--judge-url at {parts.hostname}: no key in the URL, it is recorded. Set {KEY} instead")


def _check_options(options: Mapping[str, Any], key: Key) -> None:
    for name, value in options.items():
        if names_a_key(name) or key.within(json.dumps([name, value])):
            shown = "KEY=VALUE" if key.within(name) else name
            raise OptionError(f"--judge-option {shown}: no key in an option, it is recorded. Set {KEY} instead")
        try:
            canonical({name: value})
        except ValueError:
            raise OptionError(f"--judge-option {name}={value!r}: must be a JSON value, a finite number") from None


class Spending(NamedTuple):
    """Requests and tokens; dollars where the price is known."""

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


def spending(requests: int, prompt: int, completion: int, price: Price | None, without_usage: int = 0) -> Spending:
    """So many tokens at a price."""
    dollars = None if price is None else (prompt * price[0] + completion * price[1]) / 1e6
    return Spending(requests, prompt, completion, dollars, without_usage)


def estimate(bodies: Iterable[Mapping[str, Any]], reply_tokens: int, price: Price | None) -> Spending:
    """What sending these requests may cost, if every first reply can be read."""
    lengths = [[len(message["content"].encode()) for message in body["messages"]] for body in bodies]
    prompt = sum(one // BYTES_PER_TOKEN + 1 + TOKENS_PER_MESSAGE for messages in lengths for one in messages)
    return spending(len(lengths), prompt, len(lengths) * reply_tokens, price)


def spent(replies: Sequence[Reply], price: Price | None) -> Spending:
    """What the server counted for these replies."""
    prompt = sum(reply.prompt_tokens or 0 for reply in replies)
    completion = sum(reply.completion_tokens or 0 for reply in replies)
    unknown = sum(reply.prompt_tokens is None or reply.completion_tokens is None for reply in replies)
    return spending(len(replies), prompt, completion, price, unknown)


def key_of(request: Mapping[str, Any]) -> str:
    """The hash of a whole request: url, body and draw."""
    return hashlib.sha256(canonical(request).encode()).hexdigest()


class Replies:
    """The replies heard so far, by the hash of their request, and the file they are added to. Held by one process at a
    time.

    Raises:
        BusyError: another process holds it.
        DataError: the file cannot be written, or a line of it is damaged. A last line cut by a kill is dropped.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.known: dict[str, Reply] = {}
        self.repair = ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(folder / LOCK, "the judge's replies")
        except OSError as error:
            raise DataError(f"{self.path}: cannot be written ({error.strerror}). Choose another --out") from None
        try:
            self._load()
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> "Replies":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def add(self, request: Mapping[str, Any], reply: Reply) -> None:
        """Stores a reply; when this returns it is on the disk."""
        check_lock(self._lock, self.path.with_name(LOCK))
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        append(self.path, [{"key": key_of(request), "at": at, "request": request, **reply._asdict()}])
        self.known[key_of(request)] = reply

    def _load(self) -> None:
        lines, end = whole_lines(self.path)
        for number, line in enumerate(lines, start=1):
            row = parse(self.path, number, line, ("key",))
            if row.get("event") in ("sent", "failed"):
                continue  # earlier versions kept a line for each try too; their replies were paid for and are read on
            if not isinstance(row.get("text", 0), str | None):
                raise DataError(f"{self.path}, line {number}: damaged, no text of a reply. {MEND}")
            self.known[row["key"]] = Reply(**{name: row[name] for name in Reply._fields if name in row})
        if end is not None:
            os.truncate(self.path, end)
            self.repair = f"{self.path}: the last line was cut in the middle of a write; dropped it"


@dataclass
class Exchange:
    """One request and what became of its tries."""

    request: Mapping[str, Any]
    tries: int = 0
    limited: bool = False  # a try was turned away for the server's rate limit
    reply: Reply | None = None


UNDER_WAY: contextvars.ContextVar[Exchange] = contextvars.ContextVar("the exchange a try belongs to")


class Client:
    """Sends requests and stores what comes back. Use it inside one event loop, then `close` it.

    `cut_off` counts tries that were under way when it was stopped: they may be charged.
    """

    def __init__(self, config: JudgeConfig, replies: Replies) -> None:
        try:
            import openai
        except ImportError as error:
            raise missing_extra("a judge is asked through the openai package", "judge") from error
        self._key = Key(os.environ.get(KEY, ""))
        if not self._key and config.place == OPENAI:
            raise OptionError(f"{KEY} is not set: {OPENAI} wants a key. It is read from the environment only")
        self._openai, self._config, self._replies = openai, config, replies
        self._spent = spending(0, 0, 0, config.price)  # by this call; a try under way or failed counts as estimated
        self.cut_off = 0
        self._unheard = 0  # requests in a row that used up all their tries
        self._ended = ""  # why nothing more is asked
        self._free = asyncio.Semaphore(config.concurrency)
        client = self

        class Http(openai.DefaultAsyncHttpxClient):
            async def send(self, request: Any, **options: Any) -> Any:
                return await client.send(super().send, request, options)

        self._api = openai.AsyncOpenAI(
            api_key=self._key.reveal() or "none",
            base_url=config.place,
            timeout=config.timeout,
            max_retries=config.tries - 1,
            http_client=Http(follow_redirects=False, headers={"Accept-Encoding": "identity"}),
        )

    async def close(self) -> None:
        """Ends all connections."""
        await self._api.close()

    async def ask(self, request: Mapping[str, Any]) -> Reply:
        """The reply to a request (url, body, draw), from the store if it was heard before.

        Raises:
            NoReply: all tries failed.
            JudgeError: asking on is of no use: no access, no credit, an unknown model, a server that answers nobody, a
                limit that is reached.
        """
        known = self._replies.known.get(key_of(request))
        if known is not None:
            return known
        async with self._free:
            if self._ended:  # while this one waited
                raise JudgeError(self._ended)
            exchange = Exchange(request)
            UNDER_WAY.set(exchange)
            complaint, hopeless = await self._try(exchange)
            if exchange.reply is not None:
                self._unheard = 0
                return exchange.reply
            self._unheard += 1
            if hopeless:
                self._ended = complaint
            elif self._unheard >= max(3, self._config.concurrency):
                self._ended = f"{self._config.place} answers nobody: {self._unheard} requests in a row failed"
            if self._ended:
                raise JudgeError(self._ended)
        raise NoReply(f"{exchange.tries} tries, the last: {complaint}")

    async def _try(self, exchange: Exchange) -> tuple[str, bool]:
        """Lets the package try until there is a reply; what was wrong, and whether it will stay so. Only texts without
        the key leave this function: an error of the package may hold it.
        """
        body = exchange.request["body"]
        options = {name: value for name, value in body.items() if name not in ("model", "messages")}
        create: Any = self._api.chat.completions.with_raw_response.create
        try:
            await create(model=body["model"], messages=body["messages"], extra_body=options)
        except Stop as stop:
            raise stop.args[0] from None
        except self._openai.APITimeoutError:
            return f"no reply within {self._config.timeout:g} seconds", False
        except self._openai.APIStatusError as error:
            status, text = error.status_code, self._shown(f"{error.status_code} {error.message}")
            if status in (400, 422) and any(word in error.message for word in REFUSALS):
                self._store(exchange, Reply(None, refused=True))
            if 300 <= status < 400:
                text = f"{status}, a redirect, and none is followed: give the URL it leads to"
            passing = status >= 500 or status in (408, 409, 425, 429)
            hopeless = not passing or (status == 429 and "insufficient_quota" in error.message)
            return f"{self._config.place} will not judge: {text}" if hopeless else text, hopeless
        except self._openai.APIConnectionError as error:
            return f"no connection ({self._shown(str(error.__cause__ or error))})", False
        except Exception as error:  # whatever else the package and its connection can raise
            return self._shown(f"{type(error).__name__}: {error}"), False
        return "", False

    async def send(self, send: Callable[..., Awaitable[Any]], request: Any, options: Mapping[str, Any]) -> Any:
        """One try of the exchange under way: the server's whole response, its reply stored.

        Args:
            send: of the HTTP client of the openai package.
            request, options: what the package hands to it.
        Raises:
            Stop: it could pass a limit, or the reply cannot be stored.
            Exception: the HTTP library's own, after which the package tries again.
        """
        exchange = UNDER_WAY.get()
        expected = self._reserve(exchange.request["body"])
        exchange.tries += 1
        errors: Any = import_module(type(request).__module__.partition(".")[0])  # httpx, or httpx2 of openai 3
        try:
            response = await asyncio.wait_for(_receive(send, request, options), self._config.timeout)
            reply = read_completion(response.content) if response.status_code == 200 else None
        except asyncio.CancelledError:
            self.cut_off += 1
            raise
        except asyncio.TimeoutError:
            raise errors.ReadTimeout("too slow", request=request) from None
        except (ValueError, RecursionError) as error:
            raise errors.RemoteProtocolError(f"not a chat completion: {error}", request=request) from None
        if reply is not None:
            counted = (reply.prompt_tokens, reply.completion_tokens)
            self._count(0, *(0 if n is None else n - m for n, m in zip(counted, expected, strict=True)))
            try:
                self._store(exchange, reply)
            except ConsensusError as error:
                raise Stop(error) from None
        elif response.status_code == 429:
            exchange.limited = True
            if b"insufficient_quota" in response.content:
                response.headers["x-should-retry"] = "false"  # waiting brings no credit
        return response

    def _reserve(self, body: Mapping[str, Any]) -> tuple[int, int]:
        """Counts a try that is about to go out; the tokens of prompt and reply that are expected."""
        longest = body.get("max_tokens", body.get("max_completion_tokens"))
        expected = estimate([body], longest if isinstance(longest, int) else REPLY_TOKENS, None)[1:3]
        before, config = self._spent, self._config
        self._count(1, *expected)
        after = self._spent
        amounts = (after.requests, after.prompt_tokens + after.completion_tokens, after.dollars or 0.0)
        limits = (config.max_requests, config.max_tokens, config.max_dollars)
        if any(limit is not None and amount > limit for amount, limit in zip(amounts, limits, strict=True)):
            self._spent = before
            raise Stop(JudgeError(f"the limit is reached, {before} so far. Raise it, and the same call goes on"))
        return expected

    def _count(self, requests: int, prompt: int, completion: int) -> None:
        before = self._spent
        sums = (before.requests + requests, before.prompt_tokens + prompt, before.completion_tokens + completion)
        self._spent = spending(*sums, self._config.price)

    def _store(self, exchange: Exchange, reply: Reply) -> None:
        text, model = (None if one is None else self._key.hide(one) for one in (reply.text, reply.model))
        exchange.reply = reply._replace(
            text=text, model=model, limited=exchange.limited, failed_tries=exchange.tries - 1
        )
        self._replies.add(exchange.request, exchange.reply)

    def _shown(self, complaint: str) -> str:
        return self._key.hide(complaint)[:COMPLAINT]


async def _receive(send: Callable[..., Awaitable[Any]], request: Any, options: Mapping[str, Any]) -> Any:
    """A whole response of at most LARGEST bytes.

    Raises:
        ValueError: it is longer, or compressed.
    """
    response = await send(request, **{**options, "stream": True})
    try:
        coding = response.headers.get("content-encoding", "identity")
        if coding != "identity":
            raise ValueError(f"the reply is compressed ({coding[:20]}), which was not asked for")
        content = bytearray()
        async for part in response.aiter_raw():
            content += part
            if len(content) > LARGEST:
                raise ValueError(f"the reply is longer than {LARGEST:,} bytes")
    finally:
        await response.aclose()
    return type(response)(response.status_code, headers=response.headers, content=bytes(content), request=request)


def read_completion(content: bytes) -> Reply:
    """A chat completion as the server sent it.

    Raises:
        ValueError: it is none.
        RecursionError: it is nested too deeply to be read.
    """
    raw = json.loads(content, parse_constant=_no_number)
    try:
        choice = raw["choices"][0]
        message = choice["message"]
        text = message["content"]
        refused = bool(message.get("refusal")) or choice.get("finish_reason") == "content_filter"
        usage, model = raw.get("usage") or {}, raw.get("model")
        tokens = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"no choices[0].message.content: {type(error).__name__}") from None
    if not isinstance(text, str | None):
        raise ValueError(f"the content is a {type(text).__name__}")
    prompt, completion = (count if isinstance(count, int) else None for count in tokens)
    return Reply(text, refused, model if isinstance(model, str) else None, prompt, completion)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")
