"""Asks an OpenAI-compatible server, and never longer or oftener than it was told to.

One `Client` per judged run, on the `openai` package (extra `judge`). At most `concurrency` requests are under way, each
try ends after `timeout` seconds whatever the server does, tries are bounded and further and further apart, and a server
that answers nobody stops the run, as does a limit on what is spent (`limits.py`). Everything sent and heard goes
through `store.py` first. The key comes from the environment (OPENAI_API_KEY) and is taken out of every text that is
stored or shown (`secret.py`).
"""

import asyncio
import email.utils
import json
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from llava_consensus.errors import ConsensusError, OptionError, missing_extra
from llava_consensus.evaluation.judge.limits import Account, Limits
from llava_consensus.evaluation.judge.secret import KEY, Key
from llava_consensus.evaluation.judge.store import Replies, Reply, key_of
from llava_consensus.evaluation.judge.wire import bounded_client

OPENAI = "https://api.openai.com/v1"
LONGEST_PAUSE = 120.0  # seconds, whatever the server wishes
SHOWN = 300  # characters of a server's complaint
REFUSALS = ("content_filter", "content_policy", "ResponsibleAIPolicyViolation")


class JudgeError(ConsensusError):
    """The judge cannot be asked, or not all of it was answered; what was heard is stored."""

    exit_code = 5


class NoReply(Exception):
    """All tries of one request are used up; says why."""


