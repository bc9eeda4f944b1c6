"""Asks an OpenAI-compatible server through the `openai` package, which retries and times out, within limits.

`replies.jsonl` has a line for each reply, under the hash of all that can change it: server, model, messages, options,
and which of several draws it is. It is only ever appended to, so a judge that was stopped or killed resumes, and an
answer that was judged before, under any method, costs nothing again. The key is read from the environment and is
written nowhere.
"""

import asyncio
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llava_consensus.errors import ConsensusError, DataError, OptionError, missing_extra
from llava_consensus.evaluation.files import MEND, append, canonical, parse_lines, take_lock, whole_lines
from llava_consensus.evaluation.judge.grader import Reply

KEY = "OPENAI_API_KEY"
NAMES_A_KEY = re.compile(r"api.?key|authori[sz]ation|password|secret|bearer|extra_(headers|query)", re.I)
OPENAI = "https://api.openai.com/v1"
NAME, LOCK = "replies.jsonl", "replies.lock"
COMPLAINT = 300  # characters of a server's error message that are shown
# of a content filter, in the error messages of OpenAI, Azure and servers like them
REFUSALS = re.compile(r"content.?(filter|policy)|ResponsibleAI|moderation|safety|flagged|prohibited", re.I)
OF_THIS_REQUEST = (400, 403, 413, 422)  # may be about one request only: too long, invalid, refused
FEWEST = 3  # requests that must fail, with none answered, before the server is given up


class JudgeError(ConsensusError):
    """The judge cannot be asked, or not all of it was answered; every reply is stored."""

    exit_code = 5


class NoReply(Exception):
    """A request without a reply; `own` if the reason may be this very request."""

    def __init__(self, why: str, own: bool = False) -> None:
        super().__init__(why)
        self.own = own


