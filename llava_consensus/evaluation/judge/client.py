"""Asks an OpenAI-compatible server through the `openai` package, which retries and times out.

`replies.jsonl` has a line for each reply, under the hash of all that can change it: server, model, messages, options,
and which of several draws it is. It is only ever appended to, so a judge that was stopped or killed resumes, and an
answer that was judged before, under any method, costs nothing again. The key is read from the environment and is
written nowhere.
"""

import asyncio
import hashlib
import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llava_consensus.errors import ConsensusError, DataError, OptionError, missing_extra
from llava_consensus.evaluation.files import MEND, append, canonical, parse_lines, take_lock, whole_lines
from llava_consensus.evaluation.judge.grader import Reply

log = logging.getLogger(__name__)

KEY = "OPENAI_API_KEY"
OPENAI = "https://api.openai.com/v1"
NAME, LOCK = "replies.jsonl", "replies.lock"
COMPLAINT = 300  # characters of a server's error message that are printed
# of a content filter, in the error messages of OpenAI, Azure and servers like them
REFUSALS = re.compile(r"content.?(filter|policy)|ResponsibleAI|moderation|safety|flagged|prohibited", re.I)
OF_THIS_REQUEST = (400, 403, 413, 422)  # may be about one request only: too long, invalid, refused
FEWEST = 3  # requests in a row that must fail before the server is given up
NEW_LIMIT = "max_completion_tokens"
OTHER_LIMIT = f". Give --judge-option max_tokens=null --judge-option {NEW_LIMIT}=1000"


class JudgeError(ConsensusError):
    """The judge cannot be asked, or not all of it was answered; every reply is stored."""

    exit_code = 5


class NoReply(Exception):
    """A request without a reply."""


@dataclass(frozen=True)
class JudgeConfig:
    """Configuration of a judged run. OptionError for a value out of its bounds, and for a key in recorded text."""

    benchmark: str  # one that has a judge
    answers: Path  # LLaVA's answer file, or the official one of the benchmark
    data: Path  # folder that holds `eval/...`
    model: str  # the judge's name on its server
    url: str | None = None  # base URL of an OpenAI-compatible server; None is OPENAI_BASE_URL, or OpenAI's own
    prompt: Path | None = None  # file of another prompt, such as the official one; None is our own wording
    runs: int = 1  # how often every answer is judged
    # fields of every request, in place of the official ones; None leaves one out
    options: Mapping[str, Any] = field(default_factory=dict)
    out: Path = Path("results/judge")  # folder of all judged runs
    concurrency: int = 8  # requests in flight at once
    timeout: float = 60.0  # seconds a server may be silent, as the openai package counts them
    tries: int = 8  # of one request, the first included

    def __post_init__(self) -> None:
        if not self.model:
            raise OptionError("--judge-model is empty: name the judge as its server calls it")
        positive = {"--runs": self.runs, "--concurrency": self.concurrency, "--judge-tries": self.tries}
        for option, value in {**positive, "--judge-timeout": self.timeout}.items():
            if not value > 0:
                raise OptionError(f"{option} {value} must be above 0")
        check_url(self.place)
        key = os.environ.get(KEY)
        for name, value in self.options.items():
            if re.search(r"api.?key|authorization", name, re.I) or (key and key in f"{name} {value}"):
                raise OptionError(f"--judge-option: no key in an option, it is recorded. Set {KEY} instead")

    @property
    def place(self) -> str:
        return (self.url or os.environ.get("OPENAI_BASE_URL") or OPENAI).rstrip("/")


