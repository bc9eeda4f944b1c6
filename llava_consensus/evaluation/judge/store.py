"""Every request that was sent and every reply to it, in one file that is only ever appended to.

`replies.jsonl` holds lines of three kinds: `sent` (before a request goes out), `failed` (a try that got no usable
reply) and `reply`. A request is known by the hash of all that can change its reply: server, model, messages, options,
and which of several draws it is. A reply is on the disk before anything is made of it, so a killed judge goes on where
it was, and answers that were judged before, under any method, are not asked again. Only the last line can be cut by a
kill; it is dropped and reported. `replies.lock` is held while a process works with it.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llava_consensus.errors import DataError
from llava_consensus.evaluation.files import Record, append, canonical, parse, whole_lines
from llava_consensus.evaluation.locks import check_lock, take_lock

NAME, LOCK = "replies.jsonl", "replies.lock"


class Reply(NamedTuple):
    """What a server said to one request."""

    text: str | None
    refused: bool  # by its content filter, or in the field for refusals
    model: str | None  # as the server reports it
    prompt_tokens: int | None
    completion_tokens: int | None
    limited: bool  # the server had refused the request before, for its rate limit


def key_of(request: Mapping[str, Any]) -> str:
    """The hash of a whole request."""
    return hashlib.sha256(canonical(request).encode()).hexdigest()


class Replies:
    """The open file: what was heard so far, and the only way to add to it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.known: dict[str, Reply] = {}
        self.failed: Counter[str] = Counter()  # tries without a usable reply, by request
        self.in_flight: Counter[str] = Counter()  # sent, and never heard of again: their process was stopped
        self.under_way: Counter[str] = Counter()  # sent by this process, and not heard of yet
        self.repairs: list[str] = []
        self.hide: Callable[[Any], Any] = lambda value: value  # takes the server's key out of what is written
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(folder / LOCK, "the judge's replies")
        except OSError as error:
            raise DataError(f"{self.path}: cannot be written ({error.strerror}). Choose another --out") from None
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    def sent(self, key: str) -> None:
        """Notes that a request goes out; if nothing follows, its process was stopped and it may have been charged."""
        self._append({"event": "sent", "key": key}, sync=False)
        self.under_way[key] += 1

    def fail(self, key: str, reason: str) -> None:
        """Notes a try that got no usable reply."""
        self._append({"event": "failed", "key": key, "reason": self.hide(reason)}, sync=False)
        self.failed[key] += 1
        self.under_way[key] -= 1

    def add(self, key: str, request: Mapping[str, Any], reply: Reply, raw: Any, at: str) -> None:
        """Stores a reply; when this returns it is on the disk."""
        heard = self.hide({"request": request, **reply._asdict(), "raw": raw})
        self._append({"event": "reply", "key": key, "at": at, **heard})
        self.known[key] = reply
        self.under_way[key] -= 1

    def _append(self, line: Record, sync: bool = True) -> None:
        check_lock(self._lock, self.path.with_name(LOCK))
        append(self.path, [line], sync)

    def close(self) -> None:
        """Lets the next process have the file."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> "Replies":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self) -> None:
        lines, end = whole_lines(self.path)
        for number, line in enumerate(lines, start=1):
            try:
                self._take(parse(self.path, number, line, ("event", "key")))
            except (KeyError, TypeError) as error:
                raise DataError(
                    f"{self.path}, line {number}: damaged ({error!r}). Mend or remove the line; nothing was changed"
                ) from None
        if end is not None:
            os.truncate(self.path, end)
            self.repairs.append(f"{self.path}: the last line was cut in the middle of a write; dropped it")

    def _take(self, line: Record) -> None:
        event, key = line["event"], line["key"]
        if event == "sent":
            self.in_flight[key] += 1
            return
        self.in_flight[key] -= 1
        if event == "failed":
            self.failed[key] += 1
        else:
            self.known[key] = Reply(**{name: line[name] for name in Reply._fields})