@dataclass(frozen=True)
class Server:
    """Who is asked and how patiently.

    Args:
        model: the judge's name on that server.
        url: base URL of an OpenAI-compatible server; None is OPENAI_BASE_URL, or OpenAI's own.
        concurrency: requests under way at once.
        timeout: seconds for one try, from the connection to the last byte.
        tries: of one request, the first included.
        pause: seconds before the second try; doubled before every further one, unless the server names its own.
    """

    model: str
    url: str | None = None
    concurrency: int = 8
    timeout: float = 60.0
    tries: int = 6
    pause: float = 1.0

    def __post_init__(self) -> None:
        if not self.model:
            raise OptionError("--judge-model is empty: name the judge as its server calls it")
        for name in ("concurrency", "tries"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("timeout", "pause"):
            if not getattr(self, name) > 0:
                raise OptionError(f"{name}={getattr(self, name)} must be above 0 seconds")
        _check_url(self.place)

    @property
    def place(self) -> str:
        """The base URL."""
        return (self.url or os.environ.get("OPENAI_BASE_URL") or OPENAI).rstrip("/")


class Client:
    """Sends requests, stores what comes back, gives up in time. Use it inside one event loop, then `close` it."""

    def __init__(self, server: Server, replies: Replies, limits: Limits) -> None:
        try:
            import openai
        except ImportError as error:
            raise missing_extra("a judge is asked through the openai package", "judge") from error
        self._key = Key(os.environ.get(KEY, ""))
        if not self._key and server.place == OPENAI:
            raise OptionError(f"{KEY} is not set: {OPENAI} wants a key. It is read from the environment only")
        self._openai, self._server, self._replies = openai, server, replies
        self._account = Account(limits)
        replies.hide = self._key.hide_all
        self._api = openai.AsyncOpenAI(
            api_key=self._key.reveal() or "none",
            base_url=server.place,
            timeout=server.timeout,
            max_retries=0,
            http_client=bounded_client(openai),
        )
        self._free = asyncio.Semaphore(server.concurrency)
        self._unheard = 0  # requests in a row that used up all their tries

    async def close(self) -> None:
        """Ends all connections."""
        await self._api.close()

    async def ask(self, request: Mapping[str, Any]) -> Reply:
        """The reply to a request (url, body, draw), from the store if it was heard before.

        Raises:
            NoReply: all tries failed.
            JudgeError: asking on is of no use: no access, no credit, an unknown model, a server that answers nobody.
        """
        key = key_of(request)
        if key in self._replies.known:
            return self._replies.known[key]
        async with self._free:
            return await self._persist(key, request)

    async def _persist(self, key: str, request: Mapping[str, Any]) -> Reply:
        """Tries until there is a reply, then stores it."""
        limited, last = False, Failure("")
        for number in range(self._server.tries):
            if number:
                await asyncio.sleep(self._pause(last, number))
            if self._unheard >= max(3, self._server.concurrency):
                raise JudgeError(f"{self._server.place} answers nobody: {self._unheard} requests in a row failed")
            expected = self._account.open(request["body"])
            if expected is None:
                raise JudgeError(f"the limit is reached, {self._account} so far. Raise it, and the same call goes on")
            self._replies.sent(key)
            raw, found = await self._try(request["body"])
            if isinstance(found, Reply):
                self._account.close(expected, found)
                self._unheard = 0
                found = found._replace(limited=limited)
                self._replies.add(key, request, found, raw, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
                return found
            self._replies.fail(key, found.reason)
            if found.hopeless:
                raise JudgeError(f"{self._server.place} will not judge: {found.reason}")
            limited, last = limited or found.limited, found
        self._unheard += 1
        raise NoReply(f"{self._server.tries} tries, the last: {last.reason}")

    async def _try(self, body: Mapping[str, Any]) -> tuple[Any, "Reply | Failure"]:
        """One request on the wire: what came back, and what it means."""
        create: Any = self._api.chat.completions.with_raw_response.create
        options = {name: value for name, value in body.items() if name not in ("model", "messages")}
        sending = create(model=body["model"], messages=body["messages"], extra_body=options)
        try:
            response = await asyncio.wait_for(sending, self._server.timeout)
            raw = self._key.hide_all(json.loads(response.http_response.content, parse_constant=_no_number))
            return raw, read(raw)
        except (asyncio.TimeoutError, self._openai.APITimeoutError):
            return None, Failure(f"no reply within {self._server.timeout:g} seconds")
        except (ValueError, RecursionError) as error:
            return None, Failure(f"not a chat completion ({self._key.hide(str(error))[:SHOWN]})")
        except self._openai.APIStatusError as error:
            text = self._key.hide(f"{error.status_code} {error.message}")[:SHOWN]
            if error.status_code in (400, 422) and any(word in error.message for word in REFUSALS):
                return {"error": text}, Reply(None, True, None, None, None, False)
            return None, _of_status(error.status_code, text, error.response.headers)
        except self._openai.APIConnectionError as error:
            return None, Failure(f"no connection ({self._key.hide(str(error.__cause__ or error))[:SHOWN]})")
        except Exception as error:  # whatever the library and its connection can raise; it may name the key
            return None, Failure(self._key.hide(f"{type(error).__name__}: {error}")[:SHOWN])

    def _pause(self, last: "Failure", number: int) -> float:
        """Seconds before try `number`: what the server wished, else doubling, with chance so that not all come back
        at once."""
        own = self._server.pause * 2 ** (number - 1) * random.uniform(1, 1.5)
        return min(own if last.wait is None else last.wait, LONGEST_PAUSE)


class Failure(NamedTuple):
    """A try that got no usable reply."""

    reason: str
    wait: float | None = None  # seconds the server wishes to be left alone
    limited: bool = False
    hopeless: bool = False


def read(raw: Any) -> Reply:
    """A chat completion as the server sent it.

    Raises:
        ValueError: it is none.
    """
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
    return Reply(text, refused, model if isinstance(model, str) else None, prompt, completion, limited=False)


def _check_url(url: str) -> None:
    """Raises OptionError for what is no base URL, or has a key in it; never shows more of it than the host."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        fine = False
    if not fine:
        raise OptionError("--judge-url (or OPENAI_BASE_URL) must be like http://localhost:8000/v1")
    within = Key(os.environ.get(KEY, "")).within(unquote(parts.path))
    if parts.username or parts.password or parts.query or parts.fragment or within:
        raise OptionError(f"--judge-url at {parts.hostname}: no key in the URL, it is recorded. Set {KEY} instead")


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


def _of_status(status: int, text: str, headers: Mapping[str, str]) -> Failure:
    """What an HTTP error means: come back later, or never."""
    if 300 <= status < 400:
        return Failure(f"{status}, a redirect, and none is followed: give the URL it leads to", hopeless=True)
    if status == 429:
        return Failure(text, _wish(headers), limited=True, hopeless="insufficient_quota" in text)
    return Failure(text, _wish(headers), hopeless=status < 500 and status not in (408, 409, 425))


def _wish(headers: Mapping[str, str]) -> float | None:
    """Retry-After in seconds, given as such or as a date; None where it is absent or nonsense."""
    wish = headers.get("retry-after")
    if wish is None:
        return None
    try:
        seconds = float(wish)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(wish).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return max(0.0, seconds) if seconds == seconds else None