def check_url(url: str, option: str = "--judge-url") -> None:
    """Raises OptionError unless it is a base URL without a key; shows no more of it than the host."""
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
    """The replies so far, by the hash of their request, and the file they are appended to. One process at a time:
    BusyError for another. A last line cut by a kill is dropped; DataError for a damaged one.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.known: dict[str, Reply] = {}
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
            log.warning("%s: the last line was cut in the middle of a write; dropped it", self.path)


class JudgeClient:
    """Sends requests and stores the replies. Use it inside one event loop, then `close` it."""

    def __init__(self, config: JudgeConfig, replies: Replies) -> None:
        self._config, self._replies, self._key = config, replies, os.environ.get(KEY, "").strip()
        self._failed = 0  # requests in a row without a reply
        self._ended: ConsensusError | None = None  # why nothing more is asked
        self._free = asyncio.Semaphore(config.concurrency)
        self._turns: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # equal requests: only the first is sent

    @cached_property
    def _api(self) -> Any:
        try:
            import openai
        except ImportError as error:
            raise missing_extra("a judge is asked through the openai package", "judge") from error
        if not self._key and self._config.place == OPENAI:
            raise OptionError(f"{KEY} is not set: {OPENAI} wants a key. It is read from the environment only")
        return openai.AsyncOpenAI(
            api_key=self._key or "none",
            base_url=self._config.place,
            timeout=self._config.timeout,
            max_retries=self._config.tries - 1,
            http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False),  # the key goes to this server only
        )

    async def close(self) -> None:
        if "_api" in self.__dict__:
            await self._api.close()

    async def ask(self, request: Mapping[str, Any]) -> Reply:
        """The reply to a request (url, body, draw), from the store if it is there.

        Raises:
            NoReply: all tries failed, or the server refuses this request.
            JudgeError: no access, no credit, an unknown model, or a server that fails all requests.
        """
        key = key_of(request)
        async with self._turns[key], self._free:
            if key in self._replies.known:
                return self._replies.known[key]
            if self._ended:
                raise self._ended
            try:
                reply = await self._send(request["body"])
            except NoReply as error:
                self._failed += 1
                if self._failed < max(FEWEST, self._config.concurrency):
                    raise
                failed = f"{self._failed} requests failed, the last: {error}"
                self._ended = JudgeError(f"{self._config.place} answers nobody: {failed}")
                raise self._ended from None
            except ConsensusError as error:
                self._ended = error
                raise
            self._failed = 0
            self._replies.add(request, reply)
        return reply

    async def _send(self, body: Mapping[str, Any]) -> Reply:
        options = {name: value for name, value in body.items() if name not in ("model", "messages")}
        create = self._api.chat.completions.create
        import openai

        try:
            answer = await create(model=body["model"], messages=body["messages"], extra_body=options)
            return read_completion(answer)
        except openai.APIStatusError as error:
            status, text = error.status_code, f"{error.status_code} {error.message}"
            if status in OF_THIS_REQUEST and REFUSALS.search(error.message):
                return Reply(None)
            hopeless = status in (401, 404) or 300 <= status < 400 or "insufficient_quota" in text
            if hopeless or NEW_LIMIT in text:
                hint = OTHER_LIMIT if NEW_LIMIT in text else ""
                raise JudgeError(f"{self._config.place} will not judge: {self._shown(text)}{hint}") from None
            raise NoReply(self._shown(text)) from None
        except (openai.OpenAIError, ValueError, RecursionError) as error:
            raise NoReply(self._shown(f"{type(error).__name__}: {error.__cause__ or error}")) from None

    def _shown(self, complaint: str) -> str:
        """A server's error message without the key, which it may quote."""
        return (complaint.replace(self._key, "[key]") if self._key else complaint)[:COMPLAINT]


def read_completion(answer: Any) -> Reply:
    """The reply in a chat completion; a refusal has no text. ValueError for anything else."""
    try:
        choice = answer.choices[0]
        text, refused = choice.message.content, choice.message.refusal or choice.finish_reason == "content_filter"
    except (AttributeError, IndexError, TypeError) as error:
        raise ValueError(f"not a chat completion: {error}") from None
    if not isinstance(text, str | None):
        raise ValueError(f"not a chat completion: the content is a {type(text).__name__}")
    used = [getattr(answer.usage, name, None) for name in ("prompt_tokens", "completion_tokens")]
    return Reply(None if refused else text, answer.model, *used)