@dataclass(frozen=True)
class JudgeConfig:
    """Configuration of a judged run.

    Raises:
        OptionError: for a value out of its bounds, and for a key in what is recorded.
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
    out: Path = Path("results/judge")  # folder of all judged runs
    concurrency: int = 8  # requests in flight at once
    timeout: float = 60.0  # seconds a server may be silent, as the openai package counts them
    tries: int = 8  # of one request, the first included
    max_requests: int | None = None  # of one call, retries included; None is no limit

    def __post_init__(self) -> None:
        if not self.model:
            raise OptionError("--judge-model is empty: name the judge as its server calls it")
        whole = {"--runs": self.runs, "--concurrency": self.concurrency, "--judge-tries": self.tries}
        for option, count in whole.items():
            if count < 1:
                raise OptionError(f"{option} {count} must be at least 1")
        if not self.timeout > 0:
            raise OptionError(f"--judge-timeout {self.timeout} must be above 0 seconds")
        if self.max_requests is not None and self.max_requests < 0:
            raise OptionError(f"--max-requests {self.max_requests} must be 0 or more")
        check_url(self.place)
        key = os.environ.get(KEY)
        for name, value in self.options.items():
            if NAMES_A_KEY.search(name) or (key and key in f"{name} {value}"):
                raise OptionError(f"--judge-option: no key in an option, it is recorded. Set {KEY} instead")
            try:
                canonical({name: value})
            except ValueError:
                raise OptionError(f"--judge-option {name}={value!r}: must be a JSON value, a finite number") from None

    @property
    def place(self) -> str:
        return (self.url or os.environ.get("OPENAI_BASE_URL") or OPENAI).rstrip("/")


def check_url(url: str, option: str = "--judge-url") -> None:
    """Raises OptionError for what is no base URL, or carries a key; shows no more of it than the host."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        fine = False
    if not fine:
        raise OptionError(f"{option} (or OPENAI_BASE_URL) must be like http://localhost:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise OptionError(f"{option} at {parts.hostname}: no key in the URL, it is recorded. Set {KEY} instead")


def key_of(request: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(request).encode()).hexdigest()


class Replies:
    """The replies so far, by the hash of their request, and the file they are appended to. One process at a time.

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
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        append(self.path, [{"key": key_of(request), "at": at, "request": request, **reply._asdict()}])
        self.known[key_of(request)] = reply

    def _load(self) -> None:
        lines, end = whole_lines(self.path)
        for number, row in enumerate(parse_lines(self.path, lines, ("key",)), start=1):
            if row.get("event") in ("sent", "failed"):
                continue  # of earlier versions, which kept a line for each try too
            if not isinstance(row.get("text", 0), str | None):
                raise DataError(f"{self.path}, line {number}: damaged, no text of a reply. {MEND}")
            self.known[row["key"]] = Reply(**{name: row[name] for name in Reply._fields if name in row})
        if end is not None:
            os.truncate(self.path, end)
            self.repair = f"{self.path}: the last line was cut in the middle of a write; dropped it"


class JudgeClient:
    """Sends requests and stores the replies. Use it inside one event loop, then `close` it."""

    def __init__(self, config: JudgeConfig, replies: Replies) -> None:
        try:
            import openai
        except ImportError as error:
            raise missing_extra("a judge is asked through the openai package", "judge") from error
        self._key = os.environ.get(KEY, "").strip()
        if not self._key and config.place == OPENAI:
            raise OptionError(f"{KEY} is not set: {OPENAI} wants a key. It is read from the environment only")
        if not self._key.isascii() or not self._key.isprintable() or " " in self._key:
            raise OptionError(f"{KEY} has a character that cannot be sent. Set only the key, without blanks")
        self._openai, self._config, self._replies = openai, config, replies
        self._api = openai.AsyncOpenAI(
            api_key=self._key or "none",
            base_url=config.place,
            timeout=config.timeout,
            http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False),
        )
        self.cut_off = 0  # requests that were cancelled, which may be charged
        self._sent = self._reserved = 0  # tries of this call, and those that requests in flight may still take
        self._heard = self._failed = 0  # replies, and requests in a row without one
        self._ended = ""  # why nothing more is asked
        self._free = asyncio.Semaphore(config.concurrency)

    async def close(self) -> None:
        await self._api.close()

    async def ask(self, request: Mapping[str, Any]) -> Reply:
        """The reply to a request (url, body, draw), from the store if it is there.

        Raises:
            NoReply: all tries failed, or the server refuses this request.
            JudgeError: there is no use in asking on: no access, no credit, an unknown model, a server that fails
                all requests, a limit that is reached.
        """
        known = self._replies.known.get(key_of(request))
        if known is not None:
            return known
        async with self._free:
            tries = sent = await self._reserve()
            try:
                reply, sent = await self._send(request, tries)
            except NoReply as error:
                self._failed += not (error.own and self._heard)
                if self._failed < max(FEWEST, self._config.concurrency):
                    raise
                self._ended = f"{self._config.place} answers nobody: {self._failed} requests failed, the last: {error}"
                raise JudgeError(self._ended) from None
            except JudgeError as error:
                self._ended = str(error)
                raise
            except asyncio.CancelledError:
                self.cut_off += 1
                raise
            finally:
                self._reserved, self._sent = self._reserved - tries, self._sent + sent
            self._heard, self._failed = self._heard + 1, 0
            return reply

    async def _reserve(self) -> int:
        """The tries of the next request, as soon as it fits into the limit beside those in flight."""
        limit, tries = self._config.max_requests, self._config.tries
        while not self._ended:
            left = tries if limit is None else min(tries, limit - self._sent - self._reserved)
            if left > 0:
                self._reserved += left
                return left
            if self._reserved:
                await asyncio.sleep(0.02)
            else:
                self._ended = f"the limit is reached, {self._sent} requests so far. Raise it, and the same call resumes"
        raise JudgeError(self._ended)

    async def _send(self, request: Mapping[str, Any], tries: int) -> tuple[Reply, int]:
        """The reply to a request, stored, and the number of tries."""
        body, place = request["body"], self._config.place
        options = {name: value for name, value in body.items() if name not in ("model", "messages")}
        create: Any = self._api.with_options(max_retries=tries - 1).chat.completions.with_raw_response.create
        try:
            response = await create(model=body["model"], messages=body["messages"], extra_body=options)
            taken = getattr(response, "retries_taken", 0)
            reply = read_completion(response.text)._replace(failed_tries=taken)
        except self._openai.APIStatusError as error:
            status, text = error.status_code, self._shown(f"{error.status_code} {error.message}")
            if status in OF_THIS_REQUEST and REFUSALS.search(error.message):
                reply, taken = Reply(None, refused=True), 0
            elif status == 400 and "max_tokens" in error.message and "max_completion_tokens" in error.message:
                raise JudgeError(
                    f"{place} takes no max_tokens for this judge: give --judge-option max_tokens=null "
                    "--judge-option max_completion_tokens=1000"
                ) from None
            elif status in (401, 404) or 300 <= status < 400 or "insufficient_quota" in error.message:
                raise JudgeError(f"{place} will not judge: {text}") from None
            else:
                raise NoReply(text, status in OF_THIS_REQUEST) from None
        except self._openai.APITimeoutError:
            raise NoReply(f"{tries} tries, no reply within {self._config.timeout:g} seconds") from None
        except (self._openai.OpenAIError, ValueError, RecursionError) as error:
            raise NoReply(self._shown(f"{type(error).__name__}: {error.__cause__ or error}")) from None
        self._replies.add(request, reply)
        return reply, 1 + taken

    def _shown(self, complaint: str) -> str:
        """A server's error message without the key, which it may quote."""
        return (complaint.replace(self._key, "[key]") if self._key else complaint)[:COMPLAINT]


def read_completion(content: str) -> Reply:
    """A chat completion as the server sent it. A refusal has no text, as if it had come with an error status.

    Raises:
        ValueError, RecursionError: it is none.
    """
    try:
        raw = json.loads(content)
        choice = raw["choices"][0]
        message = choice["message"]
        text = message["content"]
        refused = bool(message.get("refusal")) or choice.get("finish_reason") == "content_filter"
        usage, model = raw.get("usage") or {}, raw.get("model")
        tokens = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"not a chat completion: {type(error).__name__}") from None
    if not isinstance(text, str | None):
        raise ValueError(f"not a chat completion: the content is a {type(text).__name__}")
    prompt, completion = (count if type(count) is int and count >= 0 else None for count in tokens)
    return Reply(None if refused else text, refused, model if isinstance(model, str) else None, prompt, completion)
